"""Properties of an operator from its schema, computed once: the arguments that it writes, whether it is a view, ..."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ampkit.containers import map_tensors
from ampkit.debugging.torch_private import is_opaque
from ampkit.policy.operators import is_composite
from ampkit.torch_private import OpOverload, has_kernel

# Operators whose results are uninitialized memory.
_UNINITIALIZED = frozenset(
    f"{new}empty{ending}" for new in ("", "new_") for ending in ("", "_like", "_strided", "_permuted", "_quantized")
) | {"resize"}
_UNSAFE_VIEWS = ("_unsafe_view", "unsafe_split", "unsafe_split_with_sizes")
_PRIVATE_RNNS = ("mkldnn_rnn", "_cudnn_rnn", "miopen_rnn")  # return memory that only their own backward can read
# Types of arguments that hold no tensor.
_NO_TENSORS = frozenset(
    (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)
_COMMUNICATION = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"})


class OperatorProperties:
    """The properties of one operator overload."""

    def __init__(self, func: OpOverload) -> None:
        schema = func._schema
        self.func, self.name = func, func.name()
        base = self.name.partition("::")[2].partition(".")[0]
        self.base = base.rstrip("_")  # without namespace, overload and underscore at its end
        self.on_lists = base.startswith(("_foreach_", "_fused_"))
        self.mutable: bool = schema.is_mutable
        self.literal = self.name == "aten::lift_fresh"  # `torch.tensor` of a list calls it
        # Views and the profiler's operators read no values. `_UNSAFE_VIEWS` are views in effect, not by schema.
        self.is_view: bool = (
            (func.is_view or base in _UNSAFE_VIEWS or self.name.startswith("profiler::"))
            and not self.mutable
            and not self.literal
        )
        self.uninitialized = self.base in _UNINITIALIZED
        # The tensor gets a storage with values, such as a batch in a worker's shared memory.
        self.takes_storage = base == "set_"
        self.takes_dtype = any(argument.name == "dtype" for argument in schema.arguments)
        self.random = torch.Tag.nondeterministic_seeded in func.tags
        # It reads a tensor's shape but none of its values.
        self.shape_only = base.endswith("_like") or base.startswith("new_")
        self.communicates = self.name.partition("::")[0] in _COMMUNICATION
        self.is_empty = self.takes_storage or self.uninitialized or self.communicates  # the values are not there yet
        # An operator with a kernel of its own, such as `silu_backward`, gives other bits if it is decomposed.
        has_own = any(has_kernel(self.name, device) for device in ("CPU", "CUDA"))
        self.composite = is_composite(func) and not has_own and not self.name.startswith("profiler::")
        # Only the operator's own kernels can use a reserve or workspace; they may crash on other values.
        self.opaque_state = any(part in self.name for part in _PRIVATE_RNNS) or any(
            part in argument.name for argument in schema.arguments for part in ("workspace", "reserve")
        )
        # Positions and names of the arguments that the operator writes. The schema of batch norm omits its statistics,
        # which its backward only reads.
        omits_statistics = not self.mutable and not base.endswith("_backward")
        self.writes = tuple(
            (position, argument.name)
            for position, argument in enumerate(schema.arguments)
            if (argument.alias_info is not None and argument.alias_info.is_write)
            or (argument.name in ("running_mean", "running_var") and omits_statistics)
        )
        # Whether it replaces all values of these arguments without reading them.
        self.overwrites = self.mutable and (
            all(schema.arguments[position].is_out for position, _ in self.writes)
            or base in ("copy_", "zero_", "fill_")
            or (self.random and base not in ("bernoulli_", "dropout_"))
        )

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """Return the tensors that a call writes to."""
        if not self.writes:
            return []
        return tensors_in([args[i] if i < len(args) else kwargs.get(name) for i, name in self.writes])


_properties: dict[int, OperatorProperties] = {}  # by identity: hashing an operator calls Python code


def properties_of(func: OpOverload) -> OperatorProperties:
    """Return the properties of an operator."""
    properties = _properties.get(id(func))
    if properties is None:
        properties = _properties[id(func)] = OperatorProperties(func)
    return properties


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in an argument or a result: the value itself, or the items of lists, tuples and dicts."""
    if type(value) is Tensor:
        return [value]
    tensors: list[Tensor] = []
    _collect((value,), tensors)
    return tensors


def _collect(values: Iterable[Any], tensors: list[Tensor]) -> None:
    for item in values:
        cls = type(item)
        if cls is Tensor or cls is Parameter:
            tensors.append(item)
        elif cls in _NO_TENSORS:
            pass
        elif isinstance(item, (list, tuple)):
            _collect(item, tensors)
        elif isinstance(item, dict):
            _collect(item.values(), tensors)
        elif isinstance(item, Tensor):  # the last test: it is slow if it fails
            tensors.append(item)


def outputs_of(result: Any, written: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that a call returned or wrote to, each once."""
    results = tensors_in(result)
    return list({id(tensor): tensor for tensor in (*results, *written)}.values()) if written else results


def floats_in(args: Iterable[Any], kwargs: dict[str, Any]) -> list[float]:
    """Return the Python floats among arguments."""
    return [argument for argument in (*args, *kwargs.values()) if type(argument) is float]


def item_of(arguments: Any, index: int, count: int) -> Any:
    """Return the arguments of an operator on lists of `count` tensors, with only the tensor at this index."""
    args, kwargs = arguments

    def part(value: Any) -> Any:
        return [value[index]] if type(value) in (list, tuple) and len(value) == count else value

    return tuple(map(part, args)), {key: part(value) for key, value in kwargs.items()}


def readable(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors with floating-point or complex values that can be read."""
    return [
        each
        for each in tensors
        if (each.is_floating_point() or each.is_complex()) and each.numel() and not is_opaque(each)
    ]


def converted_arguments(
    op: OperatorProperties,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensor: Callable[[Tensor], Tensor],
    dtype: Callable[[torch.dtype], torch.dtype],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return `args` and `kwargs` with each tensor and dtype converted, to run the operator in another precision."""

    def converted(leaf: Any) -> Any:
        return dtype(leaf) if isinstance(leaf, torch.dtype) else leaf

    new_args = [map_tensors(value, tensor, converted) for value in args]
    new_kwargs = {key: map_tensors(value, tensor, converted) for key, value in kwargs.items()}
    if op.base in ("_softmax", "_log_softmax"):
        new_args[2] = False  # the argument that requests float32 results of float16, on accelerators
    return tuple(new_args), new_kwargs
