"""Train the demo's GPT with bfloat16 weights only, by each way in which `ampkit.optim.AdamW` can keep small updates.

All runs start from the same weights, which bfloat16 holds exactly, and train on the same batches. Activations are
float32: only weights, their gradients and the optimizer's state differ. Prints the mean training loss of every 50 steps
and bits per character on held-out text, as in benchmarks/results/2026-11-23-bfloat16-weights.md. `--plot losses.svg`
draws the curves (it needs matplotlib). `python examples/optim_bfloat16.py --steps 300`
"""

import argparse
import copy
import math
import re
from typing import Any

import torch
import torch.nn.functional as F

from ampkit.optim import AdamW
from examples.demo import Characters

WAYS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16, nearest": {"state_dtype": torch.bfloat16},
    "bfloat16, nearest, float32 moments": {"state_dtype": torch.float32},
    "bfloat16, stochastic": {"rounding": "stochastic"},
    "bfloat16, stochastic, float32 moments": {"rounding": "stochastic", "state_dtype": torch.float32},
    "bfloat16, remainder": {"masters": "remainder"},
    "bfloat16, remainder, bfloat16 moments": {"masters": "remainder", "state_dtype": torch.bfloat16},
    "bfloat16, remainder, stochastic moments": {
        "masters": "remainder",
        "state_dtype": torch.bfloat16,
        "rounding": "stochastic",
    },
}


def train(task: Characters, model: torch.nn.Module, options: dict[str, Any], steps: int, lr: float) -> list[float]:
    """Return the loss of each step, then bits per character on held-out text."""
    optimizer = AdamW(model.parameters(), lr=lr, **options)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, steps)
    batches, losses = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        codes, following = task.batch(batches)
        weights = {name: param.float() for name, param in model.named_parameters()}
        logits = torch.func.functional_call(model, weights, codes)
        loss = F.cross_entropy(logits.flatten(0, 1), following.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    with torch.no_grad():
        return [*losses, task.evaluate(model.float())]


def means(losses: list[float], count: int) -> list[float]:
    """Return the mean of each `count` losses in a row."""
    parts = [losses[i : i + count] for i in range(0, len(losses), count)]
    return [math.fsum(part) / len(part) for part in parts]


def plot(curves: dict[str, list[float]], path: str) -> None:
    """Draw the mean loss of every 10 steps."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    for name, losses in curves.items():
        points = means(losses, 10)
        axes.plot([10 * (i + 1) for i in range(len(points))], points, label=name, linewidth=1.2)
    axes.set(xlabel="step", ylabel="training loss (nats)")
    axes.legend(frameon=False)
    figure.savefig(path)


def main(argv: list[str] | None = None) -> dict[str, list[float]]:
    """Train and print a row for each way; returns the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--only", default="", help="ways whose name has this, a regular expression")
    parser.add_argument("--plot", help="a file for the curves, as losses.svg")
    options = parser.parse_args(argv)
    task = Characters(torch.device("cpu"))
    torch.manual_seed(0)
    start = task.model().bfloat16().float()
    rows, curves = {}, {}
    for name, arguments in WAYS.items():
        if re.search(options.only, name):
            model = copy.deepcopy(start) if name == "float32" else copy.deepcopy(start).bfloat16()
            *curves[name], held_out = train(task, model, arguments, options.steps, options.lr)
            rows[name] = [*means(curves[name], 50), held_out]
            print(f"| {name} | " + " | ".join(f"{value:.3f}" for value in rows[name]) + " |", flush=True)
    if options.plot:
        plot(curves, options.plot)
    return rows


if __name__ == "__main__":
    main()
