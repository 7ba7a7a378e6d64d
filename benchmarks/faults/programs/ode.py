"""Trains a network to be the right-hand side of a spiral's differential equation, with the repository's solvers."""

import argparse

import torch
from torch import nn
from torchdiffeq import odeint

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="float16")
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()
dtype = getattr(torch, options.dtype)
torch.manual_seed(options.seed)

times = torch.linspace(0.0, 2.0, 9)
matrix = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])
points = torch.rand(64, 2) * 2 - 1
with torch.no_grad():
    paths = odeint(lambda t, y: (y**3) @ matrix, points, times, method="rk4")


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, t, y):
        return self.net(y**3).float()


model = Field()
optimizer = torch.optim.RMSprop(model.parameters(), lr=4e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=options.dtype == "float16")

losses = []
running = torch.zeros(())
for _ in range(18):
    chosen = torch.randint(48, (16,))
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
        predicted = odeint(model, points[chosen], times, method="rk4")
        loss = (predicted - paths[:, chosen]).abs().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
    running += loss.detach()

with torch.no_grad():
    with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
        predicted = odeint(model, points[48:], times, method="dopri5", rtol=1e-3, atol=1e-3)
    metrics = {"error": (predicted - paths[:, 48:]).abs().mean().item(), "running": running.item() / 18}
print(losses[0], losses[-1], metrics)
