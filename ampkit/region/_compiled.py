"""Regions inside `torch.compile`: what Dynamo traces in place of the eager region.

Dynamo cannot follow the dispatcher state that a region changes, so a traced region calls two functions that Dynamo
puts into the graph as they are, and also runs while it traces. Whoever runs the graph after that (AOTAutograd to trace
it, `backend="eager"` for real, `torch.export`) opens and closes the region where the user's code did, and casts what
the region's policy casts, no more and no less. What AOTAutograd hands to inductor holds casts and no region.

A region that is open around a compiled call is another matter: see `_fingerprint`.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.fx.node import has_side_effect

from ampkit.policy.policy import Policy, register_changes
from ampkit.torch_internals.lookup import private, refuse

if TYPE_CHECKING:
    from ampkit.region.autocast import autocast


F = TypeVar("F", bound=Callable[..., Any])

_Action = private("_C._dynamo.eval_frame._FrameAction")
_Strategy = private("_C._dynamo.eval_frame._FrameExecStrategy")
_set_strategy = private("_C._dynamo.eval_frame.set_code_exec_strategy")


def runs_as_it_is(function: F) -> F:
    """Decorator: Dynamo traces `function` into its caller, but compiles neither it nor what it calls by itself.

    Where a graph breaks inside a region, Dynamo goes on frame by frame; entering, casting and leaving are no frames
    to compile.
    """
    if refuse not in (_Action, _Strategy, _set_strategy):
        _set_strategy(function.__code__, _Strategy(_Action.SKIP, _Action.SKIP))
    return function


# Whether Dynamo is tracing the call. A name of our own for torch's function: a wrapper would cost every region twice.
tracing = torch.compiler.is_dynamo_compiling


def object_at(address: int) -> Any:
    """The object with this `id`, for a function that Dynamo calls while it traces.

    In torch 2.11 Dynamo hands such a function constants and nothing else. An object's `id` is one, for as long as the
    guard that Dynamo sets on it holds; whoever is being traced keeps the object alive.
    """
    return ctypes.cast(address, ctypes.py_object).value


def enter(kind: str, dtype: torch.dtype, enabled: bool, cache_enabled: bool, rules: str | None) -> None:
    """Open a region in the traced graph; `leave_region` closes it. Dynamo traces this function."""
    _let_in_graph()
    enter_region(kind, dtype, enabled, cache_enabled, rules, register_changes())


def enter_region(
    kind: str, dtype: torch.dtype, enabled: bool, cache_enabled: bool, rules: str | None, changes: int
) -> None:
    """Open a region given by constants, as a graph holds them: `rules` is a `Policy.text`.

    `changes` is how often `register_op` had been called: as a constant of the graph it makes Dynamo trace anew.
    """
    from ampkit.region.autocast import leave_down_to, leave_ended, push, regions

    stack = regions()
    leave_ended(stack)
    tracing_in = tracer()
    if tracing_in is not None:      # which has to close the regions that it leaves open where it fails or stops
        tracing_in.output.add_cleanup_hook(functools.partial(leave_down_to, stack, len(stack)))
    caller = sys._getframe(1)
    in_graph = caller.f_code.co_filename.startswith("<eval_with_key>")      # torch's name for the code of a graph
    push(_region(kind, dtype, enabled, cache_enabled, rules), frame=caller if in_graph else None)


def leave_region() -> None:
    """Close the region that `enter_region` opened last."""
    from ampkit.region.autocast import leave_down_to, regions

    stack = regions()
    leave_down_to(stack, len(stack) - 1)


@functools.lru_cache(maxsize=256)
def _region(kind: str, dtype: torch.dtype, enabled: bool, cache_enabled: bool, rules: str | None) -> autocast:
    """The region these constants mean. It was checked, and warned about, when the user made it."""
    from ampkit.region.autocast import autocast

    region = autocast(kind, enabled=False, cache_enabled=cache_enabled)
    region.fast_dtype = dtype
    region._enabled = enabled
    region.policy = None if rules is None else Policy.from_text(rules)
    return region


def tracer() -> Any:
    """Dynamo's instruction translator if Dynamo is tracing in this thread, else None."""
    dynamo = sys.modules.get("torch._dynamo.symbolic_convert")
    return None if dynamo is None else getattr(dynamo.tls, "current_tx", None)


def _let_in_graph() -> bool:
    """Tell Dynamo to put the two functions into graphs, and tracers not to drop them as dead code.

    Marked for Dynamo to call rather than trace: so it runs when Dynamo, which takes seconds to import, is there.
    """
    torch.compiler.allow_in_graph(enter_region)
    torch.compiler.allow_in_graph(leave_region)
    has_side_effect(enter_region)
    has_side_effect(leave_region)
    return True


_let_in_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]
