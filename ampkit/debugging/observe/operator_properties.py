"""Properties of an operator from its schema, computed once: the arguments that it writes, whether it is a view, ..."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ampkit.containers import map_tensors
from ampkit.debugging.torch_private import OpOverload, is_opaque
from ampkit.policy.operators import is_composite
from ampkit.torch_private import has_kernel

# Their results are uninitialized memory.
_UNINITIALIZED = frozenset(
    f"aten::{name}"
    for name in (
        "empty.memory_format",
        "empty.names",
        "empty_like",
        "empty_strided",
        "empty_permuted",
        "empty_quantized",
        "new_empty",
        "new_empty_strided",
        "resize_",
    )
)
_UNSAFE_VIEWS = ("_unsafe_view", "unsafe_split", "unsafe_split_with_sizes")
# Endings of operators that read a tensor's shape but none of its values.
_SHAPE_ONLY = ("_like", "new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided")
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
        # Views read no values, nor do the profiler's operators. `_UNSAFE_VIEWS` are views in effect, not by schema.
        self.is_view: bool = (
            (func.is_view or base in _UNSAFE_VIEWS or self.name.startswith("profiler::"))
            and not self.mutable
            and not self.literal
        )
        self.uninitialized = self.name in _UNINITIALIZED
        # Tensors made of a storage that was there before, as of a batch in a worker's shared memory.
        self.is_given = base == "set_"
        self.takes_dtype = any(argument.name == "dtype" for argument in schema.arguments)
        self.random = torch.Tag.nondeterministic_seeded in func.tags
        self.shape_only = base.endswith(_SHAPE_ONLY)
        self.communicates = self.name.partition("::")[0] in _COMMUNICATION
        # An operator with a kernel of its own, such as `silu_backward`, gives other bits where it is decomposed.
        has_own = any(has_kernel(self.name, device) for device in ("CPU", "CUDA"))
        self.composite = is_composite(func) and not has_own and not self.name.startswith("profiler::")
        # Only the operator's own kernels know the format of a reserve or workspace; they may crash on other values.
        self.opaque_state = any(part in a.name for a in schema.arguments for part in ("workspace", "reserve"))
        # Positions and names of the arguments that the operator writes.
        self.writes = tuple(
            (position, argument.name)
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        # Arguments that it may write although its schema does not say so: the statistics of batch norm, and all
        # arguments of operators of libraries.
        self.undeclared_writes = (
            ()
            if self.mutable
            else tuple(
                (position, argument.name)
                for position, argument in enumerate(schema.arguments)
                if not self.name.startswith("aten::") or argument.name in ("running_mean", "running_var")
            )
        )
        # Whether it replaces all values of these arguments without reading them.
        self.overwrites = bool(self.writes) and (
            all(schema.arguments[position].is_out for position, _ in self.writes)
            or base in ("copy_", "zero_", "fill_")
            or (self.random and base not in ("bernoulli_", "dropout_"))
        )

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """The tensors that a call writes to."""
        return _tensors_at(self.writes, args, kwargs) if self.writes else []

    def outputs(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """The tensors that a call returned or wrote to, each once."""
        tensors = tensors_in(result)
        if self.mutable:
            tensors = list({id(tensor): tensor for tensor in (*tensors, *self.written(args, kwargs))}.values())
        return tensors

    def buffers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """Running statistics that batch norm mutates although its schema does not say so."""
        if not self.undeclared_writes or not self.name.startswith("aten::"):
            return []
        return self.possibly_written(args, kwargs)

    def possibly_written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """The tensors that a call may write to although its schema does not say so."""
        return _tensors_at(self.undeclared_writes, args, kwargs)


def _tensors_at(arguments: tuple[tuple[int, str], ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    tensors: list[Tensor] = []
    for position, name in arguments:
        tensors += tensors_in(args[position] if position < len(args) else kwargs.get(name))
    return tensors


_properties: dict[int, OperatorProperties] = {}  # by identity: hashing an operator calls Python code


def properties_of(func: OpOverload) -> OperatorProperties:
    """Return the properties of an operator."""
    properties = _properties.get(id(func))
    if properties is None:
        properties = _properties[id(func)] = OperatorProperties(func)
    return properties


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in an argument or a result: the value itself, or those in lists, tuples and values of dicts."""
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
        elif isinstance(item, Tensor):  # the last: it is slow where it is False
            tensors.append(item)


def item_of(arguments: Any, index: int, count: int) -> Any:
    """The arguments of an operator on lists of `count` tensors, with lists of the one with this index."""
    args, kwargs = arguments

    def part(value: Any) -> Any:
        return [value[index]] if type(value) in (list, tuple) and len(value) == count else value

    return tuple(map(part, args)), {key: part(value) for key, value in kwargs.items()}


def readable(tensors: list[Tensor]) -> Iterator[Tensor]:
    """The tensors among them with floating-point or complex values that can be read."""
    for tensor in tensors:
        if (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() and not is_opaque(tensor):
            yield tensor


def converted_arguments(
    op: OperatorProperties,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensor: Callable[[Tensor], Tensor],
    dtype: Callable[[torch.dtype], torch.dtype],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`args` and `kwargs` with each tensor and dtype converted, to run the operator in another precision."""

    def converted(leaf: Any) -> Any:
        return dtype(leaf) if isinstance(leaf, torch.dtype) else leaf

    new_args = [map_tensors(value, tensor, converted) for value in args]
    new_kwargs = {key: map_tensors(value, tensor, converted) for key, value in kwargs.items()}
    for position, argument in enumerate(op.func._schema.arguments):
        if argument.name == "half_to_float":  # of softmax, on accelerators: float16 in, float32 out
            if position < len(new_args):
                new_args[position] = False
            else:
                new_kwargs["half_to_float"] = False
    return tuple(new_args), new_kwargs
