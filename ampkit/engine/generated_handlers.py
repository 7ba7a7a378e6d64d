"""Specialised kernels: Python generated for one operator from its schema and rule; `source` returns it.

A kernel for every operator loops over arguments of unknown types, which costs more than a small cast. A specialised one
names its arguments and covers plain tensors and parameters on one device type; where autocast is disabled, it calls the
operator with its own key excluded. Everything else goes to `_general`, the kernel for every operator: subclasses,
numbers where a tensor is expected, transforms of `torch.func`. Operators with an unusual schema or rule have the
general kernel only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from ampkit.engine.casting import dtype_overload
from ampkit.engine.signatures import LIST, OPTIONAL, TENSOR, Signature, defined, signature_of
from ampkit.policy.rules import Rule
from ampkit.torch_internals.operators import OpOverload

__all__ = ["kernel", "source"]

# The keys are set within the `try`: Ctrl-C may come right after either call.
_KERNEL = """\
def {s.name}(_keys, {s.params}):
    if _level() is not None{unusual}:
        return _general(_keys, {s.call})
    if _is_excluded(_AUTOCAST):
        try:
            _set_excluded(_KEY, True)
            return _operator({s.call})
        finally:
            _set_excluded(_KEY, False)
{body}\
    try:
        _set_excluded(_KEY, True)
        _set_excluded(_AUTOCAST, True)
        return _operator({s.call})
    finally:
        try:
            _set_excluded(_KEY, False)
        finally:
            _set_excluded(_AUTOCAST, False)
"""
_UNUSUAL = {
    TENSOR: " or type({0}) not in _PLAIN",
    OPTIONAL: " or ({0} is not None and type({0}) not in _PLAIN)",
    LIST: " or not _PLAIN.issuperset(map(type, {0}))",
}
_LOWER = """\
    if {given}{tensor}.dtype is not _dtype:
        if type({tensor}) is _Parameter:
            _weight = _weight or _weights(_dtype)
            {tensor} = _weight({tensor})
        else:
            {tensor} = _cast_to(_dtype)({tensor})
"""
_FLOAT32 = """\
    if {given}{tensor}.dtype is not _float32:
        {tensor} = _cast_up({tensor})
"""
_PROMOTE = """\
    _dtypes = {{_tensor.dtype for _tensor in ({tensors},)}}
    if len(_dtypes) != 1 or (_dtypes != {{_float32}} and _dtype_of(_DEVICE) is _float32):
        return _general(_keys, {s.call})
"""
_DTYPE_ARGUMENT = """\
    if {asked} is None and _eligible({tensor}):
        {set} = _float32
"""


@functools.cache
def source(op: OpOverload, rule: Rule) -> str | None:
    """The kernel that follows `rule` for `op`, as Python source; None where the general one is used."""
    signature = signature_of(op)
    body = None if signature is None else _body(op, rule, signature)
    if signature is None or body is None:
        return None
    unusual = "".join(_UNUSUAL[kind].format(name) for name, kind in signature.tensors)
    return _KERNEL.format(s=signature, unusual=unusual, body=body)


def _body(op: OpOverload, rule: Rule, s: Signature) -> str | None:
    """What a kernel does to its arguments."""
    kinds = {kind for _, kind in s.tensors}
    if rule is Rule.LOWER and LIST not in kinds:
        return "    _dtype, _weight = _dtype_of(_DEVICE), None\n" + _each(_LOWER, s)
    if rule is Rule.FLOAT32 and LIST not in kinds:
        return _each(_FLOAT32, s)
    if rule is Rule.PROMOTE and OPTIONAL not in kinds:
        return _PROMOTE.format(s=s, tensors=", ".join("*" * (kind == LIST) + name for name, kind in s.tensors))
    if rule is Rule.FLOAT32_DTYPE_ARG and s.dtype and s.tensors[0][1] == TENSOR and dtype_overload(op) is op:
        asked, changed = ("dtype", "dtype") if s.dtype == "dtype" else ('_kwargs.get("dtype")', '_kwargs["dtype"]')
        return _DTYPE_ARGUMENT.format(tensor=s.tensors[0][0], asked=asked, set=changed)
    return None


def _each(template: str, s: Signature) -> str:
    """The code for each tensor argument, the last one first: see `Cast.kwargs`."""
    return "".join(
        template.format(tensor=name, given="" if kind == TENSOR else f"{name} is not None and ")
        for name, kind in reversed(s.tensors)
    )


def kernel(op: OpOverload, rule: Rule, variables: Mapping[str, Any]) -> Callable[..., Any] | None:
    """The function of `source`, given values for its free variables by name; None where there is no source."""
    text = source(op, rule)
    return None if text is None else defined(text, f"<ampkit {op.name()} {rule.name}>", variables)
