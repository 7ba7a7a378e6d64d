"""Start examples/pretrain.py on forked ranks, and kill one of them at a chosen point of a chosen step.

One process imports everything and forks the ranks, each of which starts in milliseconds. As under torchrun a rank that
ends with an error is the end of all: the others have `GRACE` seconds to end by themselves, or the start fails.
"""

from __future__ import annotations

import importlib
import os
import re
import signal
import socket
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ampkit import GradScaler
from examples import pretrain
from tests.helpers.ranks import forking_context

GRACE = 30  # seconds in which ranks have to end when another one was killed
LIMIT = 120  # seconds for a start
LAST_LINE = re.compile(r"state (?P<digest>[0-9a-f]{64}) scale (?P<scale>\S+) skips (?P<skips>\d+)")

SMALL = {"WIDTH": 16, "HEADS": 2, "CONTEXT": 8}
POINTS = ("forward", "backward", "agreement", "before the step", "after the step", "after the update", "write")
"""Where `Kill` may strike: in forward, in a recompute of backward, in the collective of the scaler, on either side of
`optimizer.step`, behind `update`, and when the files of a rank are written."""


@dataclass(frozen=True)
class Kill:
    """SIGKILL, or another signal, that a rank sends itself.

    Attributes:
        step: the step, from 1 on, in which it strikes.
        rank: the rank.
        point: one of `POINTS`, or "metadata", before rank 0 writes that.
        number: the signal.
    """

    step: int
    rank: int
    point: str
    number: int = signal.SIGKILL


class Ended(NamedTuple):
    """How a start ended."""

    codes: list[int]  # of the ranks, negative after a signal
    output: str  # of rank 0
    errors: str  # of all ranks

    @property
    def state(self) -> dict[str, str]:
        """What the last line says."""
        lines = self.output.splitlines()
        found = LAST_LINE.fullmatch(lines[-1]) if lines else None
        assert found, f"{self.codes}\n{self.output}\n{self.errors}"
        return found.groupdict()


@dataclass(frozen=True)
class Job:
    """Arguments of pretrain.py."""

    folder: Path
    precision: str = "fp16"
    parallel: str = "fsdp"
    steps: int = 6
    save_every: int = 2
    torchs: Path | None = None
    small: bool = True  # a smaller model than the example's


for _name in ("pydoc_data.topics", "torch._dynamo"):  # imported late: here once, before ranks are forked
    importlib.import_module(_name)
_context = forking_context()


def start(job: Job, world: int = 2, kills: tuple[Kill, ...] = (), after: float | None = None) -> Ended:
    """Run `job` on `world` ranks until it ends.

    Args:
        job: what to run.
        world: the number of ranks.
        kills: signals that ranks send themselves.
        after: seconds after which a rank, the last one, is killed from outside.

    Raises:
        AssertionError: ranks did not end in time after another one was killed, or at all.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    texts = [job.folder / f"rank{rank}.txt" for rank in range(world)]
    ranks = [_context.Process(target=_rank, args=(rank, world, port, job, kills)) for rank in range(world)]
    begin = time.monotonic()
    until = begin + LIMIT
    for process in ranks:
        process.start()
    try:
        while running := [process for process in ranks if process.exitcode is None]:
            patience = until - time.monotonic()
            if after is not None:
                patience = begin + after - time.monotonic()
            ended = wait([process.sentinel for process in running], max(patience, 0))
            if not ended and after is not None:
                ranks[-1].kill()
                after = None
            elif not ended:
                raise AssertionError(f"ranks hang: {[process.exitcode for process in ranks]}\n{_read(texts)}")
            if any(process.exitcode for process in ranks):
                until = min(until, time.monotonic() + GRACE)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    codes = [process.exitcode or 0 for process in ranks]
    return Ended(codes, texts[0].read_text() if texts[0].exists() else "", _read(texts))


def _read(texts: list[Path]) -> str:
    return "\n".join(f"{text.name}:\n{text.read_text()}" for text in texts if text.exists())


def _rank(rank: int, world: int, port: int, job: Job, kills: tuple[Kill, ...]) -> None:
    """One rank, in a process of its own, with its output in a file."""
    text = os.open(job.folder / f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(text, 1)
    os.dup2(text, 2)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name, size in SMALL.items() if job.small else ():
        setattr(pretrain, name, size)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    for kill in kills:
        if kill.rank == rank:
            _Strike(kill)
    pretrain.main(job.parallel, job.precision, job.steps, job.save_every, job.folder, job.torchs)


def _pass(*_: Any, **__: Any) -> None:
    """Do nothing."""


class _Strike:
    """Has this process send itself a signal when it gets to a point of a step."""

    def __init__(self, kill: Kill) -> None:
        self.kill, self.step, self.blocks, self.clips = kill, 0, 0, False
        _around(pretrain.Checkpoints, "begin", after=self.begin)
        _around(pretrain.Stream, "next", before=self.next_step)
        match kill.point:
            case "forward" | "backward":
                _around(pretrain.Block, "compute", before=self.count_block)
            case "agreement":
                _around(GradScaler, "clip_grad_norm_", before=self.begin_clipping, after=self.end_clipping)
                _around(dist, "all_reduce", before=self.communicate)
            case "before the step":
                register_optimizer_step_pre_hook(self.now)
            case "after the step":
                register_optimizer_step_post_hook(self.now)
            case "after the update":
                _around(pretrain.Stop, "agreed", before=self.now)
            case "write":
                _around(FileSystemWriter, "write_data", after=self.now)
            case "metadata":
                _around(FileSystemWriter, "finish", before=self.now)
            case _:
                raise ValueError(f"unknown point {kill.point!r}; expected one of {POINTS} or 'metadata'")

    def now(self, *_: Any, **__: Any) -> None:
        """Strike, if this is the step. The thread of a save may be late."""
        late = self.kill.point in ("write", "metadata") and self.step > self.kill.step
        if self.step == self.kill.step or late:
            self.step = -1
            os.kill(os.getpid(), self.kill.number)

    def begin(self, _: Any, run: pretrain.Run, *__: Any) -> None:
        self.step = run.step

    def next_step(self, *_: Any) -> None:
        self.step, self.blocks = self.step + 1 if self.step >= 0 else self.step, 0

    def count_block(self, *_: Any) -> None:
        self.blocks += 1
        if self.blocks == (1 if self.kill.point == "forward" else pretrain.DEPTH + 1):  # the first computed again
            self.now()

    def begin_clipping(self, *_: Any, **__: Any) -> None:
        self.clips = True

    def end_clipping(self, *_: Any, **__: Any) -> None:
        self.clips = False

    def communicate(self, *_: Any, **__: Any) -> None:
        if self.clips:
            self.now()


def _around(owner: Any, name: str, before: Callable[..., None] = _pass, after: Callable[..., None] = _pass) -> None:
    """Call a function with the arguments of each call of a method, before or after it."""
    real = getattr(owner, name)

    def replaced(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        result = real(*args, **kwargs)
        after(*args, **kwargs)
        return result

    setattr(owner, name, replaced)
