"""Operators: torch's registries and schemas, Python bindings, and the names of device types."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = [
    "FakeTensorMode",
    "OpOverload",
    "OpOverloadPacket",
    "argument_names",
    "canonical",
    "current_device_type",
    "dtype_overload",
    "has_any_kernel",
    "is_composite",
    "is_dispatched",
    "listed_as",
    "operator_names",
    "privateuse1_name",
    "python_binding",
    "takes_numbers",
]


_canonical: dict[str, OpOverload] = {}


def canonical(op: OpOverload) -> OpOverload:
    """The same `OpOverload` at every call for an operator of ATen; operators of other libraries as they are.

    Threads that look an operator up for the first time at the same moment may get distinct objects from torch, which
    compare unequal. The first object that comes here replaces the others, in `torch.ops` too.
    """
    if op.namespace != "aten":
        return op
    first = _canonical.setdefault(op.name(), op)
    if first is not op:
        setattr(getattr(torch.ops.aten, first._schema.name.removeprefix("aten::")), first._overloadname, first)
    return first


def operator_names() -> list[str]:
    """The names of all operators: `aten::add.Tensor`."""
    return torch._C._dispatch_get_all_op_names()


def is_composite(op: OpOverload) -> bool:
    """Whether an operator is written in terms of others, which autograd and autocast see."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


def has_any_kernel(op: OpOverload) -> bool:
    return torch._C._dispatch_has_kernel(op.name())


def is_dispatched(op: OpOverload) -> bool:
    """Whether calls of an operator go through the dispatcher; TorchScript's on plain numbers do not."""
    try:
        torch._C._dispatch_find_schema_or_throw(op._schema.name, op._schema.overload_name)
    except RuntimeError:
        return False
    return True


def current_device_type() -> str:
    """The type of the accelerator in use, else "cpu"."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def privateuse1_name() -> str:
    """The name that the `privateuseone` backend has in this process."""
    return torch._C._get_privateuse1_backend_name()


def takes_numbers(op: OpOverload) -> bool:
    """Whether Python may call an operator with a number in the place of a tensor, as with `mul`."""
    return torch._C._should_allow_numbers_as_tensors(op._schema.name.rpartition("::")[2])


def listed_as(device_type: str) -> str:
    """The name of a device type in torch's own lists: `privateuseone` for the name that this backend has."""
    return "privateuseone" if device_type == privateuse1_name() else device_type


@functools.cache
def dtype_overload(op: OpOverload) -> OpOverload | None:
    """`op` if it has a `dtype` argument, else its overload with the same arguments and a `dtype`; None without one."""
    names = argument_names(op)
    if "dtype" in names:
        return op
    overloads = (getattr(op.overloadpacket, name) for name in op.overloadpacket.overloads())
    return next((overload for overload in overloads if argument_names(overload) == [*names, "dtype"]), None)


def argument_names(op: OpOverload) -> list[str]:
    """The names of an operator's arguments, in the order of its schema."""
    return [argument.name for argument in op._schema.arguments]


def python_binding(op: OpOverload) -> Callable[..., Any] | None:
    """torch's Python function of this name, which parses arguments faster than the `OpOverload`; None if there is none.

    The function may choose another overload: which one depends on the arguments.
    """
    name = op._schema.name.removeprefix("aten::")
    for bindings in (getattr(torch._C, "_nn", None), getattr(torch._C, "_VariableFunctions", None)):
        binding = getattr(bindings, name, None)
        if binding is not None:
            return binding
    return None
