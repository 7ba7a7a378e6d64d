"""Regions in compiled code.

Dynamo cannot trace changes of dispatcher state. So compiled code enters a region by a function, `enter_region`, that
Dynamo puts into the graph as a node and also runs while it traces; `leave_region` leaves it. Whatever runs the graph
afterwards (AOTAutograd to trace it, `backend="eager"`, `torch.export`) opens and closes the region where the user's
code did, and the operators between are cast by the region's policy. AOTAutograd's graph for inductor holds casts and no
region.

A region that is open around a compiled call needs none of this: its mode is called as in eager code while Dynamo and
AOTAutograd trace, and `dispatch.dynamo_guard` has the guard on its policy.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.fx.node import has_side_effect

from ampkit.dispatch.dynamo_guard import begin_backward_as_eager, current_tag
from ampkit.policy.policy import register_changes
from ampkit.region.arguments import RegionSpec
from ampkit.region.stack import enter, leave_down_to, thread
from ampkit.torch_private import called_while_tracing, enter_autocast, tracer

__all__ = ["enter_by_text", "enter_region", "leave_region"]

# In the graph: the arguments are constants.


def enter_region(text: str, changes: int) -> None:
    """Enter the region of a `RegionSpec.text`. A graph calls this, and Dynamo as it traces.

    `changes` is the number of `register_op` calls so far: since the graph has it as a constant, Dynamo traces again
    after another call.
    """
    translator = tracer()
    if translator is not None:  # a trace that fails or stops leaves regions open: leave them at its end
        _at_end_of_trace(translator, functools.partial(leave_down_to, len(thread.regions)))
    caller = sys._getframe(1)
    enter(_spec_of(text), graph=caller if _runs_a_graph(caller) else None)
    if translator is not None and current_tag():
        begin_backward_as_eager()


def leave_region() -> None:
    """Leave the region that `enter_region` entered last. A graph calls this, and Dynamo as it traces.

    Raises `RuntimeError` in a strict export where `torch.autocast` was used inside: strict export records it without
    running it, so the graph would lack its casts.
    """
    leave_down_to(len(thread.regions) - 1)
    translator = tracer()
    if translator is not None and translator.export and _records_autocast(translator, enter_region, leave_region):
        raise RuntimeError(
            "torch.export.export(strict=True) does not run a torch.autocast inside an ampkit region, so its casts "
            "would be wrong; pass strict=False, or use ampkit.autocast there"
        )


@functools.lru_cache(maxsize=256)
def _spec_of(text: str) -> RegionSpec:
    return RegionSpec.from_text(text)


# Traced by Dynamo instead of the code of an eager region.


def enter_by_text(text: str) -> None:
    """Put a call of `enter_region` into the graph; the caller puts one of `leave_region` there."""
    _allow_in_graphs()
    enter_region(text, register_changes())


@called_while_tracing  # so not before Dynamo is imported, which takes seconds
def _allow_in_graphs() -> bool:
    _put_in_graphs(enter_region)
    _put_in_graphs(leave_region)
    return True


# Dynamo's tracer and its graphs


def _put_in_graphs(function: Callable[..., None]) -> None:
    """Have Dynamo put calls of `function` into graphs as they are, and keep tracers from dropping them as dead code."""
    torch.compiler.allow_in_graph(function)
    has_side_effect(function)


def _at_end_of_trace(translator: Any, call: Callable[[], None]) -> None:
    """Have `call` called when the trace ends, fails or stops."""
    translator.output.add_cleanup_hook(call)


def _records_autocast(translator: Any, enter: Callable[..., None], leave: Callable[..., None]) -> bool:
    """Whether the graph enters torch's autocast between its last node, a call of `leave`, and the call of `enter`."""
    depth = 0
    for node in reversed(translator.output.graph.nodes):
        if node.target is enter_autocast:
            return True
        if node.target is enter:
            depth += 1
        elif node.target is leave:
            depth -= 1
        if depth == 0:
            break
    return False


def _runs_a_graph(frame: FrameType) -> bool:
    """Whether a frame runs the generated code of an FX graph."""
    return frame.f_code.co_filename.startswith("<eval_with_key>")
