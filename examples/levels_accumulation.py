"""Gradient accumulation with `scale_loss`, in the two ways that Apex's documentation gives.

By default every backward is unscaled and added, in float32 at O2. With `delay_unscale` micro-batches add up scaled,
and only the last backward before a step unscales.

    python examples/levels_accumulation.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from ampkit import amp


def main(delay: bool = False, opt_level: str = "O2", micro_batches: int = 4, epochs: int = 6) -> float:
    """Train on batches of 64 in micro-batches of 16; return the held-out accuracy."""
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    held_out = torch.arange(len(y)) % 5 == 0

    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)

    train_x, train_y = x[~held_out], y[~held_out]
    size = 64 // micro_batches
    for _ in range(epochs):
        rows = torch.randperm(len(train_y))
        chunks = rows[: len(rows) // 64 * 64].split(size)
        for index, part in enumerate(chunks):
            last = (index + 1) % micro_batches == 0
            loss = F.cross_entropy(model(train_x[part]), train_y[part]) / micro_batches
            with amp.scale_loss(loss, optimizer, delay_unscale=delay and not last) as scaled_loss:
                scaled_loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()

    model.eval()
    with torch.no_grad():
        accuracy = (model(x[held_out]).argmax(1) == y[held_out]).double().mean().item()
    print(f"{opt_level}, delay_unscale={delay}: accuracy {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    for choice in (False, True):
        main(choice)
