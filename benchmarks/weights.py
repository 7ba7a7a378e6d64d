"""Casting weights: how long the first use of 10 to 1000 weights in a region takes, and how many casts it makes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from ampkit import Policy, WeightCache, autocast
from benchmarks.case import SAME_LIST, TORCH, Case, Side
from benchmarks.counts import peak_and_copies
from benchmarks.timing import Run
from benchmarks.work import Work, region_casts

KEPT = "ampkit, WeightCache"
WIDTH = 64


@dataclass(frozen=True, kw_only=True)
class WeightCasts(Case):
    """A forward over `weights` matrices of 64 x 64, each used `uses` times in one region, with one row of input.

    The `WeightCache` stays valid between samples, as between the micro-batches of one optimizer step.
    """

    weights: int = 10
    uses: int = 2
    family: str = "weights"

    def sides(self, device: torch.device) -> dict[str, Side]:
        kind, same, cache = device.type, Policy.torch(device.type), WeightCache()
        ways: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
            TORCH: lambda: torch.autocast(kind, torch.bfloat16),
            SAME_LIST: lambda: autocast(kind, torch.bfloat16, policy=same),
            KEPT: lambda: autocast(kind, torch.bfloat16, policy=same, cache=cache),
        }
        generator = torch.Generator(device).manual_seed(0)
        weights = [
            torch.nn.Parameter(torch.randn(WIDTH, WIDTH, device=device, generator=generator) / 8)
            for _ in range(self.weights)
        ]
        x = torch.randn(1, WIDTH, device=device, generator=generator).bfloat16()
        return {name: _side(region, weights, x, self.uses) for name, region in ways.items()}

    def work(self) -> Work:
        elements = self.weights * WIDTH * WIDTH
        flops = 2.0 * self.uses * elements
        return Work(flops, region_casts(elements), "each weight read as float32 and written as bfloat16 once")


def _side(
    region: Callable[[], contextlib.AbstractContextManager[Any]],
    weights: list[torch.nn.Parameter],
    x: torch.Tensor,
    uses: int,
) -> Side:
    def run(calls: int) -> None:
        for _ in range(calls):
            with region():
                for _ in range(uses):
                    for weight in weights:
                        functional.linear(x, weight)

    return Side(run, facts=lambda: {"casts": peak_and_copies(_once(run), x.device)["copies"]})


def _once(run: Run) -> Callable[[], object]:
    return lambda: run(1)


def cases() -> list[Case]:
    """Ten to a thousand weights."""
    return [
        WeightCasts(name=f"{count} weights", weights=count, seconds=2.0, size=count, size_name="weights")
        for count in (10, 100, 1000)
    ]
