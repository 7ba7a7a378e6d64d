"""Trains a small vision transformer in bfloat16 or float16 regions of ampkit, by batches of a loader."""

import argparse

import torch
from torch.nn import functional
from vit_pytorch.simple_vit import SimpleViT

from ampkit import GradScaler, autocast

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="float16")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--workers", type=int, default=0)
options = parser.parse_args()
dtype = getattr(torch, options.dtype)
torch.manual_seed(options.seed)

patterns = torch.randn(8, 3, 16, 16)
labels = torch.arange(128) % 8
images = patterns[labels] + torch.randn(128, 3, 16, 16)
loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(images, labels), batch_size=16, shuffle=True, num_workers=options.workers
)
model = SimpleViT(image_size=16, patch_size=4, num_classes=8, dim=32, depth=2, heads=2, mlp_dim=64, dim_head=16)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scaler = GradScaler("cpu", init_scale=1024.0, enabled=options.dtype == "float16")

losses = []
for _ in range(3):
    running = torch.zeros(())
    for batch, targets in loader:
        with autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
            outputs = model(batch)
            loss = functional.cross_entropy(outputs, targets)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        running += loss.detach()
        losses.append(loss.item())

model.eval()
right = torch.zeros(())
with torch.no_grad():
    for batch, targets in loader:
        with autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
            outputs = model(batch)
        right += (outputs.argmax(-1) == targets).sum()
metrics = {"running": (running / len(loader)).item(), "accuracy": right.item() / 128}
print(losses[0], losses[-1], metrics)
