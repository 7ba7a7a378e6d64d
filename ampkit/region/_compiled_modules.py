"""`Policy.for_modules` inside `torch.compile`: hooks that Dynamo can trace.

Dynamo traces the hooks of the modules it inlines, also hooks that traced code has just put in place. What a module's
rule is, they ask of ordinary Python code, which Dynamo calls once, while it traces, and whose answer it keeps for as
long as it meets the same module objects. All state here is undone by the time the trace ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module
from torch.nn.modules import module as hooked

from ampkit.policy._module_rules import path_of
from ampkit.policy.policy import Policy
from ampkit.region import _compiled

if TYPE_CHECKING:
    from ampkit.region.autocast import autocast

_KEY: Any = "ampkit.compiled"
_watches: list[Watch] = []


class Watch:
    """A traced region with module rules; paths count from `root`, or from the outermost module where that is None."""

    def __init__(self, policy: Policy | None, root: Module | None) -> None:
        self.policy = policy
        self.root = root
        self.outermost: Module | None = None

    def rule(self, module: Module) -> str | None:
        """What `rule_name` says of a module that is running."""
        root = self.outermost if self.root is None else self.root
        return _rule_name(id(self.policy), id(root), id(module))

    def before(self, module: Module, args: Any) -> None:
        """Enter the region that the module's rule asks for."""
        if self.outermost is None:
            self.outermost = module
        rule = self.rule(module)
        if rule is not None:
            _enter_rule(rule)

    def after(self, module: Module, args: Any, output: Any) -> None:
        """Leave it."""
        if self.rule(module) is not None:
            _compiled.leave_region()
        if self.outermost is module:
            self.outermost = None


def enter(region: autocast, root: Module | None) -> None:
    """Open `region` in the trace, and have the modules called from here on follow its module rules if it has any."""
    policy = region.policy
    rules = None if policy is None else policy.text
    _compiled.enter(region._kind, region.fast_dtype, region._enabled, region._cache_enabled, rules)
    if _has_rules(region):
        _watches.append(Watch(policy, root))
        _install()


def leave(region: autocast) -> None:
    """Close `region`, and go back to the module rules that were followed before it."""
    if _has_rules(region):
        _watches.pop()
        _install()
    _compiled.leave_region()


def _has_rules(region: autocast) -> bool:
    # Not `bool(...modules)`: Dynamo learnt to trace that of an object with `__bool__` after torch 2.11.
    return region._enabled and region.policy is not None and len(region.policy.modules.items) > 0


def following() -> bool:
    """Whether the trace follows the module rules of a region that it has entered itself."""
    return len(_watches) > 0


def _install() -> None:
    if following():
        hooked._global_forward_pre_hooks[_KEY] = _watches[-1].before
        hooked._global_forward_hooks[_KEY] = _watches[-1].after
    else:
        del hooked._global_forward_pre_hooks[_KEY]
        del hooked._global_forward_hooks[_KEY]


def rule_name(policy: Policy, root: Module, module: Module) -> str | None:
    """The rule of a module as a constant that Dynamo can keep: a device type, a dtype or "", and a `Policy.text`.

    None if the module has no rule. Raises `NotImplementedError` for a rule that is a policy with module rules.
    """
    value = policy.modules.find(module, path_of(root, module))
    if value is None:
        return None
    if isinstance(value, Policy):
        if value.modules:
            raise NotImplementedError(
                f"the rule for module {type(module).__name__} is a policy that has module rules itself, which "
                "torch.compile cannot follow; put those rules into the outer policy"
            )
        return f"{policy.device_type}||{value.text}"
    return f"{policy.device_type}|{str(value).removeprefix('torch.')}|{policy.text}"


def _rule_name(policy_id: int, root_id: int, module_id: int) -> str | None:
    policy, root, module = map(_compiled.object_at, (policy_id, root_id, module_id))
    return rule_name(policy, root, module)


_rule_name._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _enter_rule(rule: str) -> None:
    """Enter the region that a `rule_name` means. Dynamo traces this function."""
    kind, dtype, text = rule.split("|", 2)
    fast = torch.get_autocast_dtype(kind) if dtype == "" else _DTYPES[dtype]
    _compiled.enter(kind, fast, True, torch.is_autocast_cache_enabled(), text)


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
