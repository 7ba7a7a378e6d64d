"""What a key of `Policy.with_rules` means: which operators, and whether they can follow the rule it is given.

A key is an overload, a packet, a name or a function of torch. Every refusal names the operator and says what to do
instead.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from ampkit.policy import casting
from ampkit.policy.op_table import Rule, resolve

Operator = OpOverload | OpOverloadPacket | str | Callable[..., Any]

_CASTING = (Rule.LOWER, Rule.FLOAT32, Rule.FLOAT32_DTYPE_ARG, Rule.PROMOTE)
_CALLS = {"cross_entropy": "cross_entropy_loss", "norm": "linalg_vector_norm"}     # functions by another name in ATen
_MAKES_SUBCLASSES = ("aten::alias", "aten::detach")      # of tensors, from C++ that allows no Python in between


def checked_rule(value: Any, op: Any) -> Rule:
    """A `Rule`, or the one of that name; `op` is for the message."""
    if isinstance(value, Rule):
        return value
    try:
        return Rule(value)
    except ValueError:
        names = ", ".join(repr(rule.value) for rule in Rule)
        raise ValueError(f"unknown rule {value!r} for operator {op!s}; expected a Rule or one of {names}") from None


def overloads(key: Any, rule: Rule) -> list[OpOverload]:
    """The overloads that a key of `with_rules` means, each able to follow `rule`; `ValueError` if one is not."""
    if isinstance(key, OpOverload):
        found = [key]
    else:
        found = _packet(key) if isinstance(key, OpOverloadPacket) else _named(key)
        if rule is Rule.FLOAT32_DTYPE_ARG and len(found) > 1:
            found = [op for op in found if casting.takes_dtype(op)] or found
    if rule is Rule.FLOAT32_DTYPE_ARG:
        for op in found:
            if not casting.takes_dtype(op):
                raise ValueError(
                    f"operator '{op.name()}' cannot follow FLOAT32_DTYPE_ARG: no overload of it takes a dtype; "
                    "use Rule.FLOAT32"
                )
    for op in found:
        if op.name() in _MAKES_SUBCLASSES:
            raise ValueError(
                f"operator '{op.name()}' cannot have a rule: torch makes parameters and other subclasses of tensors "
                "with it; give the rule to the operators that take its result"
            )
        if rule in _CASTING and _writes(op, rule):
            raise ValueError(
                f"operator '{op.name()}' writes to its arguments and cannot follow {rule.name}: it would write to a "
                "cast copy, and the result would be lost; give the rule to the operator without in-place or out="
            )
    return found


def _writes(op: OpOverload, rule: Rule) -> bool:
    """Whether `op` writes to an argument that `rule` may cast; running statistics are float32 and no schema tells."""
    return op._schema.is_mutable or (
        rule is Rule.LOWER and any(argument.name == "running_mean" for argument in op._schema.arguments)
    )


def _named(key: Any) -> list[OpOverload]:
    name = _name_of_function(key) if callable(key) else key
    if not isinstance(name, str):
        raise TypeError(
            "an operator is an OpOverload, a packet, a name like 'aten::softmax.int' or a function of torch, like "
            f"torch.softmax; got {key!r}"
        )
    if name.startswith("torch."):
        name = name.rpartition(".")[2]
    _, _, base = name.rpartition("::")
    if "." in base:
        return [resolve(name)]
    try:
        return _packet(resolve(name).overloadpacket)
    except ValueError:
        return _packet(_find_packet(name))


def _name_of_function(function: Callable[..., Any]) -> str | None:
    """ATen's name for a function or tensor method of torch, which as a rule is its own; None for any other."""
    name = getattr(function, "__name__", "")
    of_torch = (getattr(function, "__module__", None) or "").partition(".")[0] == "torch"
    if not name or not (of_torch or getattr(torch.Tensor, name, None) is function):
        return None
    return f"aten::{_CALLS.get(name, name)}"


def _find_packet(name: str) -> OpOverloadPacket:
    namespace, _, base = name.rpartition("::")
    packet = getattr(getattr(torch.ops, namespace or "aten"), base, None)
    if packet is None:
        every = {op.split(".")[0] for op in torch._C._dispatch_get_all_op_names()}
        near = difflib.get_close_matches(f"{namespace or 'aten'}::{base}", every, n=3)
        raise ValueError(f"unknown operator {name!r} in torch {torch.__version__}; nearest: {near or 'none'}")
    return packet


def key_name(op: OpOverload) -> str:
    """The key of `with_rules` that means `op` alone: ATen's name for a default overload means its whole packet."""
    alone = op._overloadname != "default" or _packet(op.overloadpacket) == [op]
    return op.name() if alone else f"{op.name()}.default"


def _packet(packet: OpOverloadPacket) -> list[OpOverload]:
    """Its overloads, without TorchScript's on plain numbers, and without `out=` ones unless there are no others."""
    every = [getattr(packet, name) for name in packet.overloads()]
    every = [op for op in every if torch._C._dispatch_has_kernel(op.name())] or every
    return [op for op in every if not any(argument.is_out for argument in op._schema.arguments)] or every


def candidates(op: Any) -> list[OpOverload]:
    """The overloads that a question about `op` may mean, the default one alone where there is one.

    Those for named tensors, which torch has dropped since 2.11, are not meant by a name alone.
    """
    if isinstance(op, OpOverload):
        return [op]
    found = _packet(op) if isinstance(op, OpOverloadPacket) else _named(op)
    plain = [one for one in found if "Dimname" not in str(one._schema)] or found
    return [one for one in plain if one._overloadname == "default"] or plain
