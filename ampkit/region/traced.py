"""Regions in compiled code: what differs from eager code, which `stack` and `module_hooks` have.

Dynamo cannot trace changes of dispatcher state. So compiled code enters a region by a function, `enter_region`, that
Dynamo puts into the graph as a node and also runs while it traces; `leave_region` leaves it. Whatever runs the graph
afterwards (AOTAutograd to trace it, `backend="eager"`, `torch.export`) opens and closes the region where the user's
code did, and the operators between are cast by the region's policy. AOTAutograd's graph for inductor holds casts and no
region. Three kinds of functions:

- **In the graph**, `enter_region` and `leave_region`: their arguments are constants, the policy among them as text.
- **Traced**, `enter_in_trace` and `leave_in_trace`, which `autocast` calls, `before_forward_in_trace` and
  `after_forward_in_trace`, which torch or `module_hooks` calls, and their helpers: Dynamo traces them in place of what
  eager code does, down to calls of the first kind.
- **Run while Dynamo traces** (`called_while_tracing`): they look up what Dynamo cannot trace, such as the rule for a
  module. Their result becomes a constant of the graph.

All state of a trace is undone by its end. A region that is open around a compiled call needs none of this: its mode is
called as in eager code while Dynamo and AOTAutograd trace, and `engine.policy_mark` has the guard on its policy.
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

# In the graph


def enter_region(
    device_type: str, dtype: torch.dtype, enabled: bool, cache_enabled: bool, policy_text: str | None, changes: int
) -> None:
    """Enter the region that these constants describe. A graph calls this, and Dynamo as it traces `enter_by_constants`.

    `policy_text` is a `Policy.text`; None means the enclosing region's policy. `changes` is the number of `register_op`
    calls so far: since the graph has it as a constant, Dynamo traces again after another call.
    """
    stack = thread.regions
    leave_ended(stack)
    translator = tracer()
    if translator is not None:  # a trace that fails or stops leaves regions open: leave them at its end
        at_end_of_trace(translator, functools.partial(leave_down_to, stack, len(stack)))
    caller = sys._getframe(1)
    spec = _spec_of(device_type, dtype, enabled, cache_enabled, policy_text)
    if thread.announced and translator is not None:
        policy, of_module = thread.announced.pop(0)
        if policy.text == policy_text:  # else the trace began again before it came here
            spec = spec._replace(policy=policy, of_module=of_module)
    push(stack, spec, frame=caller if runs_a_graph(caller) else None)
    if translator is not None and stack.mark:
        trace_backward_as_eager()


def leave_region() -> None:
    """Leave the region that `enter_region` entered last. A graph calls this, and Dynamo as it traces a call of it.

    Raises `RuntimeError` in a strict export where `torch.autocast` was used inside: strict export records it without
    running it, so the casts in the graph would be those of a region without it.
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
def _spec_of(
    device_type: str, dtype: torch.dtype, enabled: bool, cache_enabled: bool, policy_text: str | None
) -> RegionSpec:
    """The region that these constants describe. `autocast` checked them, with its warnings, when the user made it."""
    policy = None if policy_text is None else Policy.from_dict(json.loads(policy_text))
    return RegionSpec(device_type, dtype, enabled, cache_enabled, policy)


# Traced, and run while Dynamo traces: entering and leaving


# The regions that the trace has entered, as (None, 1), and the bound modules that it is in, with the number of regions
# that their rules have entered. Dynamo runs no hooks after a module that raises: its item goes with the one around it.
_entered: list[tuple[Module | None, int]] = []


def enter_by_constants(
    device_type: str, dtype: torch.dtype, enabled: bool, cache_enabled: bool, policy_text: str | None
) -> None:
    """Put a call of `enter_region` into the graph; the caller puts one of `leave_region` there. Traced.

    Called below, and by `custom_bwd` for the backward of an autograd function.
    """
    _allow_in_graphs()
    enter_region(device_type, dtype, enabled, cache_enabled, policy_text, register_changes())


