"""Regions in traced code: what Dynamo traces in place of entering, leaving and module hooks.

Dynamo cannot trace changes of dispatcher state, so a traced region calls two functions that Dynamo puts into the graph
as they are, and also runs while it traces. Whatever runs the graph afterwards (AOTAutograd to trace it,
`backend="eager"`, `torch.export`) opens and closes the region where the user's code did, and casts exactly what the
region's policy casts. The graph that AOTAutograd hands to inductor holds casts and no region.

For a region that is open around a compiled call, see `policy_mark`.

Module rules in traced code are at the end. What a rule asks for is looked up in a function that Dynamo calls while it
traces, with the regions entered so far open, and becomes a constant of the graph. All state of a trace is undone by its
end.
"""

from __future__ import annotations

import functools
import json
import sys
from typing import Any

import torch
from torch.nn import Module

from ampkit.dtypes import dtype_name
from ampkit.engine.policy_mark import trace_backward_as_eager
from ampkit.engine.thread_state import thread
from ampkit.policy.policy import Policy, register_changes
from ampkit.region.arguments import RegionSpec
from ampkit.region.module_regions import cast_inputs, is_active, region_for, rules_of
from ampkit.region.stack import leave_down_to, leave_ended, push
from ampkit.torch_internals.dynamo import (
    at_end_of_trace,
    called_while_tracing,
    dynamo_skip,
    object_at,
    put_in_graphs,
    records_autocast,
    runs_a_graph,
    tracer,
    tracing,
)
from ampkit.torch_internals.modules import EAGER, TRACED, has_hooks, put_hooks, take_hooks


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


# Module rules in a trace

# The regions that the trace has entered, as (None, 1), and the bound modules that it is in, with the number of regions
# that their rules have entered. Dynamo runs no hooks for a module that raises: its entry goes with the one around it.
_entered: list[tuple[Module | None, int]] = []


def enter_in_trace(region: RegionSpec) -> None:
    """Open `region` in traced code, and have modules called from here on looked up if a policy has rules for some."""
    policy = region.policy
    has_rules = policy is not None and len(policy.modules.rules) > 0    # no `bool`: Dynamo traces it since torch 2.12
    text = None if policy is None else policy.text
    if has_rules:
        _announce(id(policy))
    enter(region.device_type, region.dtype, region.enabled, region.cache_enabled, text)
    if has_rules or len(_entered) > 0 or has_hooks(EAGER):
        _entered.append((None, 1))
        if not has_hooks(EAGER):
            put_hooks(TRACED, before_in_trace, after_in_trace)


def leave_in_trace() -> None:
    """Close the region that `enter_in_trace` opened last, and those of modules that ended inside it without hooks."""
    if len(_entered) == 0:
        leave_region()
        return
    _leave_to(None)
    if len(_entered) == 0:
        take_hooks(TRACED)


def _leave_to(module: Module | None) -> None:
    called, n_regions = _entered.pop()
    while called is not module:
        for _ in range(n_regions):
            leave_region()
        called, n_regions = _entered.pop()
    for _ in range(n_regions):
        leave_region()


@dynamo_skip
def before_in_trace(module: Module, args: Any, kwargs: Any = None) -> Any:
    """Global forward pre-hook: puts the regions that the module's rules ask for into the graph."""
    if not tracing():       # after a graph break inside a traced region
        return None
    rules = _rules_in_trace(id(module))
    if rules is None:
        for called, _ in _entered:
            if called is module:        # it calls itself, as in `module_hooks.before`
                _entered.append((module, 0))
                return None
        return None
    lines = [] if rules == "" else rules.split("\n")
    _entered.append((module, len(lines)))
    for line in lines:
        device_type, dtype, enabled, text = line.split("|", 3)
        enter(device_type, getattr(torch, dtype), enabled == "True", torch.is_autocast_cache_enabled(), text)
        if enabled == "False":
            args, kwargs = cast_inputs(args, kwargs, device_type)
    return args if kwargs is None else (args, kwargs)


@dynamo_skip
def after_in_trace(module: Module, args: Any = None, output: Any = None) -> None:
    """Global forward hook: leaves the regions that `before_in_trace` entered."""
    if not tracing():
        return
    for called, _ in _entered:
        if called is module:
            _leave_to(module)
            return


@called_while_tracing
def _rules_in_trace(module_id: int) -> str | None:
    """A line for each region that a module's rules ask for: `device type|dtype|enabled|Policy.text`.

    None for a module that is not bound. Dynamo guards on the module, since this takes its `id`.
    """
    found = list(rules_of(object_at(module_id)))
    if not found:
        return None
    lines = []
    thread.announced.clear()
    for policy, value in found:
        policy.modules.ran = True
        if is_active(policy.device_type):
            spec = region_for(policy, value)
            inner, dtype = spec.policy or policy, dtype_name(spec.dtype)
            thread.announced.append((inner, True))
            lines.append(f"{spec.device_type}|{dtype}|{spec.enabled}|{inner.text}")
    return "\n".join(lines)


@called_while_tracing
def _announce(policy_id: int) -> bool:
    """Have the region that the trace enters next follow this policy, module rules included, while it traces."""
    thread.announced[:] = [(object_at(policy_id), False)]
    return True
