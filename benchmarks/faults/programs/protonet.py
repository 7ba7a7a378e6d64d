"""Trains a prototypical network on episodes of drawn patterns."""

import argparse

import torch
from protonet import ProtoNet
from prototypical_loss import prototypical_loss

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="float16")
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()
dtype = getattr(torch, options.dtype)
torch.manual_seed(options.seed)

patterns = (torch.randn(20, 1, 16, 16) > 0.5).float()
model = ProtoNet(hid_dim=16, z_dim=16)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, gamma=0.5, step_size=15)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=options.dtype == "float16")


def episode():
    classes = torch.randperm(20)[:5]
    targets = classes.repeat(6)
    images = patterns[targets] + 0.4 * torch.randn(30, 1, 16, 16)
    return images, targets


losses = []
accuracies = torch.zeros(())
model.train()
for _ in range(25):
    images, targets = episode()
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
        features = model(images)
        loss, accuracy = prototypical_loss(features, targets, 3)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    accuracies += accuracy
    losses.append(loss.item())

model.eval()
tested = torch.zeros(())
with torch.no_grad():
    for _ in range(10):
        images, targets = episode()
        with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
            tested += prototypical_loss(model(images), targets, 3)[1]
metrics = {"training accuracy": (accuracies / 25).item(), "accuracy": (tested / 10).item()}
print(losses[0], losses[-1], metrics)
