"""Which operators a module calls, read from the source of its forward: no code is run, so a class is enough.

Calls are followed through the module's own methods, functions in its file, and torch's functions written in Python;
branches that are not taken count too. Submodules are not followed: each has a class of its own. A tensor method is
known by its name alone, and so is the operator `@`.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import torch
from torch.nn import Module

from ampkit.policy.operator_keys import candidates
from ampkit.torch_internals.operators import OpOverload, OpOverloadPacket

_SYMBOLS = {ast.MatMult: "matmul", ast.Pow: "pow"}
# Modules with Python functions that call operators; the last one's choose between two.
_TORCHS = ("torch.nn.functional", "torch.functional", "torch._jit_internal")
_UNKNOWN = object()     # a name whose value is known only at run time


class _Called(NamedTuple):
    """An operator that forward calls, as the source names it."""

    name: str
    by_name: bool       # a method or a symbol, which may not be a tensor's


def called_operators(cls: type[Module]) -> dict[OpOverload, bool]:
    """What `cls.forward` may call, in the order of its source, and whether that is known for sure.

    Raises `ValueError` where there is no source to read.
    """
    found: dict[OpOverload, bool] = {}
    try:
        for call in _Reader(cls).calls(inspect.unwrap(cls.forward)):
            for op in _overloads(call.name):
                found[op] = found.get(op, False) or not call.by_name
    except (OSError, TypeError, SyntaxError):
        raise ValueError(
            f"the source of {cls.__qualname__}.forward cannot be read, so that its operators are not known; name one, "
            "such as torch.softmax, or see with record_casts() what a call of the module does"
        ) from None
    return found


def _overloads(name: str) -> list[OpOverload]:
    """ATen's overloads of this name that compute tensors from tensors."""
    if not isinstance(getattr(torch.ops.aten, name, None), OpOverloadPacket):
        return []
    try:
        found = candidates(f"aten::{name}")
    except ValueError:      # TorchScript's, for plain numbers
        return []
    return [op for op in found if _computes(op._schema)]


def _computes(schema: Any) -> bool:
    """Whether an operator computes tensors from tensors; one that writes to its arguments never has a rule."""
    return not schema.is_mutable and all(
        any("Tensor" in str(value.type) for value in values) for values in (schema.arguments, schema.returns)
    )


class _Reader:
    """Reads the functions that make up one class's forward, each once."""

    def __init__(self, cls: type[Module]) -> None:
        self.cls = cls
        self.bases = [base for base in cls.__mro__ if base not in (Module, object)]
        self.seen: set[Any] = set()

    def calls(self, function: Callable[..., Any]) -> Iterator[_Called]:
        """The operators that a Python function calls, directly or through other functions."""
        if function in self.seen:
            return
        self.seen.add(function)
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        names = {**getattr(function, "__globals__", {}), **inspect.getclosurevars(function).nonlocals}
        for node in _in_order(tree):
            if isinstance(node, ast.BinOp) and type(node.op) in _SYMBOLS:
                yield _Called(_SYMBOLS[type(node.op)], by_name=True)
            elif isinstance(node, ast.Call):
                yield from self._called(node.func, names)

    def _called(self, node: ast.expr, names: dict[str, Any]) -> Iterator[_Called]:
        """The operators of one call: an operator, those of a function, or none."""
        target = self._meaning(node, names)
        if isinstance(target, FunctionType) and self._is_followed(target):
            yield from self.calls(inspect.unwrap(target))
        elif isinstance(target, BuiltinFunctionType):
            yield _Called(target.__name__, by_name=False)
        elif target is _UNKNOWN and isinstance(node, ast.Attribute) and hasattr(torch.Tensor, node.attr):
            yield _Called(node.attr, by_name=True)

    def _meaning(self, node: ast.expr, names: dict[str, Any]) -> Any:
        """The object that a dotted name stands for."""
        if isinstance(node, ast.Name):
            return self.cls if node.id == "self" else names.get(node.id, _UNKNOWN)
        if not isinstance(node, ast.Attribute):
            return _UNKNOWN
        if isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()":
            above = [vars(base)[node.attr] for base in self.bases if node.attr in vars(base)]
            return next((found for found in above if found not in self.seen), _UNKNOWN)
        owner = self._meaning(node.value, names)
        return _UNKNOWN if owner is _UNKNOWN else getattr(owner, node.attr, _UNKNOWN)

    def _is_followed(self, function: FunctionType) -> bool:
        own = any(vars(base).get(function.__name__) is function for base in self.bases)
        return own or function.__module__ in _TORCHS or function.__module__ in {base.__module__ for base in self.bases}


def _in_order(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a tree in source order."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        yield from _in_order(child)
