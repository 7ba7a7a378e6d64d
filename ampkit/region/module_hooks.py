"""Rules for modules: while a region with such rules is open, each bound module's forward runs in a region of its own.

One pair of global module hooks looks up every module that runs. torch calls the hooks while any region whose policy has
module rules is open. Hooks on the bound modules alone would be fewer calls, and wrong under `torch.compile`: Dynamo
does not guard on a module's own hooks, so code compiled for a module without hooks would run for a bound module of the
same class. Global hooks make Dynamo guard on the modules, and copies and pickles of a model do not contain them.
`torch_internals.modules` says how the hooks get keyword arguments.

Under Dynamo the same hooks are traced; `traced` has what they do there.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn import Module

from ampkit.engine.thread_state import thread
from ampkit.policy.module_rules import IDENTITIES, BoundRule, ModuleRules
from ampkit.region import traced
from ampkit.region.module_regions import cast_inputs, is_active, region_for, rules_of
from ampkit.region.stack import Entry, leave_down_to, push
from ampkit.torch_internals.dynamo import dynamo_skip, tracer, tracing
from ampkit.torch_internals.forks import renewed_lock
from ampkit.torch_internals.modules import EAGER, put_hooks, take_hooks
from ampkit.user_code import warn_user

_MAX_WARNED = 1024
_lock = renewed_lock(__name__, "_lock")  # reentrant: a signal handler may open such a region too
_open: weakref.WeakSet[_ModuleLookup] = weakref.WeakSet()  # of all threads; freed with their thread
_warned: set[ModuleRules] = set()  # compared by value: a policy may be made again in every step


def begin_module_rules(entry: Entry) -> None:
    """Look up the modules that this thread calls while the region is open. `stack.push` calls this."""
    lookup = _ModuleLookup(entry)
    entry.end_rules = lookup.end
    lookup.begin()


class _ModuleLookup:
    """Which modules ran in an open region whose policy has module rules, from `begin` to `end`."""

    def __init__(self, entry: Entry) -> None:
        self.rules = dict(entry.mode.policies)[entry.spec.device_type].modules
        self.depth = len(thread.modules)
        self.outer: _ModuleLookup | None = thread.module_lookup
        self.ran_a_model = False  # any module that has modules
        self.ran_another = False  # a model of the class of a bound one, neither bound nor a copy
        self.ran_bound = False  # a bound module

    def begin(self) -> None:
        """Register the hooks."""
        if tracer() is None:  # a trace has hooks of its own
            _open.add(self)
            thread.module_lookup = self
            _place_hooks()

    def end(self, failed: bool) -> None:
        """Remove the hooks if no other region needs them, and warn if the rules had no effect, unless `failed`.

        Also completes a `begin` or `end` that was cut short.
        """
        del thread.modules[self.depth :]  # an interrupt has ended these modules: `after_forward` did not run
        thread.module_lookup = self.outer
        _open.discard(self)
        _place_hooks()
        if self.outer is not None and self.outer.rules == self.rules:
            self.outer.ran_a_model |= self.ran_a_model
            self.outer.ran_another |= self.ran_another
            self.outer.ran_bound |= self.ran_bound
        elif (self.ran_a_model or self.ran_bound) and not failed:
            self._report()

    def _report(self) -> None:
        """Warn, once for these rules, if no bound module ran in this region or if a rule has lost all its modules."""
        first = not self.rules.ran
        self.rules.ran |= self.ran_bound
        if not self.ran_bound:
            if first or self.ran_another or self.rules.are_gone():
                _warn(
                    self.rules,
                    self.rules.check(),
                    (
                        "none of the modules that this policy's rules bind ({}) ran in this region, so the rules had "
                        "no effect"
                    ),
                )
        elif first:
            lost = self.rules.lost()
            if lost:
                _warn(self.rules, lost, "the modules that rules of the policy bind are no longer in the model: {}")


def _place_hooks() -> None:
    """Register the global hooks if a region of any thread needs them, else remove them."""
    with _lock:
        if any(_open):  # `len` may still count one that was just freed
            put_hooks(EAGER, before_forward, after_forward, always=True)
        else:
            take_hooks(EAGER, always=True)


def _warn(rules: ModuleRules, reported: Iterable[BoundRule], problem: str) -> None:
    """Warn once about these rules; the keys of `reported` are put into `problem`."""
    if rules in _warned:
        return
    if len(_warned) >= _MAX_WARNED:
        _warned.clear()
    _warned.add(rules)  # first: where warnings are errors, leaving the region is completed by a second call
    warn_user(
        f"{problem.format(', '.join(rule.key for rule in reported))}. Bind the model that runs, and bind it after its "
        "modules are replaced: policy.for_modules(model, {...}); policy.check() lists modules that are gone",
        ("torch.", "contextlib"),
    )


@dynamo_skip
def before_forward(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    """Global forward pre-hook: enter the regions that the module's rules ask for, and cast a float32 module's inputs.

    torch passes keyword arguments for bound modules only, and expects them back beside the positional ones.
    """
    if tracing():
        return traced.before_forward_in_trace(module, args, kwargs)
    lookup = thread.module_lookup
    if lookup is None:  # the hooks are there for another thread's region
        return None
    if module._modules:
        lookup.ran_a_model = True
        lookup.ran_another |= lookup.rules.is_another_model(module)
    if IDENTITIES not in module.__dict__:  # no policy binds it
        return None
    rules = list(rules_of(module))
    # A call of a module by itself is noted without regions, so that `after_forward` pairs each call with its end.
    if not rules and not any(running is module for running, _ in thread.modules):
        return None
    thread.modules.append((module, len(thread.regions)))  # first: `after_forward` runs if the rest of this raises
    for policy, precision in rules:
        lookup.ran_bound = True
        if is_active(policy.device_type):
            push(thread.regions, region_for(policy, precision))
            if precision is torch.float32:
                args, kwargs = cast_inputs(args, kwargs, policy.device_type)
    return args if kwargs is None else (args, kwargs)


@dynamo_skip
def after_forward(module: Module, args: Any, output: Any) -> None:
    """Global forward hook, also called when the forward raises: leave the regions that `before_forward` entered."""
    if tracing():
        traced.after_forward_in_trace(module)
        return
    if IDENTITIES not in module.__dict__:
        return
    calls = thread.modules
    if not any(running is module for running, _ in calls):
        return
    while calls:
        running, depth = calls[-1]  # this call, or one inside it that ended without running hooks
        leave_down_to(thread.regions, depth)
        del calls[-1]
        if running is module:
            return
