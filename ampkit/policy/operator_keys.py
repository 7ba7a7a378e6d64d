"""Keys of `Policy.with_rules`: the operators that a key names, and whether they can follow a rule.

A key is an overload, a packet, a name, a function of torch or the result of `torch.library.custom_op`. Every error
names the operator and says what to do instead.
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
_FOR_FEW_OPERATORS = (Rule.FLOAT32_DTYPE_ARG, Rule.LOWER_FLOAT32_OUT, *RECIPES)
_ATEN_NAMES = {"cross_entropy": "cross_entropy_loss", "norm": "linalg_vector_norm"}  # of functions with another name
_FLOAT32_OUT = (*PRODUCTS, "aten::bmm", "aten::baddbmm")
_LONGEST_NAME = 80  # longer names are cut before the search for near matches
_MAKES_SUBCLASSES = ("aten::alias", "aten::detach")  # in C++ code that must not call Python


def checked_rule(value: Any, op: Any) -> Rule:
    """A rule from a `Rule` or its name; `op` is for the message."""
    if isinstance(value, Rule):
        return value
    names = {rule.value: rule for rule in Rule} | {rule.name: rule for rule in Rule}  # `explain` prints the second
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
    """The overloads that a key of `with_rules` names; `ValueError` if one of them cannot follow `rule`.

    For a rule that only few operators can follow, those of the overloads that can; `ValueError` if none can.
    """
    named = named_by(key)
    faults = {op: fault for op in named if (fault := _fault(op, rule))}
    able = [op for op in named if op not in faults]
    if faults and not (able and rule in _FOR_FEW_OPERATORS):
        op, fault = next(iter(faults.items()))
        raise ValueError(f"operator '{op.name()}' {fault}")
    return able


def _fault(op: OpOverload, rule: Rule) -> str:
    """Why an operator cannot follow a rule; "" if it can."""
    if rule in RECIPES and op.name() not in PRODUCTS:
        return f"cannot follow {rule.name}: it has no FP8 form; {', '.join(PRODUCTS)} have one"
    if rule is Rule.LOWER_FLOAT32_OUT and op.name() not in _FLOAT32_OUT:
        return f"cannot follow {rule.name}: it has no form with a float32 result; {', '.join(_FLOAT32_OUT)} have one"
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
    """Whether `op` writes to an argument that `rule` may cast: also running statistics, which no schema mentions."""
    return op._schema.is_mutable or (
        rule is Rule.LOWER and any(argument.name == "running_mean" for argument in op._schema.arguments)
    )


def named_by(key: Any) -> list[OpOverload]:
    """The overloads that a key names; `ValueError` for overloads that no region sees."""
    key = getattr(key, "_opoverload", key)  # of the result of `torch.library.custom_op`
    if isinstance(key, OpOverload):
        named = [key]
    elif isinstance(key, OpOverloadPacket):
        named = _packet(key)
    else:
        named = _named(key)
    if not all(map(is_dispatched, named)):
        raise ValueError(
            f"operator '{named[0].name()}' is TorchScript's, for plain numbers and containers; no region sees it"
        )
    return list(map(canonical, named))


def _named(key: Any) -> list[OpOverload]:
    if isinstance(key, Module) or (isinstance(key, type) and issubclass(key, Module)):
        name = type(key).__name__ if isinstance(key, Module) else key.__name__
        raise TypeError(
            f"{name} is a module, not an operator: name the function that it calls, such as torch.nn.functional.gelu, "
            "or give modules a rule with policy.for_modules(model, {...})"
        )
    name = _name_of_function(key) if callable(key) else key
    if not isinstance(name, str):
        raise TypeError(
            "an operator is an OpOverload, a packet, a name such as 'aten::softmax.int' or a function of torch such as "
            f"torch.softmax; got {short(key)}"
        )
    if name.startswith("torch."):
        name = name.rpartition(".")[2]
    packet, overload = _find_packet(name)
    return _packet(packet) if overload is None else [_overload(packet, overload)]


def resolve(name: str) -> OpOverload:
    """The operator of a name in a list: `"conv2d"` is the overload `default`, `"conv2d.padding"` another.

    Names without a namespace are ATen's. Raises `ValueError`, with the nearest names, if this torch has no such
    operator.

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
    is_torch = (getattr(function, "__module__", None) or "").partition(".")[0] == "torch"
    if not isinstance(name, str) or not name or not (is_torch or getattr(torch.Tensor, name, None) is function):
        return None
    return f"aten::{_ATEN_NAMES.get(name, name)}"


def _find_packet(name: str) -> tuple[OpOverloadPacket, str | None]:
    """The packet of a name, and the overload if it names one; `ValueError`, with the nearest names, if unknown."""
    namespace, _, rest = name.rpartition("::")
    base, dot, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace or "aten"), base, None) if name.isascii() else None
    if not isinstance(packet, OpOverloadPacket):  # an attribute of the namespace object itself
        every = {op.split(".")[0] for op in operator_names()}
        near = difflib.get_close_matches(f"{namespace or 'aten'}::{base}"[:_LONGEST_NAME], every, n=3)
        advice = "" if namespace in ("", "aten") else f". Import the module that defines {namespace!r} first"
        raise ValueError(
            f"unknown operator {short(name)} in torch {torch.__version__}; nearest: {near or 'none'}{advice}"
        )
    return packet, overload if dot else None


def key_name(op: OpOverload) -> str:
    """The key of `with_rules` for `op` alone: ATen's name for a default overload names its whole packet."""
    alone = op._overloadname != "default" or _packet(op.overloadpacket) == [op]
    return op.name() if alone else f"{op.name()}.default"


def _packet(packet: OpOverloadPacket) -> list[OpOverload]:
    """A packet's overloads, without TorchScript's on plain numbers, and without `out=` if there are others."""
    every = [getattr(packet, name) for name in packet.overloads()]
    every = [op for op in every if has_any_kernel(op)] or every
    return [op for op in every if not any(argument.is_out for argument in op._schema.arguments)] or every


def candidates(op: Any) -> list[OpOverload]:
    """The overloads that a question about `op` may mean: only the default overload if there is one.

    Named-tensor overloads, gone from torch 2.13, count only if there are no others.
    """
    named = named_by(op)
    unnamed_dims = [overload for overload in named if "Dimname" not in str(overload._schema)] or named
    return [overload for overload in unnamed_dims if overload._overloadname == "default"] or unnamed_dims
