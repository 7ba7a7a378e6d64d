"""Processes joined by gloo that live as long as the test process and run one function after the other.

Starting Python and importing torch costs seconds; running a function on ranks that wait costs milliseconds:

    def total(rank: int, world: int, value: float) -> float:        # at the top of an importable module
        tensor = torch.tensor(value * rank)
        dist.all_reduce(tensor)
        return tensor.item()

    assert on_ranks(total, 3.0) == [3.0, 3.0]
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import io
import os
import pickle
import random
import runpy
import shutil
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

START = 200      # seconds in which a process has to start
CONNECT = 20     # seconds in which ranks have to find each other
_pools: dict[int, _Pool] = {}


class RankError(AssertionError):
    """A rank raised, died or did not answer in time; the text has the traceback of each rank that did."""


def on_ranks(function: Callable[..., Any], *arguments: Any, world: int = 2, timeout: float = 60) -> list[Any]:
    """Run `function(rank, world, *arguments)` on `world` ranks with a process group of gloo; return what each returned.

    The function, the arguments and the results are pickled, so the function stands at the top of a module. Each call
    has a new process group and the seeds of a new test; other state of the process stays, so a function that changes
    some restores it. The first call for a world size starts its processes, and the first after a death does again.

    Raises:
        RankError: a rank raised, died, or did not answer within `timeout` seconds.
    """
    try:
        if world not in _pools:
            _pools[world] = _Pool(world)
        return _pools[world].run(function, arguments, timeout)
    except _Lost as lost:
        if world in _pools:
            _pools.pop(world).close()
        raise RankError(str(lost)) from None


class _Lost(Exception):
    """A rank died or hung: its pool is of no use any more."""


class _Pool:
    def __init__(self, world: int) -> None:
        context = get_context("spawn")
        self.folder = Path(tempfile.mkdtemp(prefix="ampkit-ranks-"))
        self.calls = 0
        self.processes, self.connections = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world, self.folder, theirs), daemon=True)
            process.start()
            theirs.close()      # so that the end of the process is the end of the pipe
            self.processes.append(process)
            self.connections.append(ours)
        for rank in range(world):       # importing torch is not the first function's time
            self._answer(rank, time.monotonic() + START)

    def run(self, function: Callable[..., Any], arguments: tuple[Any, ...], timeout: float) -> list[Any]:
        self.calls += 1
        call = pickle.dumps((self.calls, timeout, list(sys.path), pickle.dumps((function, arguments))))
        for rank, connection in enumerate(self.connections):
            try:
                connection.send_bytes(call)
            except OSError:
                raise _Lost(f"rank {rank} died before the call") from None
        until = time.monotonic() + timeout
        answers = [self._answer(rank, until) for rank in range(len(self.connections))]
        errors = [f"rank {rank}:\n{value}" for rank, (good, value) in enumerate(answers) if not good]
        if any("init_process_group" in error for error in errors):
            raise _Lost("\n".join(errors))      # ranks count their groups, and do not count alike any more
        if errors:
            raise RankError("\n".join(errors))
        return [value for _, value in answers]

    def _answer(self, rank: int, until: float) -> tuple[bool, Any]:
        try:
            if self.connections[rank].poll(max(until - time.monotonic(), 0)):
                return pickle.loads(self.connections[rank].recv_bytes())
        except (EOFError, ConnectionError):
            self.processes[rank].join(5)
            raise _Lost(f"rank {rank} died with exit code {self.processes[rank].exitcode}") from None
        stacks = [f"{path.name}:\n{path.read_text()}" for path in sorted(self.folder.glob("rank*.stack"))]
        raise _Lost("\n".join([f"rank {rank} did not answer in time", *stacks]))

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        shutil.rmtree(self.folder, ignore_errors=True)


@atexit.register
def _close_all() -> None:
    for pool in _pools.values():
        pool.close()


def _serve(rank: int, world: int, folder: Path, connection: Connection) -> None:
    """What a rank's process does: run each function that arrives, and answer, until the pipe ends."""
    connection.send_bytes(pickle.dumps((True, None)))
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    with open(folder / f"rank{rank}.stack", "w") as stack:
        while True:
            try:
                number, timeout, path, call = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            faulthandler.dump_traceback_later(max(timeout - 1, 1), file=stack)
            sys.path[:] = path
            try:
                answer = (True, _run(rank, world, f"file://{folder}/call{number}", timeout, call))
            except Exception:
                answer = (False, traceback.format_exc())
            faulthandler.cancel_dump_traceback_later()
            try:
                connection.send_bytes(pickle.dumps(answer))
            except Exception:
                connection.send_bytes(pickle.dumps((False, traceback.format_exc())))


def _run(rank: int, world: int, meeting: str, timeout: float, call: bytes) -> Any:
    """Run one function in a process group of its own. Leaving the group ends what other ranks wait for.

    The barrier is for functions that do not communicate: a rank that left at once would close connections that
    another one is still making.
    """
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=world, timeout=timedelta(seconds=min(timeout, CONNECT))
    )
    try:
        dist.barrier()
        function, arguments = pickle.loads(call)
        return function(rank, world, *arguments)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()


def run_script(rank: int, world: int, path: Path, *arguments: Any) -> str:
    """For `on_ranks`: call `main` of a script that makes its process group itself, as under torchrun.

    Returns what it printed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = [free.getsockname()[1]]
    dist.broadcast_object_list(port, 0)
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port[0]))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(path))["main"](*arguments)
    return printed.getvalue()
