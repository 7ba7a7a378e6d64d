"""A process that forks while its threads enter regions: the child has copies of their locks, but not the threads.

The child trains a new model of pointwise operators. Parameters have locks in autograd and matrix products have locks in
oneDNN, which no child can release if another thread held them.
"""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

import pytest
import torch

from ampkit import Policy, Rule, autocast
from tests.helpers.processes import fresh_python
from tests.helpers.regions import like_torch
from tests.stress.budget import rounds

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"),
]
TURN = 0


def regions() -> torch.nn.Module:
    """A model that has taken every lock of regions: of caches, policy tags, hooks and registration."""
    global TURN
    TURN += 1
    net = torch.nn.Sequential(torch.nn.PReLU(), torch.nn.PReLU())
    policy = Policy.default("cpu")
    for n in range(TURN % 3):
        policy = policy.with_rules({("aten::mm", "aten::bmm", "aten::addmm")[(TURN + n) % 3]: Rule.FLOAT32})
    with autocast("cpu", policy=policy.for_modules(net, {"1": torch.float32})):
        net(torch.ones(2, 2))
    return net


def train() -> None:
    """The work of a child: one step."""
    net = regions()
    with autocast("cpu"):
        net(torch.ones(2, 2)).sum().backward()
    torch.optim.SGD(net.parameters(), lr=0.0).step()


def in_a_child(call: Callable[[], object], seconds: float = 20.0) -> int | None:
    """Call in a forked child. Returns 0, or None if it hung; its stack is then on stderr."""

    def run() -> None:
        faulthandler.dump_traceback_later(seconds * 0.7, file=2)
        call()
        os._exit(0)  # exit handlers of the interpreter would wait for threads

    child = get_context("fork").Process(target=run)
    child.start()
    child.join(seconds)
    code = child.exitcode
    child.kill()
    child.join()
    return code


@contextmanager
def threads_that(call: Callable[[], object], n: int) -> Iterator[None]:
    """Threads that repeat a call; raises what they raised."""
    stop = threading.Event()

    def loop() -> None:
        while not stop.is_set():
            call()

    with ThreadPoolExecutor(n) as pool:
        loops = [pool.submit(loop) for _ in range(n)]
        try:
            yield
        finally:
            stop.set()
    assert [future.result() for future in loops] == [None] * n


def test_a_child_forked_amid_regions_can_train() -> None:
    """Threads change turns often, so that some are inside every lock when the process forks."""
    train()  # here first: the first optimizer step of a process imports half of torch
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with threads_that(regions, 2):
            for rng in rounds("forks", 40):
                time.sleep(rng.random() * 0.01)
                assert in_a_child(train) == 0
    finally:
        sys.setswitchinterval(before)


def test_no_child_is_forked_while_torchs_cache_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch clears it under a C++ mutex and without Python's lock: a child would have a copy of the locked mutex."""
    mutex, inside = threading.Lock(), threading.Event()

    def clear() -> None:
        with mutex:
            inside.set()
            time.sleep(0.02)

    def enter() -> None:
        with like_torch():
            pass

    monkeypatch.setattr(torch, "clear_autocast_cache", clear)
    with threads_that(enter, 1):
        for _ in range(5):
            inside.clear()
            assert inside.wait(10)
            assert in_a_child(clear, seconds=5.0) == 0


def fork_in_a_thread() -> None:
    """Fork in a thread, and check that the child ends."""
    codes: list[int] = []

    def fork() -> None:
        child = os.fork()
        if not child:
            os._exit(0)
        codes.append(os.waitpid(child, 0)[1])

    thread = threading.Thread(target=fork, daemon=True)
    thread.start()
    thread.join(10.0)
    assert codes == [0]


def test_a_thread_of_a_child_can_fork() -> None:
    """As in a server with forked workers whose request threads start processes.

    In a new interpreter: one that has run other tests has threads and fork handlers of other libraries, with which the
    grandchild has crashed.
    """
    imports = "from tests.stress.test_forks import fork_in_a_thread, in_a_child, regions"
    assert fresh_python(f"{imports}\nregions()\nprint(in_a_child(fork_in_a_thread))").split() == ["0"]


class Products(torch.utils.data.Dataset[torch.Tensor]):
    """Products that a region in the worker would cast, and whether the worker is in a region."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.full((2, 2), 1 / 3) @ torch.full((2, 2), float(index)), torch.is_autocast_enabled("cpu")


def test_a_forked_worker_has_the_region_of_the_thread_that_forked_it() -> None:
    """As with torch.autocast."""
    for region in (torch.autocast("cpu"), like_torch()):
        loader = torch.utils.data.DataLoader(Products(), 2, num_workers=1, multiprocessing_context="fork")
        with region:
            batches = list(loader)
        assert [in_region.tolist() for _, in_region in batches] == [[True] * 2] * 2
        assert {product.dtype for product, _ in batches} == {torch.bfloat16}
