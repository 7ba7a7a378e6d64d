"""Trains a small speech recognizer on made-up spectra with a CTC loss, with the repository's encoder."""

import argparse

import torch
from conformer.encoder import ConformerEncoder
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="bfloat16")
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()
dtype = getattr(torch, options.dtype)
torch.manual_seed(options.seed)

sounds = torch.randn(6, 16)
targets = torch.randint(1, 6, (48, 3))
inputs = sounds[targets].repeat_interleave(12, dim=1) + 0.3 * torch.randn(48, 36, 16)
lengths = torch.full((48,), 36)


class Recognizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = ConformerEncoder(
            input_dim=16, encoder_dim=16, num_layers=1, num_attention_heads=2, conv_kernel_size=5
        )
        self.output = nn.Linear(16, 6)

    def forward(self, x, n):
        hidden, n = self.encoder(x, n)
        return self.output(hidden).log_softmax(-1), n


model = Recognizer()
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=1e-6)
criterion = nn.CTCLoss(blank=0)

losses = []
for _ in range(20):
    chosen = torch.randint(40, (8,))
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
        log_probs, n = model(inputs[chosen], lengths[chosen])
        loss = criterion(log_probs.float().transpose(0, 1), targets[chosen], n, torch.full((8,), 3))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 2.0)
    optimizer.step()
    losses.append(loss.item())

model.eval()
with torch.no_grad():
    with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
        log_probs, n = model(inputs[40:], lengths[40:])
    metrics = {
        "ctc": criterion(log_probs.float().transpose(0, 1), targets[40:], n, torch.full((8,), 3)).item(),
        "blank": log_probs.float().exp()[..., 0].mean().item(),
    }
print(losses[0], losses[-1], metrics)
