"""Trains a mixture of experts to classify clusters, with the repository's layer, over two micro-batches a step."""

import argparse

import torch
from experts import MoE

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="float16")
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()
dtype = getattr(torch, options.dtype)
torch.manual_seed(options.seed)

centers = torch.randn(6, 12)
labels = torch.arange(480) % 6
features = centers[labels] + 0.6 * torch.randn(480, 12)

model = MoE(input_size=12, output_size=6, num_experts=6, hidden_size=24, noisy_gating=True, k=2)
model.w_gate.data.normal_(0, 0.1)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=options.dtype == "float16")
accumulation = 2

losses, balance = [], torch.zeros(())
for _ in range(18):
    model.train()
    optimizer.zero_grad()
    for _ in range(accumulation):
        chosen = torch.randint(400, (48,))
        with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
            output, extra = model(features[chosen])
            loss = torch.nn.functional.cross_entropy(output, labels[chosen]) + extra
        scaler.scale(loss / accumulation).backward()
        balance += extra.detach()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())

model.eval()
with torch.no_grad():
    with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
        output, _ = model(features[400:])
    metrics = {
        "accuracy": (output.argmax(1) == labels[400:]).float().mean().item(),
        "balance": balance.item() / 36,
    }
print(losses[0], losses[-1], metrics)
