"""Processes joined by gloo that live as long as the test process and run one function after the other.

Starting Python and importing torch costs seconds: one process does so and forks the ranks. Running a function on ranks
that wait costs milliseconds:

    def total(rank: int, world: int, value: float) -> float:        # at the top of an importable module
        tensor = torch.tensor(value * rank)
        dist.all_reduce(tensor)
        return tensor.item()

    assert on_ranks(total, 3.0) == [3.0, 3.0]
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import os
import pickle
import random
import runpy
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from datetime import timedelta
from multiprocessing import active_children, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

START = 200  # seconds in which a process has to start
CONNECT = 20  # seconds in which ranks have to find each other
_pool: list[tuple[ProcessPoolExecutor, BaseProcess]] = []  # a process for each rank


class RankError(AssertionError):
    """A rank raised, died or did not answer in time; the text has the traceback of each rank that did."""


def on_ranks(function: Callable[..., Any], *arguments: Any, world: int = 2, timeout: float = 60) -> list[Any]:
    """Run `function(rank, world, *arguments)` on `world` ranks with a process group of gloo; return what each returned.

    The function, the arguments and the results are pickled, so the function stands at the top of a module. Each call
    has a new process group and the seeds of a new test; other state of the process stays, so a function that changes
    some restores it. The first call for a rank starts its process, and the first after an error does again.

    Raises:
        RankError: a rank raised, died, or did not answer within `timeout` seconds; where each hung is on stderr.
    """
    _start(world - len(_pool))
    pool, call = [_pool.pop(0) for _ in range(world)], pickle.dumps((function, arguments))
    until, results, errors = time.monotonic() + timeout, [], []
    with tempfile.TemporaryDirectory(prefix="ampkit-ranks-") as folder:
        answers = [
            executor.submit(_run, rank, world, f"file://{folder}/meeting", timeout, sys.path, call)
            for rank, (executor, _) in enumerate(pool)
        ]
        for rank, (answer, (executor, process)) in enumerate(zip(answers, pool, strict=True)):
            try:
                results.append(answer.result(max(until - time.monotonic(), 0)))
            except BrokenProcessPool:
                executor.shutdown()
                errors.append(f"rank {rank} died with exit code {process.exitcode}")
            except Exception as error:
                errors.append(f"rank {rank}:\n{''.join(traceback.format_exception(error))}")
    if errors:  # ranks may count their groups, and not count alike any more
        for _, process in pool:
            process.kill()
        raise RankError("\n".join(errors))
    _pool[:0] = pool
    return results


def forking_context() -> Any:
    """Return the context of processes that are forked from one that has imported torch; on Linux alone that is safe."""
    if sys.platform != "linux":
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.killed_runs"])  # which imports all that ranks need
    return context


def _start(number: int) -> None:
    context = forking_context()
    executors = [ProcessPoolExecutor(1, context, torch.set_num_threads, (1,)) for _ in range(number)]
    pids = [executor.submit(os.getpid) for executor in executors]
    processes = {process.pid: process for process in active_children()}
    _pool.extend((executor, processes[pid.result(START)]) for executor, pid in zip(executors, pids, strict=True))


def _run(rank: int, world: int, meeting: str, timeout: float, path: list[str], call: bytes) -> Any:
    """Run one function in a process group of its own. Leaving the group ends what other ranks wait for.

    The barrier is for functions that do not communicate: a rank that left at once would close connections that
    another one is still making.
    """
    sys.path[:] = path
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    faulthandler.dump_traceback_later(max(timeout - 1, 1))
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
        faulthandler.cancel_dump_traceback_later()


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
