"""Trains a ResNet for CIFAR on noisy patterns, with SGD and an evaluation after the epoch."""

import argparse

import torch
from models.preact_resnet import PreActBlock, PreActResNet
from torch.nn import functional

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="float16")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--workers", type=int, default=0)
options = parser.parse_args()
dtype = getattr(torch, options.dtype)
torch.manual_seed(options.seed)

patterns = torch.randn(10, 3, 32, 32)
labels = torch.arange(40) % 10
images = patterns[labels] + 0.5 * torch.randn(40, 3, 32, 32)
dataset = torch.utils.data.TensorDataset(images, labels)
loader = torch.utils.data.DataLoader(dataset, batch_size=4, shuffle=True, num_workers=options.workers)

model = PreActResNet(PreActBlock, [1, 1, 1, 1])
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
scaler = torch.amp.GradScaler("cpu", enabled=options.dtype == "float16")

losses = []
running = torch.zeros(())
for batch, targets in loader:
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
        outputs = model(batch)
        loss = functional.cross_entropy(outputs.float(), targets, label_smoothing=0.1)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    running += loss.detach() * len(batch)
    losses.append(loss.item())

model.eval()
correct = torch.zeros(())
with torch.no_grad():
    with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
        outputs = model(images[:40])
    correct += (outputs.argmax(-1) == labels[:40]).sum()
metrics = {"mean loss": (running / len(images)).item(), "accuracy": correct.item() / 40}
print(losses[0], losses[-1], metrics)
