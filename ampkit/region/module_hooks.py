"""Rules for modules: the regions that `Policy.for_modules` puts around modules' forwards.

`regions_for` decides which regions a module's forward needs, for eager and compiled code. In eager code global module
hooks enter and leave them; in compiled code Dynamo traces hooks that put the same regions into the graph.

torch calls the global hooks around every module of the process, so they are registered only while a thread has a region
open whose policy has rules for modules. Hooks only on the bound modules would be fewer calls, and wrong under
`torch.compile`: Dynamo does not guard on a module's own hooks, so code compiled for a module without hooks would run
for a bound module of the same class.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from ampkit.containers import map_tensors
from ampkit.dispatch.dispatcher import current_mode
from ampkit.forks import process_lock
from ampkit.policy.module_rules import HOOKS, IDENTITIES
from ampkit.policy.policy import Policy
from ampkit.region.arguments import RegionSpec, checked_spec
from ampkit.region.compiled import enter_by_text, leave_region
from ampkit.region.stack import OpenRegion, call_at_end, enter, leave_down_to, thread
from ampkit.torch_private import (
    called_while_tracing,
    dynamo_skip,
    forward_hooks,
    forward_hooks_always,
    forward_pre_hooks,
    tracing,
)

__all__ = ["apply_module_rules", "enter_in_trace", "leave_in_trace", "regions_for"]

_EAGER, _TRACED = HOOKS  # constant keys, since Dynamo guards on them


def regions_for(module: Module) -> list[RegionSpec] | None:
    """Return the regions in which a module's forward runs, by the rules of the open region's policies; None without a
    rule.

    A disabled region belongs to a float32 rule: the module's 16-bit inputs are cast to float32.
    """
    mode = current_mode()
    if mode is None:
        return None
    regions: list[RegionSpec] | None = None
    for device_type, policy in mode.policies:
        precision = policy.modules.find(module) if policy.modules else None
        if precision is not None:
            regions = regions or []
            if _is_active(device_type):
                regions.append(_region(policy, precision))
    return regions


def _is_active(device_type: str) -> bool:
    """Whether module rules apply: autocast is on, or a rule keeps the module around this one in float32."""
    if torch.is_autocast_enabled(device_type):
        return True
    spec = thread.regions[-1].spec if thread.regions else None
    return spec is not None and spec.of_module and not spec.enabled and spec.device_type == device_type


def _region(policy: Policy, precision: Any) -> RegionSpec:
    """Return the region of a rule: another policy, float32 without autocast, or a dtype under the same policy."""
    device_type = policy.device_type
    if isinstance(precision, Policy):
        return checked_spec(device_type, policy=policy.inside(precision), of_module=True)
    if precision is torch.float32:
        return checked_spec(device_type, enabled=False, policy=policy, of_module=True)
    return checked_spec(device_type, precision, policy=policy, of_module=True)


def _cast_inputs(args: Any, kwargs: Any, device_type: str) -> tuple[Any, Any]:
    """Cast the 16-bit tensors of a device, in any nesting of containers, to float32."""

    def to_float32(tensor: Tensor) -> Tensor:
        is_16_bit = tensor.dtype is torch.bfloat16 or tensor.dtype is torch.float16
        return tensor.float() if is_16_bit and tensor.device.type == device_type else tensor

    return tuple([map_tensors(each, to_float32) for each in args]), kwargs and map_tensors(kwargs, to_float32)


# Eager code


class _Token:
    """Stands for an open region with rules for modules; freed with a thread that ends inside the region."""


_open: weakref.WeakSet[_Token] = weakref.WeakSet()  # of all threads


class _Running(threading.local):
    """The bound modules that run in this thread, each with the number of regions around it."""

    def __init__(self) -> None:
        self.modules: list[tuple[Module, int]] = []


_running = _Running()


def apply_module_rules(region: OpenRegion) -> None:
    """Add the hooks for modules until the region that was just entered ends, if its policy has rules for modules."""
    if region.reached and region.spec.device_type in region.state.mode.with_module_rules:
        call_at_end(functools.partial(_remove_hooks, _add_hooks(), len(_running.modules)))


def _add_hooks() -> _Token:
    token = _Token()
    with process_lock():
        _open.add(token)
        forward_pre_hooks[_EAGER] = _before_forward
        forward_hooks[_EAGER] = _after_forward
        forward_hooks_always[_EAGER] = True  # even if the forward raises
    return token


def _remove_hooks(token: _Token, n_running: int) -> None:
    del _running.modules[n_running:]  # modules whose call an interrupt has ended without their hooks
    with process_lock():
        _open.discard(token)
        if not _open:  # other code may have cleared torch's tables since
            for hooks in (forward_pre_hooks, forward_hooks, forward_hooks_always):
                hooks.pop(_EAGER, None)


@dynamo_skip
def _before_forward(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    """Global forward pre-hook: enter the module's regions.

    torch passes keyword arguments for bound modules only, and expects them back with the positional ones.
    """
    if tracing():
        return _before_forward_in_trace(module, args, kwargs)
    if IDENTITIES not in module.__dict__:  # no policy binds it
        return None
    regions = regions_for(module)
    # A call of a module by itself is noted without regions, so that `_after_forward` pairs each call with its end.
    if regions is None and not any(running is module for running, _ in _running.modules):
        return None
    _running.modules.append((module, len(thread.regions)))  # first: `_after_forward` runs if the rest of this raises
    for spec in regions or ():
        enter(spec)
        if not spec.enabled:
            args, kwargs = _cast_inputs(args, kwargs, spec.device_type)
    return args if kwargs is None else (args, kwargs)


@dynamo_skip
def _after_forward(module: Module, args: Any, output: Any) -> None:
    """Global forward hook, also called when the forward raises: leave the regions that `_before_forward` entered."""
    if tracing():
        _after_forward_in_trace(module)
        return
    if IDENTITIES not in module.__dict__ or not any(running is module for running, _ in _running.modules):
        return
    while True:
        running, depth = _running.modules.pop()  # this call, or one inside it that ended without running hooks
        leave_down_to(depth)
        if running is module:
            return


# Compiled code

# The regions that the trace has entered, as (None, 1), and the bound modules that it is in, with the number of regions
# that their rules have entered. Dynamo runs no hooks after a module that raises: its item goes with the one around it.
_entered: list[tuple[Module | None, int]] = []


def enter_in_trace(spec: RegionSpec) -> None:
    """Enter a region in traced code, with hooks for modules if a policy has rules for some."""
    enter_by_text(spec.text())
    if _has_rules(spec.device_type) or len(_entered) > 0 or _EAGER in forward_pre_hooks:
        _entered.append((None, 1))
        if _EAGER not in forward_pre_hooks:
            forward_pre_hooks[_TRACED] = _before_forward_in_trace
            forward_hooks[_TRACED] = _after_forward_in_trace


@called_while_tracing
def _has_rules(device_type: str) -> bool:
    """Return whether a policy of the open region, its own or an inherited one, has rules for modules."""
    mode = current_mode()
    return mode is not None and device_type in mode.with_module_rules


def leave_in_trace() -> None:
    """Leave the region that `enter_in_trace` entered last, and the regions of modules that ended inside it."""
    if len(_entered) == 0:
        leave_region()
        return
    _leave_to(None)
    if len(_entered) == 0:
        forward_pre_hooks.pop(_TRACED, None)
        forward_hooks.pop(_TRACED, None)


def _leave_to(module: Module | None) -> None:
    """Drop items of `_entered` up to and with the item of `module` (None: of a region), leaving their regions."""
    while True:
        running, n_regions = _entered.pop()
        for _ in range(n_regions):
            leave_region()
        if running is module:
            return


@dynamo_skip
def _before_forward_in_trace(module: Module, args: Any, kwargs: Any = None) -> Any:
    """Global forward pre-hook: put the module's regions into the graph."""
    if not tracing():  # after a graph break inside a traced region
        return None
    texts = _region_texts(id(module))
    if texts is None:
        for running, _ in _entered:
            if running is module:  # it calls itself, as in `_before_forward`
                _entered.append((module, 0))
                return None
        return None
    regions = [] if texts == "" else texts.split("\n")
    _entered.append((module, len(regions)))
    for text in regions:
        enter_by_text(text)
        device_type, enabled, _ = text.split("|", 2)
        if enabled == "False":
            args, kwargs = _cast_inputs(args, kwargs, device_type)
    return args if kwargs is None else (args, kwargs)


@dynamo_skip
def _after_forward_in_trace(module: Module, args: Any = None, output: Any = None) -> None:
    """Global forward hook: leave the regions that `_before_forward_in_trace` entered."""
    if not tracing():
        return
    for running, _ in _entered:
        if running is module:
            _leave_to(module)
            return


@called_while_tracing
def _region_texts(module_id: int) -> str | None:
    """Return a line with `RegionSpec.text` for each region of a module; None for a module that is not bound.

    Dynamo guards on the module, since this takes its `id`.
    """
    regions = regions_for(_object_at(module_id))
    return None if regions is None else "\n".join([spec.text() for spec in regions])


def _object_at(address: int) -> Any:
    """Return the object with this `id`, for a function that Dynamo calls while it traces.

    In torch 2.11 Dynamo passes only constants to such a function. An object's `id` is one while Dynamo's guard on it
    holds; the code being traced keeps the object alive.
    """
    return ctypes.cast(address, ctypes.py_object).value
