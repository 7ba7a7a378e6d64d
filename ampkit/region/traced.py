"""Regions inside `torch.compile`: what Dynamo traces in place of the eager region.

Dynamo cannot trace changes of dispatcher state, so a traced region calls two functions that Dynamo puts into the graph
as they are, and also runs while it traces. Whatever runs the graph afterwards (AOTAutograd to trace it,
`backend="eager"`, `torch.export`) opens and closes the region where the user's code did, and casts exactly what the
region's policy casts. The graph that AOTAutograd hands to inductor holds casts and no region.

For a region that is open around a compiled call, see `policy_guard`.
"""

from __future__ import annotations

import functools
import json
import sys

import torch

from ampkit.engine.policy_mark import trace_backward_as_eager
from ampkit.engine.thread_state import thread
from ampkit.policy.policy import Policy, register_changes
from ampkit.region.arguments import RegionSpec
from ampkit.region.stack import leave_down_to, leave_ended, push
from ampkit.torch_internals.dynamo import (
    at_end_of_trace,
    called_while_tracing,
    put_in_graphs,
    records_autocast,
    runs_a_graph,
    tracer,
)


def enter(device_type: str, dtype: torch.dtype, enabled: bool, cache_enabled: bool, rules: str | None) -> None:
    """Open a region in the traced graph; `leave_region` closes it. Dynamo traces this function."""
    _let_in_graphs()
    enter_region(device_type, dtype, enabled, cache_enabled, rules, register_changes())


def enter_region(
    device_type: str, dtype: torch.dtype, enabled: bool, cache_enabled: bool, rules: str | None, changes: int
) -> None:
    """Open a region given by constants, as a graph holds them: `rules` is a `Policy.text`.

    `changes` counts calls of `register_op`: a constant in the graph, so that Dynamo retraces after another call.
    """
    stack = thread.regions
    leave_ended(stack)
    tracing_in = tracer()
    if tracing_in is not None:      # it must close the regions that it leaves open if it fails or stops
        at_end_of_trace(tracing_in, functools.partial(leave_down_to, stack, len(stack)))
    caller = sys._getframe(1)
    spec = _spec(device_type, dtype, enabled, cache_enabled, rules)
    if thread.announced and tracing_in is not None:
        policy, of_module = thread.announced.pop(0)
        if policy.text == rules:        # else the trace began again before it came here
            spec = spec._replace(policy=policy, of_module=of_module)
    push(spec, frame=caller if runs_a_graph(caller) else None)
    if tracing_in is not None and thread.mark:
        trace_backward_as_eager()


def leave_region() -> None:
    """Close the region that `enter_region` opened last.

    Raises `RuntimeError` in a strict export where `torch.autocast` was used inside: tracing records it and does not
    run it, so that the casts would be those of a region without it.
    """
    stack = thread.regions
    leave_down_to(stack, len(stack) - 1)
    translator = tracer()
    if translator is not None and translator.export and records_autocast(translator, enter_region, leave_region):
        raise RuntimeError(
            "torch.export.export(strict=True) does not run a torch.autocast inside an ampkit region, so its casts "
            "would be wrong; pass strict=False, or use ampkit.autocast there"
        )


@functools.lru_cache(maxsize=256)
def _spec(device_type: str, dtype: torch.dtype, enabled: bool, cache_enabled: bool, rules: str | None) -> RegionSpec:
    """The region these constants describe. It was checked, with its warnings, when the user made it."""
    policy = None if rules is None else Policy.from_dict(json.loads(rules))
    return RegionSpec(device_type, dtype, enabled, cache_enabled, policy)


@called_while_tracing       # so not before Dynamo is imported, which takes seconds
def _let_in_graphs() -> bool:
    put_in_graphs(enter_region)
    put_in_graphs(leave_region)
    return True
