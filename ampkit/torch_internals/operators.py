"""What policies and regions need of torch's registries: operators, kernels, device types with autocast."""

from __future__ import annotations

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = [
    "FakeTensorMode", "OpOverload", "OpOverloadPacket", "canonical", "current_device_type", "has_any_kernel",
    "is_composite", "is_dispatched", "listed_as", "operator_names", "privateuse1_name",
]


_canonical: dict[str, OpOverload] = {}


def canonical(op: OpOverload) -> OpOverload:
    """The one `OpOverload` for an operator of ATen; operators of other libraries are returned as they are.

    Threads that look an operator up for the first time at the same moment may get distinct objects from torch, which
    compare unequal. The first one seen here replaces the others, in `torch.ops` too.
    """
    if op.namespace != "aten":
        return op
    kept = _canonical.setdefault(op.name(), op)
    if kept is not op:
        setattr(getattr(torch.ops.aten, kept._schema.name.removeprefix("aten::")), kept._overloadname, kept)
    return kept


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
    """The name that the `privateuseone` backend was given."""
    return torch._C._get_privateuse1_backend_name()


def listed_as(device_type: str) -> str:
    """The name of a device type in torch's own lists: `privateuseone` for the name that this backend was given."""
    return "privateuseone" if device_type == privateuse1_name() else device_type
