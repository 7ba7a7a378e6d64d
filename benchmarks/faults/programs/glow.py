"""Trains a Glow on small images, with the repository's model, loss and clipping."""

import argparse

import torch
from models.glow.glow import Glow
from util.optim_util import NLLLoss, bits_per_dim, clip_grad_norm

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="bfloat16")
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()
dtype = getattr(torch, options.dtype)
torch.manual_seed(options.seed)

images = torch.rand(64, 3, 1, 1) * torch.linspace(0.2, 0.9, 8).expand(64, 3, 8, 8)
images = (images + 0.05 * torch.rand(64, 3, 8, 8)).clamp(0, 1)
model = Glow(num_channels=16, num_levels=2, num_steps=2)
criterion = NLLLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=options.dtype == "float16")

losses = []
model.train()
for _ in range(20):
    chosen = torch.randint(64, (16,))
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
        latent, log_determinant = model(images[chosen])
        loss = criterion(latent, log_determinant)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm(optimizer, 50.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    losses.append(loss.item())

model.eval()
with torch.no_grad():
    total = torch.zeros(())
    for chosen in torch.arange(64).chunk(4):
        with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
            latent, log_determinant = model(images[chosen])
            total += criterion(latent, log_determinant) * len(chosen)
metrics = {"bits": bits_per_dim(images, total / 64).item()}
print(losses[0], losses[-1], metrics)
