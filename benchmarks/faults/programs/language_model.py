"""Trains the LSTM language model of PyTorch's examples on a made-up text, with truncated backpropagation."""

import argparse

import torch
from model import RNNModel
from torch.nn import functional

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="bfloat16")
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()
dtype = getattr(torch, options.dtype)
torch.manual_seed(options.seed)

start = torch.randint(25, (8,))
text = (start + torch.arange(1, 242)[:, None] * torch.tensor([1, 2, 3, 1, 2, 3, 1, 2])) % 25
model = RNNModel("RNN_TANH", 25, 32, 32, 1, dropout=0.0, tie_weights=True)
optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
scaler = torch.amp.GradScaler("cpu", enabled=options.dtype == "float16")

losses = []
hidden = model.init_hidden(8)
for first in range(0, 240, 10):
    tokens, targets = text[first : first + 10], text[first + 1 : first + 11]
    hidden = hidden.detach().float()
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
        output, hidden = model(tokens, hidden)
        loss = functional.nll_loss(output, targets.reshape(-1))
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())

with torch.no_grad():
    total = torch.zeros(())
    words = torch.zeros(())
    hidden = model.init_hidden(8)
    for first in range(0, 240, 10):
        tokens, targets = text[first : first + 10], text[first + 1 : first + 11]
        with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
            output, hidden = model(tokens, hidden.float())
        total += functional.nll_loss(output.float(), targets.reshape(-1), reduction="sum")
        words += targets.numel()
metrics = {"perplexity": (total / words).exp().item(), "words": words.item()}
print(losses[0], losses[-1], metrics)
