"""Ctrl-C and handlers' exceptions anywhere in entering and leaving: no later region inherits anything."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ampkit
from ampkit import Policy, Rule, WeightCache, autocast, record_casts
from ampkit.region import graph
from ampkit.torch_internals import dispatcher
from tests.helpers.regions import state
from tests.hostile.interrupts import Interrupter

BF16 = torch.bfloat16
HERE = f"{Path(ampkit.__file__).parent}/"
MINE = Policy.default("cpu").with_rules({"aten::mm": Rule.FLOAT32})
MODEL = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2)))
BY_MODULE = MINE.for_modules(MODEL, {"0": Policy.torch("cpu"), "1": torch.float32})
WEIGHT = torch.nn.Parameter(torch.ones(2, 2))
X = torch.ones(2, 2)


def plain() -> None:
    with autocast("cpu", BF16, policy=MINE):
        torch.mm(X, WEIGHT)


def nested() -> None:
    with autocast("cpu", BF16, policy=MINE), autocast("cpu", enabled=False), autocast("cpu", policy="torch"):
        pass


def with_cache() -> None:
    with autocast("cpu", BF16, cache=WeightCache()), autocast("cpu", torch.float16, cache_enabled=False):
        torch.mm(X, WEIGHT)


def in_torch() -> None:
    with torch.autocast("cpu", BF16), autocast("cpu", policy=MINE), torch.autocast("cpu", enabled=False):
        pass


def by_module() -> None:
    with autocast("cpu", BF16, policy=BY_MODULE):
        MODEL(X)


def decorated() -> None:
    autocast("cpu", BF16, policy=MINE)(lambda: torch.mm(X, WEIGHT))()


def generator() -> None:
    @autocast("cpu", BF16, policy=MINE)
    def steps() -> Any:
        yield 1
        yield 2

    list(steps())


def coroutine() -> None:
    @autocast("cpu", BF16, policy=MINE)
    async def wait() -> None:
        await asyncio.sleep(0)

    step = wait()
    try:
        while True:
            step.send(None)
    except StopIteration:
        pass
    finally:
        step.close()


def in_a_graph() -> None:
    """What `torch.compile(backend="eager")` runs: regions entered and left by calls, with no `with` around them."""
    calls = {"enter": graph.enter_region, "leave": graph.leave_region, "dtype": BF16, "rules": MINE.text}
    source = "enter('cpu', dtype, True, True, rules, 0)\nenter('cpu', dtype, False, True, None, 0)\nleave()\nleave()"
    exec(compile(source, "<eval_with_key>.0", "exec"), calls)


def checkpointed() -> None:
    with autocast("cpu", BF16, policy=MINE):
        loss = checkpoint(lambda x: torch.mm(x, x).sin(), X.clone().requires_grad_(), use_reentrant=False).sum()
    loss.backward()


def recorded() -> None:
    with record_casts(), autocast("cpu", BF16, policy=MINE):
        pass


SCENES = [
    plain, nested, with_cache, in_torch, by_module, decorated, generator, coroutine, in_a_graph, checkpointed, recorded,
]


def everything() -> Any:
    """What a region may leave behind in this thread, and the policies of a region that is given none."""
    keys = [(dispatcher.is_included(key), dispatcher.is_excluded(key)) for key in dispatcher.KEY_NAMES]
    found = state(), keys, dispatcher.current()
    with autocast("cpu", BF16):
        mode = dispatcher.current()
    return found, None if mode is None else mode.policies, len(ampkit.region.recording.records)


# As these begin, no `try` of theirs has begun, nor the caller's: Python code cannot undo an interrupt there.
# So it is with what a checkpoint's own exception interrupts, by which torch ends a recompute.
EDGES = (
    "autocast.__exit__", "_plain.<locals>.wrapper", "record_casts.__enter__", "record_casts.__exit__", "_stepped",
    "_recomputing.<locals>.recompute", "leave_down_to",
)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_exception_of_a_handler_arrives_as_itself_and_leaves_nothing_behind(
    scene: Callable[[], None], error: type[BaseException]
) -> None:
    scene()
    fresh, counter = everything(), Interrupter(HERE, 0)
    assert counter.run(scene) is None
    wrong = []
    for at in range(1, counter.count + 1):
        interrupter = Interrupter(HERE, at, error)
        found = interrupter.run(scene)
        if scene is in_a_graph:     # regions of a call that has ended are left by the next that is entered
            plain()
        if everything() != fresh or (type(found) is not error and interrupter.place):
            wrong.append((interrupter.place, repr(found)))
            clean_up()
            assert everything() == fresh
    print(f"{scene.__name__}: {counter.count} places, {len(wrong)} left something")
    assert not [each for each in wrong if not each[0].startswith(EDGES)]
    assert len(wrong) <= 8


def clean_up() -> None:
    """After a finding: enter and leave what is left open, so that the next is one of its own."""
    from ampkit.region.stack import leave_down_to
    from ampkit.region.thread_state import thread

    leave_down_to(thread.regions, 0)
    ampkit.region.recording.records.clear()
    while torch.is_autocast_enabled("cpu"):
        torch.set_autocast_enabled("cpu", False)


FIRST_REGION = """
import os, sys, torch
from ampkit import autocast

def product():
    with autocast("cpu", torch.bfloat16):
        return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype

class Handler:
    "Opens a region at the n-th event, as a signal handler may."
    def __init__(self, n):
        self.n, self.count = n, 0
    def __call__(self, frame, event, arg):
        if not frame.f_code.co_filename.endswith(FILES):
            return None
        self.count += 1
        if self.count == self.n:
            sys.settrace(None)
            assert product() is torch.bfloat16
        return self

def first(n):
    handler = Handler(n)
    sys.settrace(handler)
    try:
        assert product() is torch.bfloat16
    finally:
        sys.settrace(None)
    assert not torch.is_autocast_enabled("cpu")

FILES = ("torch_internals/kernels.py", "torch/library.py", "self_check.py", "region/autocast.py", "region/mode.py")
for n in (*range(1, 31), *range(31, 600, 40)):
    child = os.fork()
    if child == 0:
        try:
            first(n)
        except BaseException as error:
            os.write(2, f"{n}: {error!r}\\n".encode())
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, n
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="each place needs a process without a region")
def test_first_region_of_a_process_is_reentrant():
    ran = subprocess.run([sys.executable, "-c", FIRST_REGION], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert not ran.stderr
