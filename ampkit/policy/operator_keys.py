"""Operators by name: what a key of `Policy.with_rules` names, and whether it can follow the rule that it is given.

A key is an overload, a packet, a name or a function of torch. Every refusal names the operator and says what to do
instead.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Module

from ampkit.dtypes import short
from ampkit.policy.float8_recipes import PRODUCTS, RECIPES
from ampkit.policy.rules import Rule
from ampkit.torch_internals.operators import (
    OpOverload,
    OpOverloadPacket,
    canonical,
    dtype_overload,
    has_any_kernel,
    is_dispatched,
    operator_names,
)

Operator = OpOverload | OpOverloadPacket | str | Callable[..., Any]

_CASTING = (Rule.LOWER, Rule.FLOAT32, Rule.FLOAT32_DTYPE_ARG, Rule.PROMOTE)
_FOR_FEW = (Rule.FLOAT32_DTYPE_ARG, Rule.LOWER_FLOAT32_OUT, *RECIPES)
_CALLS = {"cross_entropy": "cross_entropy_loss", "norm": "linalg_vector_norm"}     # functions with another name in ATen
_FLOAT32_OUT = (*PRODUCTS, "aten::bmm", "aten::baddbmm")
_LONGEST = 80       # name that near matches are looked up for
_MAKES_SUBCLASSES = ("aten::alias", "aten::detach")      # in C++ that no Python kernel may interrupt


def checked_rule(value: Any, op: Any) -> Rule:
    """A `Rule`, or the one of that name; `op` is for the message."""
    if isinstance(value, Rule):
        return value
    names = {rule.value: rule for rule in Rule} | {rule.name: rule for rule in Rule}    # `explain` prints the second
    if not isinstance(value, str) or value not in names:
        hint = ""
        if isinstance(value, torch.dtype):
            hint = ". Rule.FLOAT32 computes in float32, Rule.LOWER in the dtype of the region"
        raise ValueError(
            f"unknown rule {short(value)} for operator {short(op)}; expected a Rule or one of "
            f"{', '.join(repr(rule.value) for rule in Rule)}{hint}"
        )
    return names[value]


def overloads(key: Any, rule: Rule) -> list[OpOverload]:
    """The overloads that a key of `with_rules` means; `ValueError` if one of them cannot follow `rule`.

    Of a rule that is for some operators alone, those that can follow it, if any can.
    """
    found = named_by(key)
    faults = {op: fault for op in found if (fault := _fault(op, rule))}
    able = [op for op in found if op not in faults]
    if faults and not (able and rule in _FOR_FEW):
        op, fault = next(iter(faults.items()))
        raise ValueError(f"operator '{op.name()}' {fault}")
    return able


def _fault(op: OpOverload, rule: Rule) -> str:
    """Why an operator cannot follow a rule; "" if it can."""
    forms = PRODUCTS if rule in RECIPES else _FLOAT32_OUT if rule is Rule.LOWER_FLOAT32_OUT else None
    if forms is not None and op.name() not in forms:
        form = "FP8 form" if rule in RECIPES else "form with a float32 result"
        return f"cannot follow {rule.name}: it has no {form}; {', '.join(forms)} have one"
    if rule is Rule.FLOAT32_DTYPE_ARG and not dtype_overload(op):
        return "cannot follow FLOAT32_DTYPE_ARG: no overload of it takes a dtype; use Rule.FLOAT32"
    if op.name() in _MAKES_SUBCLASSES:
        return (
            "cannot have a rule: torch makes parameters and other subclasses of tensors with it; give the rule to the "
            "operators that take its result"
        )
    if rule in _CASTING and _writes(op, rule):
        return (
            f"writes to its arguments and cannot follow {rule.name}: it would write to a cast copy, and the result "
            "would be lost; give the rule to the operator without in-place or out="
        )
    return ""


def _writes(op: OpOverload, rule: Rule) -> bool:
    """Whether `op` writes to an argument that `rule` may cast: float32 running statistics too, which no schema says."""
    return op._schema.is_mutable or (
        rule is Rule.LOWER and any(argument.name == "running_mean" for argument in op._schema.arguments)
    )


def named_by(key: Any) -> list[OpOverload]:
    """The overloads that a key names; `ValueError` for those that no region sees."""
    if isinstance(key, OpOverload):
        found = [key]
    else:
        found = _packet(key) if isinstance(key, OpOverloadPacket) else _named(key)
    if not all(map(is_dispatched, found)):
        raise ValueError(
            f"operator '{found[0].name()}' is TorchScript's, for plain numbers and containers; no region sees it"
        )
    return list(map(canonical, found))


def _named(key: Any) -> list[OpOverload]:
    if isinstance(key, Module) or (isinstance(key, type) and issubclass(key, Module)):
        name = type(key).__name__ if isinstance(key, Module) else key.__name__
        raise TypeError(
            f"an operator is no module, and {name} is one: name the function that it calls, such as "
            "torch.nn.functional.gelu, or give modules a rule with policy.for_modules(model, {...})"
        )
    name = _name_of_function(key) if callable(key) else key
    if not isinstance(name, str):
        raise TypeError(
            "an operator is an OpOverload, a packet, a name like 'aten::softmax.int' or a function of torch, like "
            f"torch.softmax; got {short(key)}"
        )
    if name.startswith("torch."):
        name = name.rpartition(".")[2]
    packet, overload = _find_packet(name)
    return _packet(packet) if overload is None else [_overload(packet, overload)]


def resolve(name: str) -> OpOverload:
    """The one operator of a name as lists have it: `"conv2d"` is the overload `default`, `"conv2d.padding"` another.

    Without a namespace it is ATen's. Raises `ValueError`, with the nearest names, if this torch has no such operator.

    >>> resolve("conv2d.padding")
    <OpOverload(op='aten.conv2d', overload='padding')>
    """
    packet, overload = _find_packet(name)
    return canonical(_overload(packet, overload or "default"))


def _overload(packet: OpOverloadPacket, name: str) -> OpOverload:
    if name not in packet.overloads():
        raise ValueError(
            f"operator '{packet._qualified_op_name}' has no overload {short(name)}; "
            f"expected one of {packet.overloads()}"
        )
    return getattr(packet, name)


def _name_of_function(function: Callable[..., Any]) -> str | None:
    """ATen's name for a function or tensor method of torch, usually the same; None for any other function."""
    name = getattr(function, "__name__", "")
    of_torch = (getattr(function, "__module__", None) or "").partition(".")[0] == "torch"
    if not isinstance(name, str) or not name or not (of_torch or getattr(torch.Tensor, name, None) is function):
        return None
    return f"aten::{_CALLS.get(name, name)}"


