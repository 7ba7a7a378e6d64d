"""Trains an encoder with the supervised contrastive loss, on two views of each sample."""

import argparse

import torch
from losses import SupConLoss
from torch import nn
from torch.nn import functional

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="float16")
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()
dtype = getattr(torch, options.dtype)
torch.manual_seed(options.seed)

centers = torch.randn(6, 32)
labels = torch.arange(96) % 6
signals = centers[labels] + 0.7 * torch.randn(96, 32)

model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
criterion = SupConLoss(temperature=0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
scaler = torch.amp.GradScaler("cpu", enabled=options.dtype == "float16")

losses = []
for _ in range(25):
    chosen = torch.randperm(96)[:24]
    views = torch.cat([signals[chosen] + 0.1 * torch.randn(24, 32) for _ in range(2)])
    with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
        embedded = functional.normalize(model(views).float(), dim=1)
        first, second = embedded.chunk(2)
        loss = criterion(torch.stack([first, second], dim=1), labels[chosen])
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())

model.eval()
with torch.no_grad():
    with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
        embedded = functional.normalize(model(signals).float(), dim=1)
    similar = embedded @ embedded.T - 2 * torch.eye(96)
    accuracy = (labels[similar.argmax(1)] == labels).float().mean()
metrics = {"nearest neighbor": accuracy.item()}
print(losses[0], losses[-1], metrics)
