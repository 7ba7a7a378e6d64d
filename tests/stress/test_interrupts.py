"""Ctrl-C and exceptions of signal handlers while regions are entered and left, wherever CPython runs a handler.

Those places are the start of a Python function, the return of a call, and the jump back of a loop.
"""

import dis
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ampkit
from ampkit import Policy, Rule, WeightCache, autocast, record_casts
from ampkit.engine.thread_state import thread
from ampkit.region import recording, traced
from ampkit.region.stack import leave_down_to
from ampkit.torch_internals import dispatcher
from tests.helpers.regions import BF16, state

HERE = f"{Path(ampkit.__file__).parent}/"
MINE = Policy.default("cpu").with_rules({"aten::mm": Rule.FLOAT32})
MODEL = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2)))
BY_MODULE = MINE.for_modules(MODEL, {"0": Policy.torch("cpu"), "1": torch.float32})
WEIGHT = torch.nn.Parameter(torch.ones(2, 2))
X = torch.ones(2, 2)


def nested() -> None:
    with record_casts(), autocast("cpu", BF16, cache=WeightCache()), torch.autocast("cpu", BF16):
        with autocast("cpu", enabled=False), autocast("cpu", torch.float16, policy=MINE, cache_enabled=False):
            torch.mm(X, WEIGHT)


def by_module() -> None:
    with autocast("cpu", BF16, policy=BY_MODULE):
        MODEL(X)


def decorated() -> None:
    @autocast("cpu", BF16, policy=MINE)
    def steps() -> Any:
        yield torch.mm(X, WEIGHT)
        yield 2

    list(steps())


def in_a_graph() -> None:
    """What `torch.compile(backend="eager")` runs: regions entered and left by calls, with no `with` around them."""
    calls = {"enter": traced.enter_region, "leave": traced.leave_region, "dtype": BF16, "rules": MINE.text}
    source = "enter('cpu', dtype, True, True, rules, 0)\nenter('cpu', dtype, False, True, None, 0)\nleave()\nleave()"
    exec(compile(source, "<eval_with_key>.0", "exec"), calls)


def checkpointed() -> None:
    with autocast("cpu", BF16, policy=MINE):
        loss = checkpoint(lambda x: torch.mm(x, x).sin(), X.clone().requires_grad_(), use_reentrant=False).sum()
    loss.backward()


def everything() -> Any:
    """All state of this thread that a region may leave behind, and the policies of a region without one."""
    keys = [(dispatcher.is_included(key), dispatcher.is_excluded(key)) for key in dispatcher.KEY_NAMES]
    thread_state = state(), keys, dispatcher.current()
    with autocast("cpu", BF16):
        mode = dispatcher.current()
    return thread_state, None if mode is None else mode.policies, len(recording.records)


def interrupted(call: Callable[[], None], n: int, error: type[BaseException]) -> tuple[str, BaseException | None]:
    """Call with an exception at the n-th place in ampkit's code. Returns the place, "" for none, and what was raised.

    Generator expressions are left out: Python swallows an exception that is raised while one is closed.
    """
    count, place, last = 0, "", {}

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count, place
        code = frame.f_code
        if not code.co_filename.startswith(HERE) or code.co_name == "<genexpr>":
            return None
        frame.f_trace_opcodes = True
        before, now = last.get(frame, ""), dis.opname[code.co_code[frame.f_lasti]]
        if event == "opcode":
            last[frame] = now
        # Not as an exception of the call arrives: no handler runs there, and CPython would keep that exception current.
        returned = before.startswith(("CALL", "JUMP_BACKWARD")) and now != "PUSH_EXC_INFO"
        if event == "call" or (event == "opcode" and returned):
            count += 1
            if count == n:
                sys.settrace(None)
                place = f"{code.co_qualname}:{frame.f_lineno}"
                raise error
        return trace

    outer_trace = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except BaseException as raised:
        return place, raised.with_traceback(None)
    finally:
        sys.settrace(outer_trace)
    return place, None


# At the start of these functions neither their `try` nor the caller's has begun: Python code cannot undo an interrupt.
# The same holds where torch ends the recompute of a checkpoint with an exception of its own.
EDGES = (
    "autocast.__exit__",
    "_plain.<locals>.wrapper",
    "record_casts.__enter__",
    "record_casts.__exit__",
    "_stepped",
    "leave_down_to",
)


def clean_up() -> None:
    """Leave all open regions after a failure, so that later ones are independent of it."""
    leave_down_to(thread.regions, 0)
    recording.records.clear()
    while torch.is_autocast_enabled("cpu"):
        torch.set_autocast_enabled("cpu", False)


@pytest.mark.parametrize("scene", [nested, by_module, decorated, in_a_graph, checkpointed])
def test_an_interrupt_arrives_as_itself_and_leaves_nothing_behind(scene: Callable[[], None]) -> None:
    """Every other exception is one that `except Exception` catches."""
    scene()
    fresh, wrong, n, place, raised = everything(), [], 0, "first", None
    while place:
        n += 1
        error = (KeyboardInterrupt, TimeoutError)[n % 2]
        place, raised = interrupted(scene, n, error)
        if scene is in_a_graph:  # entering the next region leaves those of a call that has ended
            nested()
        if everything() != fresh or (place and type(raised) is not error):
            wrong.append((place, repr(raised)))
            clean_up()
            assert everything() == fresh
    assert n > 20
    assert [(place, raised) for place, raised in wrong if not place.startswith(EDGES)] == []
    assert len(wrong) <= 10, wrong
    assert sys.exc_info() == (None, None, None)
