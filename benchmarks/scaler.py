"""What the scaler costs beside torch.amp's, on the CPU: `python -m benchmarks.scaler [--quick] [--json
FILE]`.

Both scalers do the same work in turns, pair by pair, so that whatever else the machine does hits both. A row
gives medians of times and of ratios, with 20 % and 80 % quantiles of the ratios; below 1 ampkit is faster.
Before a case is timed, both results are compared: no number comes from a wrong answer.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ampkit.scaler.grad_scaler import GradScaler

SCALERS = (torch.amp.GradScaler, GradScaler)


@dataclass(frozen=True)
class Case:
    """What is timed: `job` on `tensors` float32 gradients of `elements` each."""

    name: str
    job: str
    tensors: int
    elements: int
    target: float
    """The ratio that the project has promised to stay at or below."""


CASES = (
    Case("unscale_ 50 x 200k", "unscale", 50, 200_000, 1.1),
    Case("unscale_ 8 x 4M", "unscale", 8, 4_000_000, 1.1),
    Case("unscale_ + clip 50 x 200k", "clip", 50, 200_000, 0.75),
    Case("unscale_ + clip 8 x 4M", "clip", 8, 4_000_000, 0.75),
    Case("scale + step + update, 1 parameter", "iterate", 1, 4, 1.0),
    Case("scale + step + update, 100 parameters", "iterate", 100, 4, 1.0),
    Case("scale + step + update, 1000 parameters", "iterate", 1000, 4, 1.0),
)
QUICK = (Case("unscale_ 3 x 100", "unscale", 3, 100, 1.1), Case("clip 3 x 100", "clip", 3, 100, 0.75), CASES[4])


@dataclass(frozen=True)
class Row:
    """One measured case; times in microseconds."""

    name: str
    torch_us: float
    ampkit_us: float
    ratio: float
    ratio_20: float
    ratio_80: float
    target: float
    pairs: int


class NoStep(torch.optim.SGD):
    """An optimizer whose step does nothing: what remains is the scaler's own time."""

    def step(self, closure: Any = None) -> None:
        return None


def make_job(case: Case, cls: type[torch.amp.GradScaler]) -> tuple[Callable[[], None], list[torch.Tensor]]:
    """The work to time, and the gradients that it changes. Scales are powers of two: results must be equal.
    """
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.zeros(case.elements)) for _ in range(case.tensors)]
    for param in params:
        param.grad = torch.randn(case.elements, generator=generator)
    optimizer = NoStep(params, lr=0.1)
    scaler = cls("cpu", 2.0, growth_interval=2**30)
    loss = torch.ones((), requires_grad=True)
    scaler.scale(loss)

    def unscale() -> None:
        scaler.unscale_(optimizer)
        scaler._per_optimizer_states.clear()  # READY again, without update(): it is timed elsewhere

    def clip() -> None:
        if isinstance(scaler, GradScaler):
            scaler.clip_grad_norm_(optimizer, 1.0)
        else:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(params, 1.0)
        scaler._per_optimizer_states.clear()

    def iterate() -> None:
        scaler.scale(loss)
        scaler.step(optimizer)
        scaler.update()

    jobs = {"unscale": unscale, "clip": clip, "iterate": iterate}
    return jobs[case.job], [param.grad for param in params if param.grad is not None]


def seconds(job: Callable[[], None]) -> float:
    begin = time.perf_counter()
    job()
    return time.perf_counter() - begin


def measure(case: Case, pairs: int) -> Row:
    """Compare results, warm up, then time in turns, the order within a pair alternating.

    Raises:
        RuntimeError: the two scalers left different gradients.
    """
    (theirs, their_grads), (ours, our_grads) = (make_job(case, cls) for cls in SCALERS)
    for _ in range(3):
        theirs()
        ours()
    if not all(map(torch.equal, their_grads, our_grads)):
        raise RuntimeError(f"{case.name}: the scalers left different gradients; nothing is timed")
    times: list[tuple[float, float]] = []
    for i in range(pairs):
        for grads in (their_grads, our_grads):
            torch._foreach_mul_(grads, 2.0)  # what unscaling has halved: no gradient fades to zero
        if i % 2:
            b = seconds(ours)
            times.append((seconds(theirs), b))
        else:
            times.append((seconds(theirs), seconds(ours)))
    ratios = sorted(b / a for a, b in times)
    return Row(
        case.name,
        statistics.median(a for a, _ in times) * 1e6,
        statistics.median(b for _, b in times) * 1e6,
        statistics.median(ratios),
        ratios[len(ratios) // 5],
        ratios[len(ratios) * 4 // 5],
        case.target,
        pairs,
    )


def setting() -> dict[str, Any]:
    """What a reader needs to know to judge the numbers."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Measure and print; returns the rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaler", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: checks that the benchmark works")
    parser.add_argument("--json", type=Path, help="write rows and setting to this file")
    arguments = parser.parse_args(argv)
    about = setting()
    print(f"torch {about['torch']}, {about['threads']} thread(s), load {about['load_before']} before the start")
    print(f"{'case':40} {'torch us':>10} {'ampkit us':>10} {'ratio':>6}  20-80 %      target")
    rows = []
    for case in QUICK if arguments.quick else CASES:
        row = measure(case, 15 if arguments.quick else 300 if case.job == "iterate" else 40)
        rows.append(row)
        print(
            f"{row.name:40} {row.torch_us:10.1f} {row.ampkit_us:10.1f} {row.ratio:6.3f}  "
            f"{row.ratio_20:.3f}-{row.ratio_80:.3f}  {row.target:.2f}",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"setting": about, "rows": [asdict(row) for row in rows]}, indent=1))
    return rows


if __name__ == "__main__":
    main()
