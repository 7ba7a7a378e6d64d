"""Generated handlers, the fast path: Python source written for one operator from its schema and its rule.

`source` writes it from the templates below. The handler of `aten::linear` under LOWER is this function:

>>> print(source(torch.ops.aten.linear.default, Rule.LOWER, in_torch=True))
def linear(_mode, _keys, input, weight, bias=None):
    if (_level() is not None or type(input) not in _PLAIN_TENSORS or type(weight) not in _PLAIN_TENSORS
            or (bias is not None and type(bias) not in _PLAIN_TENSORS)):
        return _general(_mode, _keys, input, weight, bias)
    _of_input = input.dtype
    _of_weight = weight.dtype
    _of_bias = None if bias is None else bias.dtype
    if (_of_input is _float32 or _of_weight is _float32 or _of_bias is _float32) and not _is_excluded(_AUTOCAST):
        _dtype, _cast_weight = _dtype_of(_DEVICE), None
        if bias is not None and _of_bias is not _dtype:
            if type(bias) is _Parameter:
                _cast_weight = _cast_weight or _mode.weights(_DEVICE, _dtype)
                bias = _cast_weight(bias)
            else:
                bias = _cast_to(_dtype)(_mode, bias)
        if _of_weight is not _dtype:
            if type(weight) is _Parameter:
                _cast_weight = _cast_weight or _mode.weights(_DEVICE, _dtype)
                weight = _cast_weight(weight)
            else:
                weight = _cast_to(_dtype)(_mode, weight)
        if _of_input is not _dtype:
            if type(input) is _Parameter:
                _cast_weight = _cast_weight or _mode.weights(_DEVICE, _dtype)
                input = _cast_weight(input)
            else:
                input = _cast_to(_dtype)(_mode, input)
    try:
        _set_excluded(_KEY, True)
        return _operator(input, weight, bias)
    finally:
        _set_excluded(_KEY, False)

- Tensor subclasses, numbers in the place of tensors and transforms of `torch.func` (`_level`) take the general handler.
  Operators with an unusual schema or rule have no other.
- torch excludes its own autocast key, `_AUTOCAST`, where autocast is disabled: nothing is cast.
- `_mode.weights` returns the function of the region's weight cache that casts parameters (`weight_cache._Casts.find`);
  `_cast_to` that for other tensors, made by `_casts_on`.
- `_operator` is torch's `linear`. The region's key, `_KEY`, is excluded, so it and its parts do not come here again.
- `in_torch`: torch's autocast has a kernel for the operator with the same rule. It runs next and finds nothing to cast,
  or casts one 16-bit dtype to the other, which no cache keeps. For other operators the handler asks at every call
  whether autocast is on, and excludes torch's key too, or the operator's parts would be cast.

A handler holds no state of a region: whether autocast is on, its dtype and its cache are read at each call. So all
modes with the same rules share handlers.
"""

from __future__ import annotations

import functools
import os
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ampkit.engine.casting import cast_to
from ampkit.engine.registration import GENERAL_HANDLERS, OPERATORS, Handler
from ampkit.engine.signatures import LIST, OPTIONAL, TENSOR, Signature, defined, signature_of
from ampkit.policy.policy import RuleTable, torch_rules
from ampkit.policy.rules import Rule
from ampkit.torch_internals.dispatcher import AUTOCAST_KEYS, autocast_key, has_kernel, is_excluded, set_excluded
from ampkit.torch_internals.dynamo import dynamo_skip
from ampkit.torch_internals.operators import OpOverload, dtype_overload, listed_as, python_binding
from ampkit.torch_internals.transforms import functorch_level

__all__ = ["BOUND_NAMES", "handlers_for", "source"]

# False: every operator has the general handler. The tests compare the two.
GENERATE = os.environ.get("AMPKIT_GENERAL_HANDLERS", "0") != "1"

