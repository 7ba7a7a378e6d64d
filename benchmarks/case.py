"""The definition of a benchmark case: one named job, done in several ways (sides)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.timing import Run

TORCH = "torch.amp"
TORCH_OPERATORS = "torch"  # its operators and optimizers, called without a scaler around them
AMPKIT = "ampkit"
SAME_LIST = "ampkit, torch's list"  # ampkit with `Policy.torch`: the same casts as torch.amp
OUTER = "ampkit, outer region"  # the same in a disabled region around it
OWN_OPTIMIZER = "ampkit, ampkit.optim"
REMAINDERS = "ampkit, bfloat16 weights with remainders"
STOCHASTIC = "ampkit, bfloat16 weights, stochastic rounding"


@dataclass
class Side:
    """One way of doing a case's job.

    `run(n)` does it n times; `before` prepares it, untimed; `Case.check` compares `result`; `facts` is called once
    after all timing, for figures that are not times (peak memory, casts, launches, the final loss).
    """

    run: Run
    before: Callable[[], object] | None = None
    result: Callable[[], list[torch.Tensor]] = list
    facts: Callable[[], dict[str, Any]] = dict


@dataclass(frozen=True)
class Aim:
    """A promise: `side` takes at most `limit` times as long as `base`."""

    side: str
    limit: float
    base: str = TORCH


@dataclass(frozen=True, kw_only=True)
class Case(ABC):
    """A job with a name. Ratios are to the side called `base`.

    `aims` are the project's targets. `devices` are the device types it runs on. `everyday`: whether the default run
    includes it. `seconds` bounds its timing; `sample_seconds` is the least duration of a sample (0: one call is one
    sample). `sides` may raise `UnavailableError`.
    """

    family: str
    name: str
    devices: tuple[str, ...] = ("cpu", "cuda")
    everyday: bool = True
    base: str = TORCH
    aims: tuple[Aim, ...] = ()
    seconds: float = 2.0
    sample_seconds: float = 0.0
    events: bool = False  # whether a GPU's own clock takes the times

    @abstractmethod
    def sides(self, device: torch.device) -> dict[str, Side]:
        """Return the ways to do the job, each ready to run; the base is one of them."""

    def check(self, sides: Mapping[str, Side]) -> None:  # noqa: B027  most cases have nothing to compare
        """Raise `WrongAnswerError` if the sides disagree. Called before timing, when all have run equally often."""


class UnavailableError(Exception):
    """A case needs something that this machine lacks, which the text names. The case is skipped, not failed."""


class WrongAnswerError(Exception):
    """Two ways of doing one job gave different answers; there is nothing to time."""
