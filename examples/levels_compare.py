"""O0 to O3 side by side on digits: accuracy, time per step, and bytes held per parameter, in one table.

Steps of the four runs alternate, so that other load on the machine affects all of them; times are medians. On a CPU
without 16-bit arithmetic float32 is the fastest.

    python examples/levels_compare.py --dtype bf16
"""

import argparse
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from ampkit import amp
from ampkit.text_tables import table

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Run:
    """One level's model, optimizer and measurements."""

    def __init__(self, opt_level: str, dtype: torch.dtype, device: str) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(512, 10),
        ).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        low: dict[str, Any] = {} if opt_level == "O0" else {"dtype": dtype}
        self.opt_level = opt_level
        self.model, self.optimizer = amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0, **low)
        self.times: list[float] = []
        self.bytes_per_parameter = 0.0

    def step(self, x: Tensor, y: Tensor) -> None:
        """One training step, timed."""
        wait(x.device)
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        with amp.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()
        self.bytes_per_parameter = self.count_bytes()
        self.optimizer.step()
        wait(x.device)
        self.times.append(time.perf_counter() - start)

    def count_bytes(self) -> float:
        """Weights, masters, gradients and momenta held between backward and step."""
        params = {*self.model.parameters(), *amp.master_params(self.optimizer)}
        held = params | {p.grad for p in params if p.grad is not None}
        held |= {v for s in self.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)}
        return sum(t.nbytes for t in held) / sum(p.numel() for p in self.model.parameters())

    def accuracy(self, x: Tensor, y: Tensor) -> float:
        """Return the share of digits recognized."""
        self.model.eval()
        with torch.no_grad():
            return (self.model(x).argmax(1) == y).double().mean().item()


def wait(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def main(dtype: str = "bf16", epochs: int = 6, device: str = "cpu") -> dict[str, dict[str, float]]:
    """Train all four, print the table, and return its numbers."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32, device=device).view(-1, 1, 8, 8) / 16
    y = torch.tensor(labels, device=device)
    held_out = torch.arange(len(y), device=device) % 5 == 0
    runs = [Run(level, DTYPES[dtype], device) for level in ("O0", "O1", "O2", "O3")]
    order = torch.Generator().manual_seed(0)
    train_x, train_y = x[~held_out], y[~held_out]
    for _ in range(epochs):
        for rows in torch.randperm(len(train_y), generator=order).split(64):
            for run in runs:
                run.step(train_x[rows], train_y[rows])
    rows, shown = {}, [("level", "accuracy", "ms/step", "bytes/parameter")]
    for run in runs:
        row = {
            "accuracy": run.accuracy(x[held_out], y[held_out]),
            "ms": 1e3 * statistics.median(run.times),
            "bytes": run.bytes_per_parameter,
        }
        shown.append((run.opt_level, f"{row['accuracy']:.1%}", f"{row['ms']:.2f}", f"{row['bytes']:.1f}"))
        rows[run.opt_level] = row
    print(*table(shown, {"accuracy", "ms/step", "bytes/parameter"}), sep="\n")
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    main(options.dtype, options.epochs, options.device)
