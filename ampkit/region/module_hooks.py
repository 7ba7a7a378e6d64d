"""Module rules in a region: the forward of a module that `Policy.for_modules` bound runs in a region of its own.

One pair of global module hooks, present while a region whose policy has module rules is open, looks every module that
runs up among those that the policy bound. Hooks on the bound modules alone would be fewer calls, and wrong under
`torch.compile`: Dynamo does not guard on a module's hooks, so what it has compiled for a module without hooks would run
for a bound one of the same class as well. These hooks make it guard on the modules. They leave nothing behind that
copies and pickles of a model would take along; `torch_internals.modules` has how they get keyword arguments.

A rule of float32 casts the module's 16-bit inputs and turns autocast off; any other is a region inside the region.

Under Dynamo the same hooks are traced; where the region is opened in traced code, the trace registers them. What a rule
asks for is looked up in code that Dynamo calls while it traces, with the regions entered so far open, and becomes a
constant of the graph. All state of a trace is undone by its end.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from ampkit.containers import map_tensors
from ampkit.engine.thread_state import thread
from ampkit.policy.module_rules import BoundRule, ModuleRules
from ampkit.policy.policy import Policy
from ampkit.region import traced
from ampkit.region.arguments import RegionSpec, checked_spec
from ampkit.region.stack import leave_down_to, push
from ampkit.torch_internals.dispatcher import current
from ampkit.torch_internals.dynamo import called_while_tracing, dynamo_skip, object_at, tracer, tracing
from ampkit.torch_internals.forks import renewed_lock
from ampkit.torch_internals.modules import EAGER, TRACED, has_hooks, put_hooks, take_hooks
from ampkit.user_warnings import warn_user

_MOST = 1024
_lock = renewed_lock(__name__, "_lock")     # reentrant: a signal handler may open such a region too
_open: weakref.WeakSet[ModuleRuleHooks] = weakref.WeakSet()     # of all threads; freed with their thread
_warned: set[ModuleRules] = set()           # by value: a policy may be made again in every step


class ModuleRuleHooks:
    """The hooks that an open region needs whose policy has module rules, from `begin` to `remove`."""

    def __init__(self, policy: Policy) -> None:
        self.rules = policy.modules
        self.depth = len(thread.modules)
        self.outer: ModuleRuleHooks | None = thread.module_hooks
        self.called_a_model = False     # any module that has modules
        self.called_another = False     # one of the class of a bound model, neither bound nor a copy
        self.ran = False                # a bound module
        self.failed = False             # the region ended by an exception

    def begin(self) -> None:
        """Have modules that this thread calls looked up from here on."""
        if tracer() is None:        # a trace has hooks of its own
            _open.add(self)
            thread.module_hooks = self
            _place_hooks()

    def remove(self) -> None:
        """End it, and warn if the rules had no effect; also completes a `begin` or `remove` that was cut short."""
        del thread.modules[self.depth :]    # an interrupt has ended them: their hooks did not run
        thread.module_hooks = self.outer
        _open.discard(self)
        _place_hooks()
        if self.outer is not None and self.outer.rules == self.rules:
            self.outer.called_a_model |= self.called_a_model
            self.outer.called_another |= self.called_another
            self.outer.ran |= self.ran
        elif (self.called_a_model or self.ran) and not self.failed:
            self._report()

    def _report(self) -> None:
        """Warn, once for these rules, where they had no effect on what this region ran."""
        first = not self.rules.ran
        self.rules.ran |= self.ran
        if not self.ran:
            if first or self.called_another or self.rules.are_gone():
                _warn(self.rules, self.rules.check(), (
                    "none of the modules that this policy's rules bind ({}) ran in this region: the rules have no "
                    "effect on what did"
                ))
        elif first:
            lost = self.rules.lost()
            if lost:
                _warn(self.rules, lost, "the modules that rules of the policy bind are no longer in the model: {}")


def _place_hooks() -> None:
    """Register the global hooks if a region of any thread needs them, else remove them."""
    with _lock:
        if any(_open):      # `len` may still count one that was just freed
            put_hooks(EAGER, before, after, always=True)
        else:
            take_hooks(EAGER, always=True)


def _warn(rules: ModuleRules, found: Iterable[BoundRule], what: str) -> None:
    if rules in _warned:
        return
    if len(_warned) >= _MOST:
        _warned.clear()
    _warned.add(rules)      # first: where warnings are errors, leaving the region is completed by a second call
    warn_user(
        f"{what.format(', '.join(rule.key for rule in found))}. Bind the model that runs, after whatever replaces its "
        "modules: policy.for_modules(model, {...}); policy.check() says which modules are gone",
        ("torch.", "contextlib"),
    )


@dynamo_skip
def before(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    """Global forward pre-hook: enters the regions that the module's rules ask for, and casts a float32 module's inputs.

    torch gives keyword arguments for bound modules alone, and takes them back beside the others.
    """
    if tracing():
        return _before_in_trace(module, args, kwargs)
    hooks = thread.module_hooks
    if hooks is None:       # another thread's region needs the hooks
        return None
    if module._modules:
        hooks.called_a_model = True
        hooks.called_another |= hooks.rules.is_another_model(module)
    found = list(_rules_of(module))
    if not found and not any(called is module for called, _ in thread.modules):
        return None         # an entry without regions where the module calls itself: `after` ends a call by its module
    thread.modules.append((module, len(thread.regions)))    # first: if what follows raises, `after` runs
    for policy, value in found:
        hooks.ran = True
        if _is_followed(policy.device_type):
            push(_region(policy, value))
            if value is torch.float32:
                args, kwargs = _cast_inputs(args, kwargs, policy.device_type)
    return args if kwargs is None else (args, kwargs)


@dynamo_skip
def after(module: Module, args: Any, output: Any) -> None:
    """Global forward hook, also called when the forward raises: leaves the regions that `before` entered."""
    if tracing():
        _after_in_trace(module)
        return
    calls = thread.modules
    if not any(called is module for called, _ in calls):
        return
    while calls:
        called, depth = calls[-1]       # or a module inside it, which ended without running hooks
        leave_down_to(thread.regions, depth)
        del calls[-1]
        if called is module:
            return


def _rules_of(module: Module) -> Iterator[tuple[Policy, Any]]:
    """The policies here that bind a module, and what they say of it."""
    mode = current()
    for _, policy in () if mode is None else mode.policies:
        value = policy.modules.find(module) if policy.modules else None
        if value is not None:
            yield policy, value


def _is_followed(device_type: str) -> bool:
    """Whether module rules apply here: autocast is on, or the module around is one that a rule keeps in float32."""
    if torch.is_autocast_enabled(device_type):
        return True
    spec = thread.regions[-1].spec if thread.regions else None
    return spec is not None and spec.of_module and not spec.enabled and spec.device_type == device_type


def _cast_inputs(args: Any, kwargs: Any, device_type: str) -> tuple[Any, Any]:
    """Arguments with the 16-bit tensors of a device, in any nesting of containers, cast to float32."""

    def cast(tensor: Tensor) -> Tensor:
        low = tensor.dtype is torch.bfloat16 or tensor.dtype is torch.float16
        return tensor.float() if low and tensor.device.type == device_type else tensor

    return map_tensors(args, cast), map_tensors(kwargs, cast)


def _region(policy: Policy, value: Any) -> RegionSpec:
    """The region that a rule asks for: another policy, float32 without autocast, or a dtype under the same policy."""
    if isinstance(value, Policy):
        return checked_spec(policy.device_type, policy=policy.inside(value), of_module=True)
    if value is torch.float32:
        return checked_spec(policy.device_type, None, False, policy=policy, of_module=True)
    return checked_spec(policy.device_type, value, policy=policy, of_module=True)


# In a trace

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
    traced.enter(region.device_type, region.dtype, region.enabled, region.cache_enabled, text)
    if has_rules or len(_entered) > 0 or has_hooks(EAGER):
        _entered.append((None, 1))
        if not has_hooks(EAGER):
            put_hooks(TRACED, before, after)


def leave_in_trace() -> None:
    """Close the region that `enter_in_trace` opened last, and those of modules that ended inside it without hooks."""
    if len(_entered) == 0:
        traced.leave_region()
        return
    _leave_to(None)
    if len(_entered) == 0:
        take_hooks(TRACED)


def _leave_to(module: Module | None) -> None:
    called, n_regions = _entered.pop()
    while called is not module:
        for _ in range(n_regions):
            traced.leave_region()
        called, n_regions = _entered.pop()
    for _ in range(n_regions):
        traced.leave_region()


def _before_in_trace(module: Module, args: Any, kwargs: Any) -> Any:
    rules = _rules_in_trace(id(module))
    if rules is None:
        for called, _ in _entered:
            if called is module:        # it calls itself, as in `before`
                _entered.append((module, 0))
                return None
        return None
    lines = [] if rules == "" else rules.split("\n")
    _entered.append((module, len(lines)))
    for line in lines:
        device_type, dtype, enabled, text = line.split("|", 3)
        traced.enter(device_type, getattr(torch, dtype), enabled == "True", torch.is_autocast_cache_enabled(), text)
        if enabled == "False":
            args, kwargs = _cast_inputs(args, kwargs, device_type)
    return args if kwargs is None else (args, kwargs)


def _after_in_trace(module: Module) -> None:
    for called, _ in _entered:
        if called is module:
            _leave_to(module)
            return


@called_while_tracing
def _rules_in_trace(module_id: int) -> str | None:
    """A line for each region that a module's rules ask for: `device type|dtype|enabled|Policy.text`.

    None for a module that is not bound. Dynamo guards on the module, since this takes its `id`.
    """
    found = list(_rules_of(object_at(module_id)))
    if not found:
        return None
    lines = []
    thread.announced.clear()
    for policy, value in found:
        policy.modules.ran = True
        if _is_followed(policy.device_type):
            spec = _region(policy, value)
            inner, dtype = spec.policy or policy, str(spec.dtype).removeprefix("torch.")
            thread.announced.append((inner, True))
            lines.append(f"{spec.device_type}|{dtype}|{spec.enabled}|{inner.text}")
    return "\n".join(lines)


@called_while_tracing
def _announce(policy_id: int) -> bool:
    """Have the region that the trace enters next follow this policy, module rules included, while it traces."""
    thread.announced[:] = [(object_at(policy_id), False)]
    return True
