"""Trains minGPT on periodic sequences of characters, with an average of the weights."""

import argparse

import torch
from mingpt.model import GPT
from mingpt.utils import CfgNode

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="float16")
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()
dtype = getattr(torch, options.dtype)
torch.manual_seed(options.seed)

config = GPT.get_default_config()
config.model_type, config.vocab_size, config.block_size = None, 24, 16
config.n_layer, config.n_head, config.n_embd = 2, 2, 32
model = GPT(config)
training = CfgNode(weight_decay=0.1, learning_rate=3e-3, betas=(0.9, 0.95))
optimizer = model.configure_optimizers(training)
scaler = torch.amp.GradScaler("cpu", enabled=options.dtype == "float16")
averages = {name: weight.detach().clone() for name, weight in model.named_parameters()}


def batch():
    start = torch.randint(24, (16, 1))
    stride = torch.randint(1, 4, (16, 1))
    tokens = (start + stride * torch.arange(17)) % 24
    return tokens[:, :-1], tokens[:, 1:].contiguous()


losses = []
for _ in range(25):
    tokens, targets = batch()
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
        _, loss = model(tokens, targets)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            averages[name].lerp_(weight, 0.01)


@torch.no_grad()
def evaluate():
    model.eval()
    total = torch.zeros(())
    seen = torch.zeros(())
    for _ in range(12):
        tokens, targets = batch()
        with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
            _, loss = model(tokens, targets)
        total += loss * targets.numel()
        seen += targets.numel()
    return (total / seen).item(), seen.item()


loss, seen = evaluate()
model.load_state_dict(averages, strict=False)
metrics = {"loss": loss, "seen": seen, "loss of the average": evaluate()[0]}
print(losses[0], losses[-1], metrics)
