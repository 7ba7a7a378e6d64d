"""Ctrl-C anywhere inside entering and leaving: nothing is left behind, and no later region inherits anything."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules import module as hooked

import ampkit
from ampkit import Policy, Rule, WeightCache, autocast, float32_region, record_casts
from ampkit.region import graph, module_hooks, policy_guard, recording, stack
from ampkit.region.snapshot import Snapshot, native_state
from ampkit.region.thread_state import thread
from ampkit.torch_internals import dispatcher, unlisted
from tests.helpers.regions import state
from tests.hostile.budget import rounds
from tests.hostile.interrupts import Interrupter, Place

BF16 = torch.bfloat16
HERE = f"{Path(ampkit.__file__).parent}/"
TORCH = str(Path(torch.__file__).parent / "amp" / "autocast_mode.py")
MINE = Policy.default("cpu").with_rules({"aten::mm": Rule.FLOAT32})
WEIGHT = torch.nn.Parameter(torch.ones(2, 2))
MODEL = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2)))
BY_MODULE = MINE.for_modules(MODEL, {"0": Policy.torch("cpu"), "1": torch.float32})
X = torch.ones(2, 2)
KINDS = ("cpu", "cuda", "ipu", "maia")


def plain() -> None:
    with autocast("cpu", BF16, policy=MINE):
        torch.mm(X, WEIGHT)


def empty() -> None:
    with autocast("cpu", BF16, policy=MINE):
        pass


def nested() -> None:
    with autocast("cpu", BF16, policy=MINE), autocast("cpu", enabled=False), float32_region("cpu"):
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


def restored() -> None:
    with autocast("cpu", BF16, policy=BY_MODULE):
        snapshot = Snapshot()
    with snapshot.restored():
        MODEL(X)


def checkpointed() -> None:
    with autocast("cpu", BF16, policy=BY_MODULE):
        loss = ampkit.checkpoint(MODEL, X.clone().requires_grad_()).sum()
    loss.backward()


def recorded() -> None:
    with record_casts(), autocast("cpu", BF16, policy=MINE):
        pass


SCENES = [
    plain, empty, nested, with_cache, in_torch, by_module, decorated, generator, coroutine, in_a_graph, restored,
    checkpointed, recorded,
]


def everything() -> dict[str, Any]:
    """What a region may leave behind in this thread or process."""
    key = dispatcher.KEY
    return {
        "torch's autocast state": state(),
        "dispatcher keys": (dispatcher.is_included(key), dispatcher.is_excluded(key), unlisted.is_on()),
        "mark": (thread.mark, [torch.is_autocast_enabled(device) for device in policy_guard._DEVICES]),
        "mode": dispatcher.current(),
        "module hooks": [
            len(table)
            for table in (
                hooked._global_forward_pre_hooks, hooked._global_forward_hooks,
                hooked._global_forward_hooks_always_called,
            )
        ],
        "modules": (len(thread.regions), thread.module_hooks, len(thread.modules)),
        "record": recording.current(),
    }


def later_policy() -> Any:
    """The policy of a region that is given none, as operators meet it."""
    with autocast("cpu", BF16):
        mode = dispatcher.current()
    return None if mode is None else mode.policies


def events(call: Callable[[], Any], prefix: str) -> int:
    counter = Interrupter(prefix, 0)
    error = counter.run(call)
    assert error is None, repr(error)
    return counter.count


def clean_up(native: Any) -> None:
    """After a finding, so that the next is one of its own."""
    stack.leave_down_to(thread.regions, 0)
    mode = dispatcher.current()
    if mode is not None:        # of a recompute, which is no entry of the stack
        dispatcher.put_in_tls(dispatcher.TLS_NAME, mode.closed_copy)
    dispatcher.set_included(dispatcher.KEY, False)
    dispatcher.set_excluded(dispatcher.KEY, False)
    unlisted.include(False)
    policy_guard.write((), anew=True)
    for watch in list(module_hooks._open):
        watch.remove()
    thread.module_hooks = None
    del thread.modules[:]
    for kind, enabled, dtype in native:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
    while torch.autocast_decrement_nesting() >= 0:
        pass
    torch.autocast_increment_nesting()
    torch.set_autocast_cache_enabled(True)
    recording._taken.clear()


# Python code cannot undo what is interrupted on the way back from it, or before its first `try`; nor can torch's.
EDGES = {
    "autocast.__enter__", "push", "autocast.__exit__", "Restoring.__enter__", "Restoring.__exit__",
    "_plain.<locals>.wrapper",
}
# Have a `with region:` of their own: before and after it, as in any user's code.
CALLERS = {"_stepped", "_run_again.<locals>.recompute", "Snapshot.wrap.<locals>.restored"}


def at_an_edge(place: Place) -> bool:
    return place.function in CALLERS or (place.function in EDGES and not place.guarded)


def interrupt(scene: Callable[[], Any], prefix: str, at: int, fresh: dict[str, Any]) -> tuple[Place | None, Any]:
    """Where the interrupt hit, and what it left behind."""
    native = native_state(KINDS)
    interrupter = Interrupter(prefix, at)
    error = interrupter.run(scene)
    if scene is in_a_graph:     # no `with` is around its regions: those left are closed by the next that is entered
        with autocast("cpu"):
            pass
    found = everything()
    left = {name: (found[name], value) for name, value in fresh.items() if found[name] != value}
    if type(error) is not KeyboardInterrupt:
        left["exception"] = repr(error)
    if left:
        clean_up(native)
    return interrupter.place, left


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_an_interrupt_leaves_nothing_behind(scene):
    scene()
    fresh, policy, n = everything(), later_policy(), events(scene, HERE)
    found: dict[Place | None, Any] = {}
    done = beyond = 0
    for rng in rounds(scene.__name__, share=1 / len(SCENES)):
        done += 1
        place, left = interrupt(scene, HERE, rng.randrange(1, n + 1), fresh)
        assert later_policy() == policy, place
        if place is None and left == {"exception": "None"}:
            beyond += 1     # a weak reference's callback was counted that did not run this time
        elif left:
            found[place] = left
    print(f"{scene.__name__}: {done} interrupts at {n} places, {len(found)} left something, {beyond} came to the end")
    assert beyond <= 1 + done // 10
    wrong = {str(place): left for place, left in found.items() if place is None or not at_an_edge(place)}
    assert not wrong


def test_fewer_places_leave_something_than_in_torch():
    """Of all instructions of entering and leaving, those at the edges of the two methods."""

    def native() -> None:
        with torch.autocast("cpu", BF16):
            pass

    empty()
    fresh = everything()
    counts = {}
    for scene, prefix in ((native, TORCH), (empty, HERE)):
        n = events(scene, prefix)
        counts[scene] = sum(bool(interrupt(scene, prefix, at, fresh)[1]) for at in range(1, n + 1)), n
    print({scene.__name__: f"{left} of {n}" for scene, (left, n) in counts.items()})
    assert counts[empty][0] <= 14 < counts[native][0]


def test_exception_of_a_signal_handler_arrives_as_itself():
    """At any place of entering or leaving a nested region, also where the outer one is then left by an exception."""

    def two() -> None:
        with autocast("cpu", BF16), autocast("cpu", torch.float16):
            pass

    two()
    fresh, n = everything(), events(two, HERE)
    for at in range(1, n + 1):
        native = native_state(KINDS)
        interrupter = Interrupter(HERE, at, TimeoutError)
        error = interrupter.run(two)
        assert type(error) is TimeoutError, interrupter.place
        if everything() != fresh:
            assert interrupter.place is not None
            assert at_an_edge(interrupter.place), interrupter.place
            clean_up(native)


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
