"""Trains a beta-TC VAE on images of bars, with the repository's loss."""

import argparse

import torch
from models.betatc_vae import BetaTCVAE

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="float16")
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()
dtype = getattr(torch, options.dtype)
torch.manual_seed(options.seed)

images = torch.zeros(96, 3, 64, 64)
for index, place in enumerate(torch.randint(4, 52, (96,)).tolist()):
    images[index, index % 3, :, place : place + 8] = 1.0
images = images + 0.02 * torch.randn(96, 3, 64, 64)

model = BetaTCVAE(in_channels=3, latent_dim=6, anneal_steps=20)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=options.dtype == "float16")
average = [weight.detach().clone() for weight in model.parameters()]

losses = []
model.train()
for _ in range(12):
    chosen = torch.randint(96, (8,))
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
        outputs = model(images[chosen])
        loss = model.loss_function(*[output.float() for output in outputs], M_N=8 / 96)["loss"]
    scaler.scale(loss / 8).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
    scaler.step(optimizer)
    scaler.update()
    with torch.no_grad():
        for mean, weight in zip(average, model.parameters(), strict=True):
            mean.mul_(0.99).add_(weight, alpha=0.01)
    losses.append(loss.item())

model.eval()
with torch.no_grad():
    error = torch.zeros(())
    pixels = torch.zeros(())
    for chosen in torch.arange(96).chunk(4):
        with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
            mean, log_variance = model.encode(images[chosen])
            decoded = model.decode(mean)
        error += (decoded.float() - images[chosen]).square().sum()
        pixels += decoded.numel()
    drift = sum((mean - weight).square().sum() for mean, weight in zip(average, model.parameters(), strict=True))
metrics = {"error": (error / pixels).item(), "drift": drift.sqrt().item()}
print(losses[0], losses[-1], metrics)