# The keys are excluded inside the `try`, since Ctrl-C may come right after either call.
_HEAD = """\
def {s.name}(_mode, _keys, {s.params}):
    if (_level() is not None{unusual}):
        return _general(_mode, _keys, {s.call})
"""
_IN_TORCH = """\
{dtypes}\
    if {condition} and not _is_excluded(_AUTOCAST):
{body}\
    try:
        _set_excluded(_KEY, True)
        return _operator({s.call})
    finally:
        _set_excluded(_KEY, False)
"""
_NOT_IN_TORCH = """\
    if _is_excluded(_AUTOCAST):
        try:
            _set_excluded(_KEY, True)
            return _operator({s.call})
        finally:
            _set_excluded(_KEY, False)
{dtypes}\
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
    TENSOR: " or type({0}) not in _PLAIN_TENSORS",
    OPTIONAL: " or ({0} is not None and type({0}) not in _PLAIN_TENSORS)",
    LIST: " or not _PLAIN_TENSORS.issuperset(map(type, {0}))",
}
_DTYPE = {
    TENSOR: "    _of_{0} = {0}.dtype\n",
    OPTIONAL: "    _of_{0} = None if {0} is None else {0}.dtype\n",
}
_LOWER = """\
    if {is_given}_of_{tensor} is not _dtype:
        if type({tensor}) is _Parameter:
            _cast_weight = _cast_weight or _mode.weights(_DEVICE, _dtype)
            {tensor} = _cast_weight({tensor})
        else:
            {tensor} = _cast_to(_dtype)(_mode, {tensor})
"""
_FLOAT32 = """\
    if {is_given}_of_{tensor} is not _float32:
        {tensor} = _cast_up({tensor})
"""
_PROMOTE = """\
    _dtypes = {{_tensor.dtype for _tensor in ({tensors},)}}
    if len(_dtypes) != 1 or (_dtypes != {{_float32}} and _dtype_of(_DEVICE) is _float32):
        return _general(_mode, _keys, {s.call})
"""
_DTYPE_ARGUMENT = """\
    if {requested} is None and _eligible({tensor}):
        {request} = _float32
"""


# Operators with a Python binding that takes the schema's arguments in order and calls that very operator. A binding is
# faster to call than the `OpOverload`. A test compares the two.
BOUND_NAMES = (
    "addbmm",
    "addmm",
    "addmv",
    "addr",
    "baddbmm",
    "bmm",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d.input",
    "conv_transpose3d.input",
    "linear",
    "matmul",
    "mm",
    "mv",
    "prelu",
    "scaled_dot_product_attention",
    "batch_norm",
    "exp",
    "group_norm",
    "layer_norm",
    "log",
    "log1p",
    "logsumexp",
    "pow.Tensor_Scalar",
    "rms_norm",
    "rsqrt",
    "cumsum",
    "log_softmax.int",
    "softmax.int",
    "sum",
    "sum.dim_IntList",
    "addcmul",
    "cat",
    "dot",
    "lerp.Tensor",
    "stack",
)
_BOUND_NAMES = frozenset(f"aten::{name}" for name in BOUND_NAMES)


def _callable(op: OpOverload) -> Callable[..., Any]:
    """The fastest callable that runs `op` on the arguments of its schema, in order."""
    binding = python_binding(op) if op.name() in _BOUND_NAMES else None
    return op._op if binding is None else binding


@functools.cache
def source(op: OpOverload, rule: Rule, *, in_torch: bool) -> str | None:
    """The Python source of the handler that follows `rule` for `op`; None where the general handler is used.

    `in_torch`: whether torch's autocast has a kernel for `op` that follows the same rule.
    """
    signature = signature_of(op)
    body = None if signature is None else _body(op, rule, signature)
    if signature is None or body is None:
        return None
    unusual = "".join(_UNUSUAL[kind].format(name) for name, kind in signature.tensors)
    dtypes, condition = "", ""
    if rule in (Rule.LOWER, Rule.FLOAT32):
        dtypes = "".join(_DTYPE[kind].format(name) for name, kind in signature.tensors)
        condition = _condition(rule, signature)
    head, rest = _HEAD.format(s=signature, unusual=unusual), _NOT_IN_TORCH
    if in_torch and condition:
        rest, body = _IN_TORCH, textwrap.indent(body, "    ")
    return head + rest.format(s=signature, dtypes=dtypes, condition=condition, body=body)


def _condition(rule: Rule, s: Signature) -> str:
    """Whether there is anything to cast that torch's kernel shall not: float32 tensors, whose casts are cached."""
    if rule is Rule.LOWER:
        tests = [f"_of_{name} is _float32" for name, _ in s.tensors]
    else:
        given = {TENSOR: "", OPTIONAL: "{0} is not None and "}
        tests = [f"{given[kind].format(name)}_of_{name} is not _float32" for name, kind in s.tensors]
    return f"({' or '.join(tests)})" if len(tests) > 1 else tests[0]


