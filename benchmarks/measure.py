"""From a case to a row of results: check, warm up, time in turns, collect facts."""

from __future__ import annotations

import gc
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.case import Aim, Case
from benchmarks.environment import load
from benchmarks.results import Row
from benchmarks.timing import Clock, EventClock, Sample, Spread, calls_for, clock_for, in_turns, ratios


def measure(case: Case, device: torch.device, *, effort: float = 1.0, clock: Clock | None = None) -> Row:
    """Measure a case and return its row; `effort` is a factor on the time it may take.

    A row is plain data: `family`, `name`, `base`, `clock` (that measured `wall`: "host" or "events"),
    `rounds`, `calls` per sample, `load` (the machine at the end), `sides` (for each the spreads of `wall`, `host` and
    `cpu` seconds, `ratio` and `cpu_ratio` to the base, and `facts`) and `aims` with their ratios.
    """
    clock = clock or clock_for(device, events=case.events)
    sides = case.sides(device)
    if case.base not in sides:
        raise ValueError(f"case {case.name!r} is compared with {case.base!r}, which is none of {', '.join(sides)}")
    case.check(sides)
    before = {name: side.before for name, side in sides.items() if side.before is not None}
    runs = {name: side.run for name, side in sides.items()}
    for _ in range(clock.warm_up):
        for name, run in runs.items():
            before.get(name, lambda: None)()
            clock.take(run, 1)
    calls = 1
    if case.sample_seconds:
        calls = calls_for(runs[case.base], case.sample_seconds * min(1.0, effort), clock)
    rounds = (3, 10) if effort < 1 else (5, 400)
    samples = in_turns(runs, clock, calls=calls, seconds=case.seconds * effort, rounds=rounds, before=before)
    # Other programs disturb processor time less than wall time; on a GPU a user waits for wall time.
    aimed = "cpu" if device.type == "cpu" else "wall"
    row: Row = {
        "family": case.family,
        "name": case.name,
        "base": case.base,
        "device": device.type,
        "clock": "events" if isinstance(clock, EventClock) else "host",
        "rounds": len(samples[case.base]),
        "calls": calls,
        "load": load(),
        "sides": {
            name: {**_times(samples[name], samples[case.base]), "facts": side.facts()} for name, side in sides.items()
        },
        "aims": [_outcome(aim, samples, aimed) for aim in case.aims if {aim.side, aim.base} <= sides.keys()],
    }
    del sides, runs, before
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return row


def _times(samples: list[Sample], base: list[Sample]) -> dict[str, Any]:
    """Spreads of one side's times and of their ratios to the base's."""
    return {
        "wall": asdict(Spread.of([sample.wall for sample in samples])),
        "host": asdict(Spread.of([sample.host for sample in samples])),
        "cpu": asdict(Spread.of([sample.cpu for sample in samples])),
        "ratio": asdict(ratios(samples, base)),
        "cpu_ratio": asdict(ratios(samples, base, "cpu")),
    }


def _outcome(aim: Aim, samples: dict[str, list[Sample]], clock: str) -> dict[str, Any]:
    """Return an aim with the measured ratio."""
    return {**asdict(aim), "ratio": asdict(ratios(samples[aim.side], samples[aim.base], clock))}
