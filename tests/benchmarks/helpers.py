"""What tests of the benchmarks share: a clock that is set by the test, small cases, rows of results."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import results, timing, trainer, training, workloads
from benchmarks.case import AMPKIT, TORCH, Aim, Case, Side
from benchmarks.environment import describe
from benchmarks.timing import HostClock

CPU = torch.device("cpu")


class FakeClock:
    """Seconds that pass only when a job says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def job(self, *seconds: float) -> timing.Run:
        """A job that takes these times in turn, again and again."""
        taken = itertools.cycle(seconds)

        def run(calls: int) -> None:
            for _ in range(calls):
                self.now += next(taken)

        return run


TINY = {
    "digits": lambda: workloads.digits(4),
    "characters": lambda: workloads.characters(2, 8, 16, 2),
    "gpt": lambda: workloads.gpt(16, 2, 2, 8, 32, 2),
    "resnet": lambda: workloads.resnet(8, (1, 2, 2), 2, 64, 5),
    "lstm": lambda: workloads.lstm(16, 2, 2, 5, 32),
}


def tiny_case(variant: trainer.Variant, workload: Callable[[], workloads.Workload]) -> training.Training:
    return training.Training(name="tiny", variant=variant, workload=workload)


def sleepy_case(**options: Any) -> tuple[Case, HostClock]:
    """A case whose sides take 2 and 1 seconds on a clock of its own."""
    clock = FakeClock()

    class Sleepy(Case):
        def sides(self, device: torch.device) -> dict[str, Side]:
            return {TORCH: Side(clock.job(2.0)), AMPKIT: Side(clock.job(1.0), facts=lambda: {"casts": 3})}

    case = Sleepy(family="training", name="sleepy", aims=(Aim(AMPKIT, 0.4), Aim("absent", 1.0)), **options)
    return case, HostClock(clock, clock)


def sample_row(name: str, ratio: float, width: float = 0.01, **more: Any) -> dict[str, Any]:
    """A row as `measure` makes it, with torch.amp at 2 ms and ampkit at `ratio` of it."""

    def side(factor: float, facts: dict[str, Any]) -> dict[str, Any]:
        spread = {"median": factor, "low": factor - width, "high": factor + width}
        times = {key: value * 2e-3 for key, value in spread.items()}
        return {"wall": times, "host": times, "cpu": times, "ratio": spread, "cpu_ratio": spread, "facts": facts}

    facts = {"final_loss": 0.25, "peak_bytes": 3 << 20, "copies": 7, "launches": None}
    row = {
        "family": "training", "name": name, "base": TORCH, "device": "cpu", "clock": "host",
        "rounds": 9, "calls": 1, "load": 0.5, "sides": {TORCH: side(1.0, facts), AMPKIT: side(ratio, facts)},
        "aims": [{"side": AMPKIT, "base": TORCH, "limit": 1.0, "ratio": side(ratio, {})["ratio"]}],
        "environment": {
            **describe(CPU), "gate": "all passed", "effort": 1.0, "device": "a machine", "commit": "abc", "dirty": True,
            "python_calls": {"region": ["12 / 15", "4 / 7"]},
        },
    }
    return {**row, **more}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    for row in rows:
        results.append(path, row)
    return path
