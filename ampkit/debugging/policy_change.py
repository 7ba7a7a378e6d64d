"""A policy with a few rules more, as an object to try and as a line to paste."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from torch.nn import Module

from ampkit.policy.policy import Policy, Rule

__all__ = ["Origin", "PolicyChange", "takes_float32"]


class Origin(Protocol):
    """What is asked of an operation that went wrong."""

    @property
    def op(self) -> str: ...
    @property
    def phase(self) -> str: ...
    @property
    def backward_of(self) -> str: ...
    @property
    def path(self) -> str: ...


@dataclass(frozen=True)
class PolicyChange:
    """Modules and operators to keep in float32."""

    device: str
    modules: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()

    @property
    def rules(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.modules, *self.operators)

    def without(self, rule: str) -> PolicyChange:
        """With one rule less."""
        modules = tuple(one for one in self.modules if one != rule)
        return replace(self, modules=modules, operators=tuple(one for one in self.operators if one != rule))

    def extended(self, origin: Origin) -> PolicyChange | None:
        """With what an origin that is left asks for: its module, its operator, or what is around; None if nothing."""
        path = origin.path
        if path and path not in self.modules:
            return replace(self, modules=(*self.modules, path))
        op = origin.op if origin.phase in ("forward", "recompute") else origin.backward_of
        if op and op not in self.operators and takes_float32(op, self.device):
            return replace(self, operators=(*self.operators, op))
        while path:
            path = path.rpartition(".")[0]
            if path and path not in self.modules:
                return replace(self, modules=(*self.modules, path))
        return None

    def policy(self, model: Module) -> Policy:
        """The policy that `code` makes."""
        policy = Policy.default(self.device)
        if self.operators:
            policy = policy.with_rules(dict.fromkeys(self.operators, Rule.FLOAT32))
        return policy.for_modules(model, dict.fromkeys(self.modules, "float32")) if self.modules else policy

    @property
    def code(self) -> str:
        """The line to paste."""
        text = f'policy = Policy.default("{self.device}")'
        if self.operators:
            text += ".with_rules({" + ", ".join(f'"{op}": Rule.FLOAT32' for op in self.operators) + "})"
        if self.modules:
            text += ".for_modules(model, {" + ", ".join(f'"{path}": torch.float32' for path in self.modules) + "})"
        return text


def takes_float32(op: str, device: str) -> bool:
    """Whether a region can cast for an operator: those that only exist below it, it never sees."""
    if op == "aten::_to_copy":
        return False
    try:
        Policy.default(device).with_rules({op: Rule.FLOAT32})
    except (TypeError, ValueError):
        return False
    return True
