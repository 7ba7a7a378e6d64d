"""What an operator's schema says about it, worked out once per operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ampkit.containers import map_tensors
from ampkit.torch_internals.operator_tracing import OpOverload, is_opaque
from ampkit.torch_internals.operators import is_composite

# Their results are whatever the memory held.
_UNINITIALISED = frozenset(f"aten::{name}" for name in (
    "empty.memory_format", "empty.names", "empty_like", "empty_strided", "empty_permuted", "empty_quantized",
    "new_empty", "new_empty_strided", "resize_", "set_.source_Storage_storage_offset",
))
_UNSAFE_VIEWS = ("_unsafe_view", "unsafe_split", "unsafe_split_with_sizes")
# They take a tensor for its shape and never read what it holds.
_SHAPE_ONLY = ("_like", "new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided")
_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
_COMMUNICATION = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"})


class OperatorFacts:
    """One operator overload, described."""

    def __init__(self, op: OpOverload) -> None:
        schema = op._schema
        self.name = op.name()
        base = self.name.partition("::")[2].partition(".")[0]
        self.mutable: bool = schema.is_mutable
        self.literal = self.name == "aten::lift_fresh"      # `torch.tensor` of a list ends in it
        # Views read nothing, nor do the profiler's marks. Some share memory without their schema saying so.
        self.is_view: bool = (
            op.is_view or base in _UNSAFE_VIEWS or self.name.startswith("profiler::")
        ) and not self.mutable and not self.literal
        self.uninitialised = self.name in _UNINITIALISED
        self.takes_dtype = any(argument.name == "dtype" for argument in schema.arguments)
        self.random = torch.Tag.nondeterministic_seeded in op.tags
        self.shape_only = base.endswith(_SHAPE_ONLY)
        self.communicates = self.name.partition("::")[0] in _COMMUNICATION
        self.composite = is_composite(op) and not self.name.startswith("profiler::")
        # A reserve or workspace is memory in a form that only the kernel knows; on other values it may crash.
        self.opaque_state = any(part in a.name for a in schema.arguments for part in ("workspace", "reserve"))
        # Places and names of the arguments that are written, and whether they are read first.
        self.writes = tuple(
            (place, argument.name)
            for place, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        # Batch norm does not say that it updates its statistics; operators of libraries may not say anything.
        self.undeclared_writes = () if self.mutable else tuple(
            (place, argument.name)
            for place, argument in enumerate(schema.arguments)
            if not self.name.startswith("aten::") or argument.name in ("running_mean", "running_var")
        )
        self.overwrites = bool(self.writes) and (
            all(schema.arguments[place].is_out for place, _ in self.writes)
            or base in ("copy_", "zero_", "fill_")
            or (self.random and base not in ("bernoulli_", "dropout_"))
        )

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """The tensors that a call writes to."""
        return _at(self.writes, args, kwargs)

    def outputs(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """What a call computed: what it returned and what it wrote to, each once."""
        found = tensors_in(result)
        if self.mutable:
            found = list({id(one): one for one in (*found, *self.written(args, kwargs))}.values())
        return found

    def buffers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """Of batch norm, the statistics that it updates without saying so."""
        return self.possibly_written(args, kwargs) if self.undeclared_writes and self.name[:6] == "aten::" else []

    def possibly_written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """Those that a call may write to without saying so."""
        return _at(self.undeclared_writes, args, kwargs)


def _at(places: tuple[tuple[int, str], ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for place, name in places:
        found += tensors_in(args[place] if place < len(args) else kwargs.get(name))
    return found


_facts: dict[int, tuple[OpOverload, OperatorFacts]] = {}      # by identity: an operator's own hash is Python


def facts_of(op: OpOverload) -> OperatorFacts:
    """The facts of an operator."""
    found = _facts.get(id(op))
    if found is None:
        found = _facts[id(op)] = (op, OperatorFacts(op))
    return found[1]


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of an argument or a result: itself, or those in a list, a tuple or a dict's values."""
    found: list[Tensor] = []
    _collect((value,), found)
    return found


def _collect(values: Iterable[Any], found: list[Tensor]) -> None:
    for item in values:
        cls = type(item)        # `isinstance` of what is no tensor asks Tensor's metaclass, which takes its time
        if cls is Tensor or cls is Parameter:
            found.append(item)
        elif cls is tuple or cls is list:
            _collect(item, found)
        elif cls is dict:
            _collect(item.values(), found)
        elif cls in _PLAIN:
            pass
        elif isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            _collect(item, found)
        elif isinstance(item, dict):
            _collect(item.values(), found)


def readable(tensors: list[Tensor]) -> Iterator[Tensor]:
    """Those with floating-point or complex values that can be looked at."""
    for tensor in tensors:
        if (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() and not is_opaque(tensor):
            yield tensor


def other_arguments(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any],
    tensor: Callable[[Tensor], Tensor], dtype: Callable[[torch.dtype], torch.dtype],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`args` and `kwargs` of a call with other tensors and dtypes, for the same operator in another precision."""
    def changed(value: Any) -> Any:
        return dtype(value) if isinstance(value, torch.dtype) else value

    other_args = [map_tensors(value, tensor, changed) for value in args]
    other_kwargs = {key: map_tensors(value, tensor, changed) for key, value in kwargs.items()}
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "half_to_float":    # of softmax, on accelerators: float16 in, float32 out
            if place < len(other_args):
                other_args[place] = False
            else:
                other_kwargs["half_to_float"] = False
    return tuple(other_args), other_kwargs
