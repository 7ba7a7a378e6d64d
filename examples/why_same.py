"""The same training with torch.amp and with ampkit under `policy="torch"`: bitwise identical.

100 steps on handwritten digits in float16. It compares all losses, all weights and the loss scale, and needs
scikit-learn for the data.
"""

import functools

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import ampkit


def train(autocast, GradScaler):
    """Train a small network; return the losses, the weights and the scale at the end."""
    pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = pixels.float() / 16
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler, losses = GradScaler("cpu", growth_interval=20), []
    for rows in torch.randint(1797, (100, 64)):
        optimizer.zero_grad()
        with autocast("cpu", dtype=torch.float16):
            loss = cross_entropy(model(images[rows]), labels[rows])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses, [weight.tolist() for weight in model.parameters()], scaler.get_scale()


def main():
    """Train with both; return both results."""
    theirs = train(torch.autocast, torch.amp.GradScaler)
    ours = train(functools.partial(ampkit.autocast, policy="torch"), ampkit.GradScaler)
    print(f"last loss {ours[0][-1]:.4f}, scale {ours[2]:g}: {'equal to the bit' if ours == theirs else 'different'}")
    return theirs, ours


if __name__ == "__main__":
    main()