def _find_packet(name: str) -> tuple[OpOverloadPacket, str | None]:
    """The packet that `name` means, and the overload it names if any; `ValueError` with the nearest names if none."""
    namespace, _, rest = name.rpartition("::")
    base, dot, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace or "aten"), base, None) if name.isascii() else None
    if not isinstance(packet, OpOverloadPacket):        # an attribute of the namespace object itself
        every = {op.split(".")[0] for op in operator_names()}
        near = difflib.get_close_matches(f"{namespace or 'aten'}::{base}"[:_LONGEST], every, n=3)
        missing = "" if namespace in ("", "aten") else f". Import what defines {namespace!r} first"
        raise ValueError(
            f"unknown operator {short(name)} in torch {torch.__version__}; nearest: {near or 'none'}{missing}"
        )
    return packet, overload if dot else None


def key_name(op: OpOverload) -> str:
    """The key of `with_rules` for `op` alone: ATen's name for a default overload stands for its whole packet."""
    alone = op._overloadname != "default" or _packet(op.overloadpacket) == [op]
    return op.name() if alone else f"{op.name()}.default"


def _packet(packet: OpOverloadPacket) -> list[OpOverload]:
    """Its overloads, without TorchScript's on plain numbers, and without `out=` ones unless there are no others."""
    every = [getattr(packet, name) for name in packet.overloads()]
    every = [op for op in every if has_any_kernel(op)] or every
    return [op for op in every if not any(argument.is_out for argument in op._schema.arguments)] or every


def candidates(op: Any) -> list[OpOverload]:
    """The overloads that a question about `op` may be about; only the default one if there is one.

    Named-tensor overloads, gone from torch 2.13, count only if there are no others.
    """
    found = named_by(op)
    plain = [one for one in found if "Dimname" not in str(one._schema)] or found
    return [one for one in plain if one._overloadname == "default"] or plain
