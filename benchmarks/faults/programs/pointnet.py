"""Trains a point cloud classifier to tell balls from boxes, with the repository's network and regularizer."""

import argparse

import torch
from pointnet.model import PointNetCls, feature_transform_regularizer
from torch.nn import functional

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="bfloat16")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--workers", type=int, default=0)
options = parser.parse_args()
dtype = getattr(torch, options.dtype)
torch.manual_seed(options.seed)

classes = torch.arange(64) % 2
points = torch.randn(64, 48, 3)
points = torch.where(
    classes[:, None, None] > 0, points / points.norm(dim=2, keepdim=True), points / points.abs().amax(2, keepdim=True)
)
dataset = torch.utils.data.TensorDataset(points + 0.05 * torch.randn(64, 48, 3), classes)
loader = torch.utils.data.DataLoader(dataset, batch_size=8, shuffle=True, num_workers=options.workers)

model = PointNetCls(k=2, feature_transform=True)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.999))
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

losses, right = [], torch.zeros(())
for _ in range(2):
    model.train()
    for data, target in loader:
        data = data.transpose(2, 1)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
            predicted, _, features = model(data)
            loss = functional.nll_loss(predicted, target)
            loss += feature_transform_regularizer(features.float()) * 0.001
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        right += (predicted.argmax(1) == target).sum()
    scheduler.step()

model.eval()
with torch.no_grad():
    with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
        predicted, _, _ = model(points.transpose(2, 1))
    metrics = {"right": right.item(), "accuracy": (predicted.argmax(1) == classes).float().mean().item()}
print(losses[0], losses[-1], metrics)
