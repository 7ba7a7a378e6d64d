"""bfloat16 weights rounded to nearest, with stochastic rounding and with remainders, next to float32 weights.

bfloat16 has 8 significant bits, so an update below 1/512 of a weight is rounded away in every step. Needs scikit-learn.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import ampkit


def train(dtype, **scheme):
    """Train with weights of a dtype and a scheme of `ampkit.optim.AdamW`; return the losses."""
    pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = pixels.float() / 16
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(dtype)
    optimizer, losses = ampkit.optim.AdamW(model.parameters(), lr=1e-4, **scheme), []
    for rows in torch.randint(1797, (300, 64)):
        optimizer.zero_grad()
        with ampkit.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(model(images[rows]), labels[rows])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main():
    """Train four ways; return the losses by name."""
    losses = {
        "float32 weights": train(torch.float32),
        "bfloat16, nearest": train(torch.bfloat16, state_dtype=torch.float32),
        "bfloat16, stochastic": train(torch.bfloat16, rounding="stochastic"),
        "bfloat16, remainder": train(torch.bfloat16, masters="remainder"),
    }
    for name, values in losses.items():
        print(f"{name}: mean of the last 20 losses {sum(values[-20:]) / 20:.3f}")
    return losses


if __name__ == "__main__":
    main()
