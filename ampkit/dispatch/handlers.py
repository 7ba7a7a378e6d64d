"""Handlers: for an operator and its rule, the function that casts the arguments and calls the operator.

A handler is a closure, made when the operator is first called in a region with the rule. It is called with the region's
mode, the dispatcher's keys, and the operator's arguments, of which the dispatcher omits trailing defaults. Whether
autocast is on, its dtype and the cache are read at each call, so all modes with the same rules share handlers.

The *general handler* of the operator takes over for tensor subclasses, numbers instead of tensors, transforms of
`torch.func`, operators with unusual schemas, rules without a closure here, regions of several device types, and
regions whose calls are recorded. It calls `AutocastMode.__torch_dispatch__`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ampkit.dispatch.casting import PLAIN_TENSORS, Cast, cast_to
from ampkit.dispatch.dispatcher import AUTOCAST_KEYS, OPERATORS, autocast_key, is_ahead, keys_ahead, keysets
from ampkit.policy.operators import argument_names, dtype_overload, python_binding, takes_numbers
from ampkit.policy.policy import RuleTable, torch_rules
from ampkit.policy.rules import Rule
from ampkit.torch_private import (
    Exclude,
    OpOverload,
    dynamo_skip,
    functorch_level,
    has_kernel,
    is_excluded,
    listed_as,
    set_excluded,
)

__all__ = ["BOUND_NAMES", "GENERAL_HANDLERS", "handlers_for"]

Handler = Callable[[Any, Any, tuple[Any, ...], Mapping[str, Any]], Any]  # mode, dispatch keys, arguments

# Looked up in torch, whose module has a `__getattr__`, they would take ten times as long.
_FLOAT32, _dtype_of = torch.float32, torch.get_autocast_dtype
_NUMBERS = frozenset({int, float, bool, complex, torch.SymInt, torch.SymFloat, torch.SymBool})

# Operators with a Python binding that takes the schema's arguments in order and calls that very operator. A binding is
# faster to call than the `OpOverload`. A test compares the two.
_WITH_BINDING = """
    addbmm addmm addmv addr baddbmm bmm conv1d conv2d conv3d conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input linear matmul mm mv prelu scaled_dot_product_attention batch_norm exp group_norm layer_norm
    log log1p logsumexp pow.Tensor_Scalar rms_norm rsqrt cumsum log_softmax.int softmax.int sum sum.dim_IntList addcmul
    cat dot lerp.Tensor stack"""
BOUND_NAMES = tuple(_WITH_BINDING.split())
_BOUND_NAMES = frozenset(f"aten::{name}" for name in BOUND_NAMES)


def handlers_for(device_type: str, table: RuleTable, key: Any) -> dict[str, Handler]:
    """Return the handlers of modes with these rules and this dispatch key, by operator name."""
    if table.handlers is None:
        table.handlers = _Handlers(device_type, table, key)
    return table.handlers


class _Handlers(dict[str, Handler]):
    """Handlers by operator name, each made at the operator's first call."""

    def __init__(self, device_type: str, table: RuleTable, key: Any) -> None:
        super().__init__()
        self.device_type, self.key = device_type, key
        self.rules = {op.name(): rule for op, rule in table.items()}

    def __missing__(self, name: str) -> Handler:
        rule = self.rules.get(name)
        make = None if rule is None else _closure_for(OPERATORS[name], rule)
        if make is None:
            self[name] = GENERAL_HANDLERS[name]
        else:
            self[name] = dynamo_skip(make(OPERATORS[name], rule, self.device_type, self.key))
        return self[name]


def _closure_for(op: OpOverload, rule: Rule) -> Callable[..., Handler] | None:
    """Return the function that makes the handler of an operator; None where only the general handler will do."""
    schema = op._schema.arguments
    kinds = [str(argument.type) for argument in schema if "Tensor" in str(argument.type)]
    if not kinds or any(argument.kwarg_only and "Tensor" in str(argument.type) for argument in schema):
        return None
    if rule in (Rule.LOWER, Rule.FLOAT32) and {"Tensor", "Optional[Tensor]"}.issuperset(kinds):
        return _casting_handler
    if rule is Rule.PROMOTE and {"Tensor", "List[Tensor]"}.issuperset(kinds):
        return _promoting_handler
    if rule is Rule.FLOAT32_DTYPE_ARG and dtype_overload(op) is op and str(schema[0].type) == "Tensor":
        return _dtype_handler
    return None


