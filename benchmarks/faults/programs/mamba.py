"""Trains a small Mamba on copied sequences, with accumulated micro-batches, in ampkit's regions."""

import argparse

import torch
from model import Mamba, ModelArgs
from torch.nn import functional

from ampkit import GradScaler, autocast

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="float16")
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()
dtype = getattr(torch, options.dtype)
torch.manual_seed(options.seed)
accumulation = 2

model = Mamba(ModelArgs(d_model=16, n_layer=2, vocab_size=16, d_state=4))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scaler = GradScaler("cpu", init_scale=1024.0, enabled=options.dtype == "float16")


def batch():
    half = torch.randint(1, 16, (8, 6))
    tokens = torch.cat([half, half], dim=1)
    return tokens[:, :-1], tokens[:, 1:]


losses = []
for _ in range(16):
    total = torch.zeros(())
    for _ in range(accumulation):
        tokens, targets = batch()
        with autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
            logits = model(tokens)
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()) / accumulation
        scaler.scale(loss).backward()
        total += loss.detach()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    losses.append(total.item())

model.eval()
with torch.no_grad():
    seen = torch.zeros(())
    total = torch.zeros(())
    for _ in range(8):
        tokens, targets = batch()
        with autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
            logits = model(tokens)
        total += functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        seen += targets.numel()
metrics = {"perplexity": (total / seen).exp().item(), "seen": seen.item()}
print(losses[0], losses[-1], metrics)
