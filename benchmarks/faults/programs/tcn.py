"""Trains a temporal convolutional network on the adding problem, with the repository's data generator."""

import argparse

import numpy
import torch
from TCN.adding_problem.model import TCN
from TCN.adding_problem.utils import data_generator
from torch.nn import functional

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="float16")
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()
dtype = getattr(torch, options.dtype)
torch.manual_seed(options.seed)
numpy.random.seed(options.seed)

inputs, targets = data_generator(160, 40)
features = inputs + 0.01 * torch.randn(160, 2, 40)
model = TCN(2, 1, [16, 16, 16], kernel_size=5, dropout=0.0)
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
scaler = torch.amp.GradScaler("cpu", enabled=options.dtype == "float16")

losses = []
model.train()
for _ in range(25):
    chosen = torch.randint(128, (16,))
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
        predicted = model(features[chosen])
        loss = functional.mse_loss(predicted.float(), targets[chosen])
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())

model.eval()
with torch.no_grad():
    with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
        predicted = model(features[128:])
    metrics = {"error": functional.mse_loss(predicted.float(), targets[128:]).item()}
print(losses[0], losses[-1], metrics)
