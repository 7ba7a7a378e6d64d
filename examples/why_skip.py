"""A bad batch, with `skip_above` and without.

The inputs of one batch, in step 60, are 100 times too large. Its gradients are finite, so a scaler executes the step,
later steps overflow, and the loss scale falls to its minimum. `skip_above` skips the step. Needs scikit-learn.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import ampkit


def train(skip_above):
    """Train with the bad batch; return losses and scales."""
    pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = pixels.float() / 16
    torch.manual_seed(0)
    hidden = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.ReLU())]
    model = nn.Sequential(*hidden, nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scaler = ampkit.GradScaler("cpu", 2.0**8, growth_interval=50, skip_above=skip_above, on_stuck=lambda stats: None)
    losses = []
    for number, rows in enumerate(torch.randint(1797, (220, 64))):
        optimizer.zero_grad()
        with ampkit.autocast("cpu", torch.float16):
            loss = cross_entropy(model(images[rows] * (100 if number == 60 else 1)), labels[rows])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses, [row["scale"] for row in scaler.history]


def main():
    """Train both ways; return losses and scales of each."""
    plain, guarded = train(None), train(ampkit.TimesMedian(30.0))
    for name, (losses, scales) in (("without skip_above", plain), ("with skip_above", guarded)):
        print(f"{name}: last loss {losses[-1]:.3f}, last scale {scales[-1]:g}")
    return plain, guarded


if __name__ == "__main__":
    main()
