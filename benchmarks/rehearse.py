"""`python -m benchmarks.rehearse`: reports of `debugging.rehearse` on models whose loss of precision is measured.

`--truth` trains the pairs that the truth is known by. Prints a line for each model and seed, and writes them as JSON.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ampkit import GradScaler, Policy, autocast
from ampkit.debugging import rehearse
from benchmarks.fragile_models import MODELS, Batch, Model, loss_of

STEPS = 300  # of a training for the truth; its loss is the mean of the last 60


def main(argv: Sequence[str] | None = None) -> int:
    """Run the models. Exit status 1 if a report is wrong."""
    command = argparse.ArgumentParser(prog="python -m benchmarks.rehearse", description="reports of debugging.rehearse")
    command.add_argument("patterns", nargs="*", help="models by shell pattern; by default all but the slow ones")
    command.add_argument("--seeds", type=int, nargs="+", default=[51, 52, 53], help="of weights and batches")
    command.add_argument("--steps", type=int, default=40, help="of each short training")
    command.add_argument("--warm-up", type=int, default=80, help="steps before all of them")
    command.add_argument("--truth", action="store_true", help="train the pairs of 300 steps instead")
    command.add_argument("--out", type=Path, help="file to append a line of JSON per report to")
    options = command.parse_args(argv)
    torch.set_num_threads(1)
    wrong = 0
    for model in MODELS:
        if not any(fnmatch.fnmatch(model.name, pattern) for pattern in options.patterns or ["*"]):
            continue
        if not (options.patterns or model.everyday):
            continue
        for seed in options.seeds:
            began = time.process_time()
            row = truth(model, seed) if options.truth else report_row(model, seed, options.steps, options.warm_up)
            row = {"model": model.name, "fragile": bool(model.place), "seed": seed, **row}
            row["seconds"] = round(time.process_time() - began, 1)
            wrong += not row.get("right", True)
            print(row, flush=True)
            if options.out:
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    return int(wrong > 0)


def region(model: Model, module: nn.Module) -> AbstractContextManager[Any]:
    """Return the region whose precision is tested."""
    policy = Policy.default("cpu")
    if model.rule is not None:
        policy = policy.with_rules({"aten::linear": model.rule})
    if model.low_precision:
        policy = policy.for_modules(module, {model.low_precision: Policy.default("cpu")})
    return autocast("cpu", model.dtype, policy=policy)


def reference(model: Model) -> AbstractContextManager[Any]:
    """Return the region of the reference: bfloat16 for FP8, none (float32) for 16-bit dtypes."""
    return nullcontext() if model.rule is None else autocast("cpu", torch.bfloat16)


def train(model: Model, module: nn.Module, batches: list[Batch], around: Any) -> Iterator[float]:
    """Train, and yield the losses."""
    optimizer = torch.optim.Adam(module.parameters(), lr=model.lr)
    scaler = GradScaler("cpu", growth_interval=100, enabled=model.dtype is torch.float16)
    for batch in batches:
        optimizer.zero_grad()
        with around():
            loss = loss_of(module, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        yield loss.item()


def drawn(model: Model, seed: int, steps: int) -> tuple[nn.Module, list[Batch]]:
    """Weights and batches of a seed."""
    torch.manual_seed(seed)
    module, batch, generator = model.make(), model.batches(), torch.Generator().manual_seed(1000 + seed)
    return module, [batch(generator) for _ in range(steps)]


def truth(model: Model, seed: int) -> dict[str, Any]:
    """Return the gap of a whole training, relative to the reference's loss."""
    losses = []
    for low in (False, True):
        module, batches = drawn(model, seed, STEPS)
        run = list(train(model, module, batches, lambda m=module, c=low: region(model, m) if c else reference(model)))
        losses.append(statistics.mean(run[-60:]))
    return {"loss": losses[0], "gap": losses[1] / losses[0] - 1}


def report_row(model: Model, seed: int, n_steps: int, warm_up: int) -> dict[str, Any]:
    """Return the report of `rehearse`, and whether it is right."""
    module, batches = drawn(model, seed, max(warm_up, 3 * n_steps))

    def steps() -> Iterator[float]:
        return train(model, module, batches, lambda: region(model, module))

    report = rehearse(steps, module, n_steps=n_steps, warm_up=warm_up)
    right = bool(set(report.modules) & set(model.place)) if model.place else not report
    return {
        "right": right,
        "gap": _rounded(report.gap),
        "error": _rounded(report.error),
        "modules": report.modules,
        "remaining": _rounded(report.remaining),
        "undecided": report.undecided,
        "pairs": report.pairs,
        "steps": report.steps,
    }


def _rounded(value: float | None) -> Any:
    return value if value is None or not math.isfinite(value) else float(f"{value:.3g}")


if __name__ == "__main__":
    raise SystemExit(main())
