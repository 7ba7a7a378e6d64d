"""Gradient accumulation, with all sides in one process and with a process for each; the sides take turns either way.

In one process all sides share the allocator, and memory that one frees serves the others. In a process of its own, a
step that allocates and frees large casts may need fresh pages from the system every time, which is part of its cost.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from benchmarks import workloads
from benchmarks.case import SAME_LIST, TORCH, Aim, Case, Side
from benchmarks.trainer import KEPT, Variant
from benchmarks.training import Training


@dataclass(frozen=True, kw_only=True)
class Apart(Training):
    """`Training` with every side in a process of its own.

    The case is pickled to the children, so `workload` must be picklable.
    """

    in_process: bool = False

    def sides(self, device: torch.device) -> dict[str, Side]:
        return {way: self._remote(way, device) for way in (TORCH, SAME_LIST, KEPT)}

    def _remote(self, way: str, device: torch.device) -> Side:
        """A side that runs in a child, which ends when the side is dropped."""
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        arguments = (there, self, way, device.type, torch.get_num_threads())
        process = context.Process(target=_serve, args=arguments, daemon=True)
        process.start()
        there.close()

        def ask(question: int | str) -> Any:
            here.send(question)
            answer = here.recv()
            if isinstance(answer, Exception):
                raise answer
            return answer

        side = Side(ask, result=lambda: [torch.tensor(ask("result"))], facts=lambda: ask("facts"))
        weakref.finalize(side, _dismiss, here, process)
        return side


def cases() -> list[Case]:
    """Eight micro-batches of 1 x 8 tokens on wide layers, where casting the weights is much of the work."""
    found: list[Case] = []
    for variant in (Variant(torch.bfloat16, 8, step=False), Variant(torch.bfloat16, 8)):
        for make, where in ((Training, ""), (Apart, ", a process each")):
            found.append(make(
                name=f"d=768, 4 blocks, 1 x 8 tokens, {variant}{where}", family="accumulation", variant=variant,
                workload=functools.partial(workloads.gpt, "accumulation", 768, 4, 1, 8, 256, 12),
                aims=(Aim(KEPT, 0.85),), seconds=10.0, everyday=variant.step,
            ))
    return found


def _serve(pipe: Connection, case: Training, way: str, device: str, threads: int) -> None:
    """The child: a number runs that many steps, a name returns that of the side; None ends it."""
    torch.set_num_threads(threads)
    side: Side | None = None
    answers: dict[str, Callable[[Side], Any]] = {
        "result": lambda side: side.result()[0].item(), "facts": lambda side: side.facts(),
    }
    while (question := pipe.recv()) is not None:
        try:
            if side is None:
                side = case.side(case.workload(), way, torch.device(device))
            pipe.send(side.run(question) if isinstance(question, int) else answers[question](side))
        except Exception as error:
            pipe.send(RuntimeError(f"{way}: {type(error).__name__}: {error}"))


def _dismiss(pipe: Connection, process: BaseProcess) -> None:
    """Ask a child to end, and terminate it if it does not."""
    with contextlib.suppress(OSError):      # it may have ended already
        pipe.send(None)
    pipe.close()
    process.join(5)
    if process.is_alive():
        process.terminate()