def _body(op: OpOverload, rule: Rule, s: Signature) -> str | None:
    """The lines that cast the arguments; None for a rule or a schema that only the general handler covers."""
    kinds = {kind for _, kind in s.tensors}
    if rule is Rule.LOWER and LIST not in kinds:
        return "    _dtype, _cast_weight = _dtype_of(_DEVICE), None\n" + _each(_LOWER, s)
    if rule is Rule.FLOAT32 and LIST not in kinds:
        return _each(_FLOAT32, s)
    if rule is Rule.PROMOTE and OPTIONAL not in kinds:
        return _PROMOTE.format(s=s, tensors=", ".join(f"*{name}" if kind == LIST else name for name, kind in s.tensors))
    if rule is Rule.FLOAT32_DTYPE_ARG and s.dtype and s.tensors[0][1] == TENSOR and dtype_overload(op) is op:
        tensor = s.tensors[0][0]
        if s.dtype == "dtype":
            return _DTYPE_ARGUMENT.format(tensor=tensor, requested="dtype", request="dtype")
        return _DTYPE_ARGUMENT.format(tensor=tensor, requested='_kwargs.get("dtype")', request='_kwargs["dtype"]')
    return None


def _each(template: str, s: Signature) -> str:
    """The code for each tensor argument, the last one first: see `Cast.kwargs`."""
    return "".join(
        template.format(tensor=name, is_given="" if kind == TENSOR else f"{name} is not None and ")
        for name, kind in reversed(s.tensors)
    )


def handlers_for(tables: tuple[tuple[str, RuleTable], ...], key: Any) -> dict[str, Handler]:
    """The handlers of a mode with these rules and this dispatch key, by operator name.

    A mode for several device types has the general handlers.
    """
    if len(tables) != 1 or not GENERATE:
        return GENERAL_HANDLERS
    device_type, table = tables[0]
    if table.handlers is None:
        table.handlers = _GeneratedHandlers(device_type, table, key)
    return table.handlers


class _GeneratedHandlers(dict[str, Handler]):
    """Handlers by operator name, made at the operator's first call: generated, or general if there is no source."""

    def __init__(self, device_type: str, table: RuleTable, key: Any) -> None:
        super().__init__()
        to_float32 = cast_to(device_type, torch.float32)
        self.device_type = device_type
        self.rules = {op.name(): rule for op, rule in table.items()}
        self.variables: dict[str, Any] = {
            "_is_excluded": is_excluded,
            "_set_excluded": set_excluded,
            "_level": functorch_level,
            "_dtype_of": torch.get_autocast_dtype,
            "_cast_to": _casts_on(device_type),
            "_cast_up": to_float32.tensor,
            "_eligible": to_float32.eligible,
            "_float32": torch.float32,
            "_PLAIN_TENSORS": frozenset({Tensor, Parameter}),
            "_Parameter": Parameter,
            "_KEY": key,
            "_AUTOCAST": autocast_key(device_type),
            "_DEVICE": device_type,
        }

    def __missing__(self, name: str) -> Handler:
        op, general, rule = OPERATORS[name], GENERAL_HANDLERS[name], self.rules.get(name)
        signature = signature_of(op)
        in_torch = rule is not None and _rules_in_torch(self.device_type).get(op) is rule
        text = None if rule is None else source(op, rule, in_torch=in_torch)
        if rule is None or signature is None or text is None:
            self[name] = general
        else:
            variables = {**self.variables, "_general": general, "_operator": _callable(op)}
            handler = defined(signature.name, text, f"<ampkit {name} {rule.name}>", variables)
            self[name] = dynamo_skip(handler)
        return self[name]


@functools.cache
def _rules_in_torch(device_type: str) -> Mapping[OpOverload, Rule]:
    """The rules that kernels of torch's own autocast follow, whatever `register_op` and other libraries add."""
    key = AUTOCAST_KEYS[listed_as(device_type)]
    return {op: rule for op, rule in torch_rules(device_type).items() if has_kernel(op.name(), key)}


def _casts_on(device_type: str) -> Callable[[torch.dtype], Callable[[Any, Tensor], Tensor]]:
    @functools.cache
    def casts(dtype: torch.dtype) -> Callable[[Any, Tensor], Tensor]:
        """The function that casts tensors other than parameters to `dtype`."""
        to_dtype = cast_to(device_type, dtype)
        castable, on_device, convert = to_dtype.castable, to_dtype.on_device, to_dtype.convert

        def cast(mode: Any, tensor: Tensor) -> Tensor:
            if tensor.dtype not in castable or not on_device(tensor):
                return tensor
            if tensor.is_leaf and tensor.requires_grad:
                return mode.weights(device_type, dtype)(tensor)
            return convert(tensor)

        return cast

    return casts
