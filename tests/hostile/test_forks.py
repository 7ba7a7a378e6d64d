"""A process that forks while its threads enter regions: the child has their locks, and none of the threads.

The child has a model of its own, of pointwise operators: parameters have a lock in autograd, and matrix products have
some in oneDNN, which no child gets back if another thread holds them.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ampkit import Policy, Rule, WeightCache, autocast
from ampkit.region import module_hooks
from ampkit.torch_internals import forks
from tests.helpers.regions import like_torch
from tests.hostile.budget import rounds

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")



class Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mul(x, self.weight)


def model() -> torch.nn.Module:
    return torch.nn.Sequential(Scale(), Scale())


X = torch.ones(2, 2)
CACHE = WeightCache()
TURN = 0


def in_regions(net: torch.nn.Module) -> None:
    """Through every lock that regions take: of caches, marks, hooks and kernels."""
    global TURN
    TURN += 1
    layers = Policy.default("cpu").with_rules({"aten::mul.Tensor": Rule.LOWER})
    for n in range(TURN % 3):
        layers = layers.with_rules({("aten::mm", "aten::bmm", "aten::addmm")[(TURN + n) % 3]: Rule.FLOAT32})
    with autocast("cpu", policy=layers.for_modules(net, {"1": torch.float32}), cache=CACHE):
        net(X)


def step() -> None:
    """What a child does that trains."""
    net = model()
    in_regions(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    with autocast("cpu"):
        net(X).sum().backward()
    optimizer.step()


def in_a_child(call: Callable[[], None], seconds: float = 30.0) -> str:
    """Call in a forked child; "" if it returned, else how the child ended."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)     # of forking a process with threads, which is the point
        pid = os.fork()
    if pid == 0:
        faulthandler.dump_traceback_later(seconds * 0.7, file=2)     # where it hangs
        try:
            call()
        except BaseException as error:
            os.write(2, f"in the child: {error!r}\\n".encode())
            os._exit(1)
        os._exit(0)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return "" if status == 0 else f"status {status}"
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return f"still running after {seconds} s"


def test_a_child_forked_amid_regions_can_train():
    step()      # here first: the first optimizer step of a process imports half of torch
    stop = threading.Event()

    errors: list[BaseException] = []

    def loop() -> None:
        net = model()
        while not stop.is_set() and not errors:
            try:
                in_regions(net)
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=loop) for _ in range(2)]
    for thread in threads:
        thread.start()
    forks = 0
    try:
        for rng in rounds("forks"):
            time.sleep(rng.random() * 0.01)
            assert not in_a_child(step)
            forks += 1
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    print(f"{forks} forks")
    assert not errors


class Products(torch.utils.data.Dataset[torch.Tensor]):
    """Items that a region in the worker would cast, and whether the worker is in one."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.full((2, 2), 1 / 3) @ torch.full((2, 2), float(index)), torch.is_autocast_enabled("cpu")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("region", [lambda: torch.autocast("cpu"), like_torch], ids=["torch", "ampkit"])
def test_a_forked_worker_has_the_region_of_the_thread_that_forked_it(region):
    loader = torch.utils.data.DataLoader(Products(), 2, num_workers=1, multiprocessing_context="fork")
    with region():
        found = list(loader)
    assert [flag.tolist() for _, flag in found] == [[True] * 2] * 2
    assert {value.dtype for value, _ in found} == {torch.bfloat16}


@pytest.mark.parametrize(
    "lock",
    ["ampkit.region.module_hooks._lock", "ampkit.region.policy_guard._marking_lock",
     "ampkit.torch_internals.kernels._installing_lock"],
)
def test_a_lock_that_another_thread_holds_is_free_in_the_child(lock):
    module, _, name = lock.rpartition(".")
    module = importlib.import_module(module)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with getattr(module, name):
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        assert not in_a_child(lambda: getattr(module, name).acquire(timeout=5) or os._exit(3))
    finally:
        done.set()
        thread.join()


def test_no_child_is_forked_while_torchs_cache_is_cleared(monkeypatch):
    """torch clears it under a mutex of its own, and without Python's lock: a child would have the mutex, locked."""
    mutex, inside, stop = threading.Lock(), threading.Event(), threading.Event()

    def clear() -> None:
        with mutex:
            inside.set()
            time.sleep(0.02)

    def loop() -> None:
        while not stop.is_set():
            with autocast("cpu"):
                pass

    monkeypatch.setattr(torch, "clear_autocast_cache", clear)
    thread = threading.Thread(target=loop)
    thread.start()
    try:
        for _ in range(5):
            inside.clear()
            assert inside.wait(10)
            assert not in_a_child(clear, seconds=5.0)
    finally:
        stop.set()
        thread.join()


def test_a_thread_that_forks_while_it_clears_torchs_cache_goes_on(monkeypatch):
    results: list[str] = []

    def clear() -> None:
        monkeypatch.undo()
        results.append(in_a_child(step))

    monkeypatch.setattr(torch, "clear_autocast_cache", clear)
    forks.clear_torch_cache()
    assert results == [""]


def test_what_dies_with_the_parents_threads_waits_for_no_lock():
    """In the child, the other threads' own data is freed before any hook of ours runs: regions open there among it."""
    own, entered, held, done = threading.local(), threading.Event(), threading.Event(), threading.Event()

    def in_region() -> None:
        own.net, own.weights = model(), [torch.nn.Parameter(torch.ones(2, 2))]
        with autocast("cpu", policy=Policy.default("cpu").for_modules(own.net, {"1": torch.float32})):
            own.net(X)
            torch.mm(X, own.weights[0])
            entered.set()
            done.wait()

    def hold() -> None:
        with module_hooks._lock:
            held.set()
            done.wait()

    threads = [threading.Thread(target=target) for target in (in_region, hold)]
    try:
        for thread, begun in zip(threads, (entered, held), strict=True):
            thread.start()
            assert begun.wait(10)
        assert not in_a_child(step, seconds=10.0)
    finally:
        done.set()
        for thread in threads:
            thread.join()