@called_while_tracing  # so not before Dynamo is imported, which takes seconds
def _allow_in_graphs() -> bool:
    put_in_graphs(enter_region)
    put_in_graphs(leave_region)
    return True


def enter_in_trace(spec: RegionSpec) -> None:
    """Enter a region in traced code, with hooks for modules if a policy has rules for some. `autocast` calls this."""
    policy = spec.policy
    has_rules = policy is not None and len(policy.modules.rules) > 0  # no `bool`: Dynamo traces it since torch 2.12
    policy_text = None if policy is None else policy.text
    if has_rules:
        _announce(id(policy))
    enter_by_constants(spec.device_type, spec.dtype, spec.enabled, spec.cache_enabled, policy_text)
    if has_rules or len(_entered) > 0 or has_hooks(EAGER):
        _entered.append((None, 1))
        if not has_hooks(EAGER):
            put_hooks(TRACED, before_forward_in_trace, after_forward_in_trace)


def leave_in_trace() -> None:
    """Leave the region that `enter_in_trace` entered last, and those of modules that ended inside it without hooks."""
    if len(_entered) == 0:
        leave_region()
        return
    _leave_to(None)
    if len(_entered) == 0:
        take_hooks(TRACED)


def _leave_to(module: Module | None) -> None:
    """Drop items of `_entered`, leaving their regions, up to and with that of `module`; None: that of a region."""
    running, n_regions = _entered.pop()
    while running is not module:
        for _ in range(n_regions):
            leave_region()
        running, n_regions = _entered.pop()
    for _ in range(n_regions):
        leave_region()


@called_while_tracing
def _announce(policy_id: int) -> bool:
    """Give the next `enter_region` of this trace the policy itself: the text in its arguments has no module rules."""
    thread.announced[:] = [(object_at(policy_id), False)]
    return True


# Traced, and run while Dynamo traces: rules for modules


@dynamo_skip
def before_forward_in_trace(module: Module, args: Any, kwargs: Any = None) -> Any:
    """Global forward pre-hook: put the regions that the module's rules ask for into the graph."""
    if not tracing():  # after a graph break inside a traced region
        return None
    rules = _rules_in_trace(id(module))
    if rules is None:
        for running, _ in _entered:
            if running is module:  # it calls itself, as in `module_hooks.before_forward`
                _entered.append((module, 0))
                return None
        return None
    lines = [] if rules == "" else rules.split("\n")
    _entered.append((module, len(lines)))
    for line in lines:
        device_type, dtype, enabled, policy_text = line.split("|", 3)
        cache_enabled = torch.is_autocast_cache_enabled()
        enter_by_constants(device_type, getattr(torch, dtype), enabled == "True", cache_enabled, policy_text)
        if enabled == "False":
            args, kwargs = cast_inputs(args, kwargs, device_type)
    return args if kwargs is None else (args, kwargs)


@dynamo_skip
def after_forward_in_trace(module: Module, args: Any = None, output: Any = None) -> None:
    """Global forward hook: leave the regions that `before_forward_in_trace` entered."""
    if not tracing():
        return
    for running, _ in _entered:
        if running is module:
            _leave_to(module)
            return


@called_while_tracing
def _rules_in_trace(module_id: int) -> str | None:
    """A line for each region that a module's rules ask for: `device type|dtype|enabled|Policy.text`.

    None for a module that is not bound. Dynamo guards on the module, since this takes its `id`.
    """
    rules = list(rules_of(object_at(module_id)))
    if not rules:
        return None
    lines = []
    thread.announced.clear()
    for policy, precision in rules:
        policy.modules.ran = True
        if is_active(policy.device_type):
            spec = region_for(policy, precision)
            inner_policy, dtype = spec.policy or policy, dtype_name(spec.dtype)
            thread.announced.append((inner_policy, True))
            lines.append(f"{spec.device_type}|{dtype}|{spec.enabled}|{inner_policy.text}")
    return "\n".join(lines)
