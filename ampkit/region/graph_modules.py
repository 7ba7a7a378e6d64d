"""`Policy.for_modules` inside `torch.compile`: hooks that Dynamo can trace.

Dynamo traces the hooks of the modules it inlines, also hooks that traced code has just registered. They look a module's
rule up in Python code that Dynamo calls while it traces, with the regions entered so far open; Dynamo keeps the result
as a constant and guards on the module objects. All state here is undone by the time the trace ends.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Module

from ampkit.policy.module_paths import path_of
from ampkit.policy.policy import Policy
from ampkit.region import graph
from ampkit.region.running_modules import followed, in_force
from ampkit.region.spec import RegionSpec
from ampkit.torch_internals.dynamo import called_while_tracing, object_at
from ampkit.torch_internals.modules import has_hooks, put_hooks, take_hooks

_KEY: Any = "ampkit.compiled"


class Watch:
    """The module rules in force at the current point of the trace."""

    def __init__(self, policy: Policy | None, root: Module | None, inside: tuple[int, ...] = ()) -> None:
        self.policy = policy        # of a traced region; None: of the region around the compiled call
        self.inside = inside        # positions of the rules that lead from there to the nested policy in force
        self.root = root
        self.outermost: Module | None = None    # paths count from it where `root` is None

    def rule(self, module: Module) -> str | None:
        """The `rule_name` of a running module."""
        root = self.outermost if self.root is None else self.root
        return _rule_name(_address(self.policy), self.inside, id(root), id(module), _following())

    def within(self, position: str) -> Watch:
        """The watch inside a module with the rule at `position`; "" for a rule that is a dtype."""
        if position == "":
            return self
        watch = Watch(self.policy, self.root, (*self.inside, int(position)))
        watch.outermost = self.outermost
        return watch


_around = Watch(None, None)
_watches: list[Watch] = []      # of the regions, and of the modules with a rule, that the trace is in
_running: list[tuple[Module, int]] = []     # the modules that it is in, with the number of watches at their call
_outside: list[tuple[int, int]] = []        # the numbers of watches and of modules when each region was entered


def enter(region: RegionSpec, root: Module | None) -> None:
    """Open `region` in the trace, and have the modules called from here on follow its module rules if it has any."""
    policy = region.policy
    rules = None if policy is None else policy.text
    graph.enter(region.device_type, region.dtype, region.enabled, region.cache_enabled, rules)
    if _following() or _has_rules(region):
        other_device = region.device_type != _kind(_address(_top().policy))
        same = policy is None or (len(policy.modules.items) == 0 and other_device)
        _outside.append((len(_watches), len(_running)))
        _watches.append(_top() if same else Watch(policy, root))
        _install()


def leave(region: RegionSpec) -> None:
    """Close `region`, and go back to the module rules that were followed before it."""
    if _following():
        n_watches, n_running = _outside.pop()
        _leave_modules(n_watches + 1)
        _watches.pop()
        del _running[n_running:]
        _install()
    graph.leave_region()


def _leave_modules(n_watches: int) -> None:
    """Leave the modules with a rule whose watches come after the first `n_watches`.

    There are several if an exception ended a module: Dynamo runs no hooks then.
    """
    while len(_watches) > n_watches:
        _watches.pop()
        graph.leave_region()


def _has_rules(region: RegionSpec) -> bool:
    # Not `bool(...modules)`: Dynamo traces `__bool__` of a user-defined object only since torch 2.12.
    return region.policy is not None and len(region.policy.modules.items) > 0


def _following() -> bool:
    """Whether the trace is in a region with module rules, or in a module with one, that it has entered itself."""
    return len(_watches) > 0


def _top() -> Watch:
    return _watches[-1] if _following() else _around


def _install() -> None:
    if not _following():
        take_hooks(_KEY)
    elif not has_hooks(AROUND):
        put_hooks(_KEY, before, after)


AROUND: Any = "ampkit"      # key of the eager regions' hooks, which call `before` and `after` in a trace


def before(module: Module, args: Any) -> None:
    """Enter the region that the module's rule asks for. Dynamo traces this function."""
    watch = _top()
    if watch.outermost is None:
        watch.outermost = module
    _running.append((module, len(_watches)))
    rule = watch.rule(module)
    if rule is not None:
        device_type, dtype, position, text = rule.split("|", 3)
        fast = torch.get_autocast_dtype(device_type) if dtype == "" else _DTYPES[dtype]
        graph.enter(device_type, fast, True, torch.is_autocast_cache_enabled(), text)
        _watches.append(watch.within(position))


def after(module: Module, args: Any, output: Any) -> None:
    """Leave it. Dynamo traces this function."""
    called, n_watches = _running.pop()
    while called is not module:
        called, n_watches = _running.pop()
    _leave_modules(n_watches)
    watch = _top()
    if watch.outermost is module:
        watch.outermost = None


def rule_name(policy: Policy, inside: tuple[int, ...], root: Module, module: Module) -> str | None:
    """The rule of a module as a constant for Dynamo; None if the module has no rule.

    `device type|dtype or ""|position of a rule that is a policy, or ""|Policy.text`.
    """
    for position in inside:
        policy = policy.modules.items[position][1]
    value = policy.modules.find(module, path_of(root, module))
    if value is None or not torch.is_autocast_enabled(policy.device_type):
        return None
    if isinstance(value, Policy):
        position = next(n for n, (_, other) in enumerate(policy.modules.items) if other is value)
        return f"{policy.device_type}||{position}|{value.text}"
    return f"{policy.device_type}|{str(value).removeprefix('torch.')}||{policy.text}"


@called_while_tracing
def _rule_name(
    policy_id: int, inside: tuple[int, ...], root_id: int, module_id: int, following: bool
) -> str | None:
    root, module = object_at(root_id), object_at(module_id)
    policy = None if policy_id == 0 else object_at(policy_id)
    if policy_id != 0 and not hasattr(policy, "modules"):      # a stand-in of Dynamo's
        raise NotImplementedError(
            "a policy with module rules was made in the function that is compiled; call for_modules outside of it"
        )
    if policy is None:
        policy, root = followed(root)
        if policy is None or not (following or in_force(policy)):
            return None
    return rule_name(policy, inside, root, module)


@called_while_tracing
def _kind(policy_id: int) -> str | None:
    return None if policy_id == 0 else object_at(policy_id).device_type


def _address(policy: Policy | None) -> int:
    return 0 if policy is None else id(policy)      # torch 2.11 does not know the `id` of None


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
