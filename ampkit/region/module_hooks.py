"""Module rules in a region: the forward of a module that `Policy.for_modules` bound runs in a region of its own.

One pair of global module hooks, present while a region whose policy has module rules is open, looks every module that
runs up among those that the policy bound. Hooks on the bound modules alone would be fewer calls, and wrong under
`torch.compile`: Dynamo does not guard on a module's hooks, so what it has compiled for a module without hooks would run
for a bound one of the same class as well. These hooks make it guard on the modules. They leave nothing behind that
copies and pickles of a model would take along; `torch_internals.modules` has how they get keyword arguments.

Under Dynamo the same hooks are traced; `traced` has what they do there.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn import Module

from ampkit.engine.thread_state import thread
from ampkit.policy.module_rules import BoundRule, ModuleRules
from ampkit.region import traced
from ampkit.region.module_regions import cast_inputs, is_active, region_for, rules_of
from ampkit.region.stack import Entry, leave_down_to, push
from ampkit.torch_internals.dynamo import dynamo_skip, tracer, tracing
from ampkit.torch_internals.forks import renewed_lock
from ampkit.torch_internals.modules import EAGER, put_hooks, take_hooks
from ampkit.user_code import warn_user

_MOST = 1024
_lock = renewed_lock(__name__, "_lock")     # reentrant: a signal handler may open such a region too
_open: weakref.WeakSet[_ModuleLookup] = weakref.WeakSet()     # of all threads; freed with their thread
_warned: set[ModuleRules] = set()           # by value: a policy may be made again in every step


def begin_module_rules(entry: Entry) -> None:
    """Have modules that this thread calls looked up while the region is open. For `stack.push`."""
    lookup = _ModuleLookup(entry)
    entry.end_rules = lookup.end
    lookup.begin()


class _ModuleLookup:
    """What an open region whose policy has module rules has seen of modules, from `begin` to `end`."""

    def __init__(self, entry: Entry) -> None:
        self.rules = dict(entry.mode.policies)[entry.spec.device_type].modules
        self.depth = len(thread.modules)
        self.outer: _ModuleLookup | None = thread.module_lookup
        self.called_a_model = False     # any module that has modules
        self.called_another = False     # one of the class of a bound model, neither bound nor a copy
        self.ran = False                # a bound module

    def begin(self) -> None:
        """Register the hooks."""
        if tracer() is None:        # a trace has hooks of its own
            _open.add(self)
            thread.module_lookup = self
            _place_hooks()

    def end(self, failed: bool) -> None:
        """Remove the hooks, and warn if the rules had no effect, unless an exception ended the region.

        Also completes a `begin` or `end` that was cut short.
        """
        del thread.modules[self.depth :]    # an interrupt has ended them: their hooks did not run
        thread.module_lookup = self.outer
        _open.discard(self)
        _place_hooks()
        if self.outer is not None and self.outer.rules == self.rules:
            self.outer.called_a_model |= self.called_a_model
            self.outer.called_another |= self.called_another
            self.outer.ran |= self.ran
        elif (self.called_a_model or self.ran) and not failed:
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
        return traced.before_in_trace(module, args, kwargs)
    hooks = thread.module_lookup
    if hooks is None:       # another thread's region needs the hooks
        return None
    if module._modules:
        hooks.called_a_model = True
        hooks.called_another |= hooks.rules.is_another_model(module)
    found = list(rules_of(module))
    if not found and not any(called is module for called, _ in thread.modules):
        return None         # an entry without regions where the module calls itself: `after` ends a call by its module
    thread.modules.append((module, len(thread.regions)))    # first: if what follows raises, `after` runs
    for policy, value in found:
        hooks.ran = True
        if is_active(policy.device_type):
            push(region_for(policy, value))
            if value is torch.float32:
                args, kwargs = cast_inputs(args, kwargs, policy.device_type)
    return args if kwargs is None else (args, kwargs)


@dynamo_skip
def after(module: Module, args: Any, output: Any) -> None:
    """Global forward hook, also called when the forward raises: leaves the regions that `before` entered."""
    if tracing():
        traced.after_in_trace(module)
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