def _casting_handler(op: OpOverload, rule: Rule, device_type: str, key: Any) -> Handler:
    """LOWER and FLOAT32: cast every tensor, the last one first (see `Cast.kwargs`).

    If torch's autocast has a kernel for the operator with the same rule, that kernel runs next. If no tensor is float32
    under LOWER, or all are under FLOAT32, that kernel makes the remaining casts, from one 16-bit dtype to the other.
    They are not cached.
    """
    general, run, call = GENERAL_HANDLERS[op.name()], _function(op), _caller_below(op, device_type, key)
    positions, autocast, in_torch = _tensor_positions(op), autocast_key(device_type), _in_torch(op, rule, device_type)
    lower = rule is Rule.LOWER
    casts_to: dict[torch.dtype, Cast] = {}  # reading it takes less time than calling `cast_to`

    def handler(mode: Any, keys: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        if functorch_level() is not None:
            return general(mode, keys, args, kwargs)
        casts = not in_torch
        for n in positions[len(args)]:
            tensor = args[n]
            if type(tensor) in PLAIN_TENSORS:
                casts = casts or (tensor.dtype is _FLOAT32) is lower
            elif tensor is not None:
                return general(mode, keys, args, kwargs)
        if casts and not is_excluded(autocast):  # torch excludes its key where autocast is disabled
            dtype, cache = (_dtype_of(device_type), mode.cache) if lower else (_FLOAT32, None)
            cast = casts_to.get(dtype) or casts_to.setdefault(dtype, cast_to(device_type, dtype))
            cast_args, get = list(args), None
            for n in positions[len(args)]:
                tensor = args[n]
                if cache is not None and type(tensor) is Parameter:
                    get = get or cache.getter(cast)
                    cast_args[n] = get(tensor)
                elif tensor is not None and tensor.dtype is not dtype:
                    cast_args[n] = cast.tensor(tensor, cache)
            if not in_torch:
                return call(cast_args, kwargs, True)
            args = cast_args
        set_excluded(key, True)  # inlined `call(args, kwargs, False)`
        try:
            return run(*args, **kwargs) if kwargs else run(*args)
        finally:
            set_excluded(key, False)

    return handler


def _promoting_handler(op: OpOverload, rule: Rule, device_type: str, key: Any) -> Handler:
    """PROMOTE, where all tensors share a dtype and there is nothing to cast."""
    general, call = GENERAL_HANDLERS[op.name()], _caller_below(op, device_type, key)
    positions, autocast = _tensor_positions(op), autocast_key(device_type)

    def handler(mode: Any, keys: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if functorch_level() is not None:
            return general(mode, keys, args, kwargs)
        dtypes = set()
        for n in positions[len(args)]:
            tensors = args[n] if type(args[n]) is list else (args[n],)
            if not PLAIN_TENSORS.issuperset(map(type, tensors)):
                return general(mode, keys, args, kwargs)
            dtypes.update([tensor.dtype for tensor in tensors])
        if is_excluded(autocast):
            return call(args, kwargs, False)
        if len(dtypes) != 1 or (_FLOAT32 not in dtypes and _dtype_of(device_type) is _FLOAT32):
            return general(mode, keys, args, kwargs)
        return call(args, kwargs, True)

    return handler


def _dtype_handler(op: OpOverload, rule: Rule, device_type: str, key: Any) -> Handler:
    """FLOAT32_DTYPE_ARG: pass `dtype=torch.float32` where the caller gave no dtype."""
    general, call = GENERAL_HANDLERS[op.name()], _caller_below(op, device_type, key)
    autocast, to_float32 = autocast_key(device_type), cast_to(device_type, torch.float32)
    dtype_at = argument_names(op).index("dtype")

    def handler(mode: Any, keys: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if functorch_level() is not None or type(args[0]) not in PLAIN_TENSORS:
            return general(mode, keys, args, kwargs)
        if is_excluded(autocast):
            return call(args, kwargs, False)
        given = args[dtype_at] if dtype_at < len(args) else kwargs.get("dtype")
        if given is None and to_float32.is_eligible(args[0]):
            if dtype_at < len(args):
                args = (*args[:dtype_at], torch.float32, *args[dtype_at + 1 :])
            else:
                kwargs = {**kwargs, "dtype": torch.float32}
        return call(args, kwargs, True)

    return handler


def _tensor_positions(op: OpOverload) -> list[tuple[int, ...]]:
    """For each number of arguments that a call may have, the positions of the tensors among them, last one first."""
    schema = op._schema.arguments
    positions = [n for n, argument in enumerate(schema) if "Tensor" in str(argument.type)]
    return [tuple(n for n in reversed(positions) if n < length) for length in range(len(schema) + 1)]


def _in_torch(op: OpOverload, rule: Rule, device_type: str) -> bool:
    """Whether a kernel of torch's own autocast follows the rule, whatever `register_op` and other libraries add."""
    return torch_rules(device_type).get(op) is rule and has_kernel(op.name(), AUTOCAST_KEYS[listed_as(device_type)])


def _function(op: OpOverload) -> Callable[..., Any]:
    """Return the fastest function that calls an operator."""
    return (python_binding(op) if op.name() in _BOUND_NAMES else None) or op._op


def _caller_below(op: OpOverload, device_type: str, key: Any) -> Callable[..., Any]:
    """Return the function that calls an operator below the region's key; with `below_autocast`, below torch's key."""
    run, autocast = _function(op), autocast_key(device_type)

    @dynamo_skip
    def call(args: Any, kwargs: Mapping[str, Any], below_autocast: bool) -> Any:
        set_excluded(key, True)
        try:
            if not below_autocast:
                return run(*args, **kwargs) if kwargs else run(*args)
            set_excluded(autocast, True)
            try:
                return run(*args, **kwargs) if kwargs else run(*args)
            finally:
                set_excluded(autocast, False)
        finally:
            set_excluded(key, False)

    return call


# The general handler


class _GeneralHandlers(dict[str, Handler]):
    """General handlers by operator name, each made when it is first needed."""

    def __missing__(self, name: str) -> Handler:
        self[name] = _general_handler(OPERATORS[name])
        return self[name]


GENERAL_HANDLERS: dict[str, Handler] = _GeneralHandlers()


def _general_handler(op: OpOverload) -> Handler:
    """Return the handler of an operator for any rule, any arguments and any mode."""
    positions = [n for n, argument in enumerate(op._schema.arguments) if str(argument.type) == "Tensor"]
    ahead, refuses_numbers = keys_ahead(op), not takes_numbers(op)

    @dynamo_skip
    def handler(mode: Any, keys: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if refuses_numbers or functorch_level() is not None:
            args = _with_tensors(args, _numbers(args, positions))
        if refuses_numbers:  # in traced code torch treats some tensors as numbers, even without another tensor argument
            for position in _numbers(args, positions):
                args = (*args[:position], torch.tensor(args[position]), *args[position + 1 :])
        if not (mode.as_torch and is_ahead(keys, ahead)):
            result = mode.__torch_dispatch__(op, (), args, kwargs)
            if result is not NotImplemented:
                return result
        # If none of the mode's policies lists `op`, torch's autocast key must remain included: the operator's library
        # may have registered a function there, and without the key autocast counts as disabled for the operator's
        # parts.
        listed = any(op in table for _, table in mode.tables)
        excluded, below = (mode.excluded_keys, mode.redispatch_keys) if listed else keysets(())
        if _numbers(args, positions):
            # The dispatcher passes on numbers in the place of tensors (`x + 1`), which redispatch does not accept.
            with Exclude(excluded):
                return op._op(*args, **kwargs)
        return op.redispatch(keys & below, *args, **kwargs)

    return handler


def _numbers(args: tuple[Any, ...], positions: list[int]) -> list[int]:
    """Return the tensor positions at which a number was given."""
    return [position for position in positions if position < len(args) and type(args[position]) in _NUMBERS]


def _with_tensors(args: tuple[Any, ...], positions: list[int]) -> tuple[Any, ...]:
    """Arguments with tensors for the numbers at `positions`; they promote as numbers do, and no digit is lost.

    Autograd saves a number as a tensor with a flag. If a transform has wrapped that tensor, torch cannot hand it to a
    Python function in backward: it reads the number, and the wrapper has no memory.
    """
    tensor = next((arg for arg in args if isinstance(arg, Tensor) and arg.is_floating_point()), None)
    if tensor is None:
        return args
    changed = list(args)
    for position in positions:
        if type(args[position]) in (int, float, bool):
            number = torch.scalar_tensor(args[position], dtype=torch.float64)
            # A float64 number would promote a tensor without dimensions, so it gets that tensor's dtype, a 16-bit
            # dtype only if no digit is lost.
            low = number.to(tensor.dtype) if tensor.dim() == 0 else number
            if tensor.dtype not in (torch.float16, torch.bfloat16) or bool(low == number):
                changed[position] = low
    return tuple(changed)
