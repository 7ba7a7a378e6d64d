"""Trains a graph attention network on a random graph of communities, with the repository's layers."""

import argparse

import torch
from models import GAT
from torch.nn import functional

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="bfloat16")
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()
dtype = getattr(torch, options.dtype)
torch.manual_seed(options.seed)

labels = torch.arange(90) % 3
links = torch.rand(90, 90) < torch.where(labels[:, None] == labels, 0.2, 0.03)
adjacency = (links | links.T | torch.eye(90, dtype=torch.bool)).float()
features = torch.randn(90, 24) + torch.nn.functional.one_hot(labels, 24)
training = torch.arange(60)
validation = torch.arange(60, 90)

model = GAT(nfeat=24, nhid=8, nclass=3, dropout=0.2, nheads=2, alpha=0.2)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=5e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=options.dtype == "float16")

losses = []
best = torch.zeros(())
for _ in range(25):
    model.train()
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
        output = model(features, adjacency)
        loss = functional.nll_loss(output[training].float(), labels[training])
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
            output = model(features, adjacency)
        best += (output[validation].argmax(1) == labels[validation]).sum()
metrics = {"accuracy": best.item() / 25 / 30}
print(losses[0], losses[-1], metrics)
