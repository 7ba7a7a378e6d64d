"""An optimizer's gradients as the kernels want them: plain local tensors, listed by device.

Whatever `.grad` may be (sparse, complex, expanded, DTensor, CSR), the lists hold strided tensors that share its
storage, so that writing them writes the gradient. Only metadata is looked at: nothing waits for a device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

import ampkit_kernels
from ampkit.dtypes import REAL_FLOATS

_ORDINARY = frozenset({Tensor, torch.nn.Parameter})
_COMPRESSED = frozenset({torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})

_REFERENCE = ampkit_kernels.reference
_MASTERS = "_ampkit_masters"     # the attribute of an optimizer that holds its `MasterWeights`

# Runs in C: a step looks at a thousand gradients.
_dtype_of = attrgetter("dtype")


@dataclass
class Gradients:
    """The gradients of some parameters.

    `by_device` lists every gradient's storage. `shards` lists those that are parts of a larger gradient, with the
    process groups over which the whole is sharded; they are in `by_device` too. `groups` are all process groups that a
    DTensor parameter or gradient spans, in an order that every rank shares. `duplicated` are sparse gradients whose
    repeated indices have not been added up. `originals` are the `.grad` tensors themselves.
    """

    by_device: dict[torch.device, list[Tensor]] = field(default_factory=dict)
    shards: list[tuple[tuple[Any, ...], Tensor]] = field(default_factory=list)
    groups: list[Any] = field(default_factory=list)
    duplicated: list[Tensor] = field(default_factory=list)
    originals: list[Tensor] = field(default_factory=list)

    def add(self, tensor: Tensor) -> None:
        """List a plain tensor under its device."""
        self.by_device.setdefault(tensor.device, []).append(tensor)


def parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The optimizer's parameters in order, of all parameter groups.

    Raises:
        AssertionError: a parameter is not a tensor.
        AttributeError: what is no optimizer; the class of torch's error.
    """
    params: list[Any] = []
    if not hasattr(optimizer, "param_groups"):
        raise AttributeError(
            f"got {type(optimizer).__name__} for an optimizer; expected a torch.optim.Optimizer, or what has its "
            "param_groups: a scaler's methods take the optimizer, not the parameters or the model"
        )
    for group in optimizer.param_groups:
        params += group["params"]
    for cls in set(map(type, params)) - _ORDINARY:
        if not issubclass(cls, Tensor):
            # torch's class of error, so that code that catches it keeps working
            raise AssertionError(f"expected param to be torch.Tensor, got {cls.__name__}")
    return params


def places(optimizer: Any) -> Iterator[tuple[str | None, str, Tensor]]:
    """The optimizer's parameters, each with the optimizer's name for it, if any, and its place: "group 0, parameter 3".
    """
    for g, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [None] * len(group["params"])
        for i, (name, param) in enumerate(zip(names, group["params"], strict=True)):
            yield name, f"group {g}, parameter {i}", param


def collect(params: Sequence[Tensor], refuse_fp16_of: Any = None, *, coalesce: bool = False) -> Gradients:
    """The gradients of `params` as local strided float tensors; parameters without one are left out.

    May replace a `.grad` by an equal one that can be written in place: expanded gradients become dense, DTensors with a
    pending reduction are reduced, fp16 sparse gradients are coalesced. No gradient's value changes.

    Args:
        params: the parameters to look at.
        refuse_fp16_of: the optimizer of these parameters, which float16 gradients are not for; it gives their names.
        coalesce: add up repeated indices of sparse gradients, whose norm would be wrong otherwise.

    Raises:
        TypeError: a gradient that is neither floating-point nor complex.
        ValueError: a float16 gradient where those are refused. Nothing has been replaced then.
    """
    grads = [grad for param in params if (grad := param.grad) is not None]
    are_ordinary = set(map(type, params)) <= _ORDINARY
    if are_ordinary and grads and ampkit_kernels.backend(grads[0]) is not _REFERENCE:
        flat = ampkit_kernels.FlatList.of(grads)
        if flat is not None:
            if refuse_fp16_of is not None and flat[0].dtype is torch.float16:
                raise _fp16_refusal(refuse_fp16_of)
            return Gradients({flat[0].device: flat}, [], [], [], grads)
    dtypes = set(map(_dtype_of, grads))
    if refuse_fp16_of is not None and torch.float16 in dtypes:
        raise _fp16_refusal(refuse_fp16_of)
    if are_ordinary and dtypes <= REAL_FLOATS and set(map(type, grads)) <= _ORDINARY and _are_dense(grads):
        if len(set(map(Tensor.get_device, grads))) == 1:  # faster than `.device`; -1 on the CPU
            return Gradients({grads[0].device: grads}, [], [], [], grads)
        found = Gradients(originals=grads)
        for grad in grads:
            found.add(grad)
        return found
    found = Gradients()
    seen: set[int] = set()
    with torch.no_grad():
        for param in params:
            _note_mesh(found, param)
            if param.grad is not None and id(param.grad) not in seen:
                _collect_one(found, param, param.grad, coalesce)
                seen.add(id(param.grad))
                found.originals.append(param.grad)
    return found


def _fp16_refusal(optimizer: Any) -> ValueError:
    names = [
        name or place
        for name, place, param in places(optimizer)
        if param.grad is not None and param.grad.dtype is torch.float16
    ]
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return ValueError(
        f"Attempting to unscale FP16 gradients. Got float16 gradients of {shown}; expected float32 parameters: keep "
        "them in float32 and let autocast cast, or pass GradScaler(allow_fp16=True) where the optimizer keeps float32 "
        "master weights."
    )


def _are_dense(grads: Sequence[Tensor]) -> bool:
    """Whether all are contiguous, none is lazily negated or stands in two places (tied by hand, listed twice)."""
    try:
        return (
            len(set(map(id, grads))) == len(grads) and all(map(Tensor.is_contiguous, grads))
            and not any(map(Tensor.is_neg, grads))
        )
    except RuntimeError:  # compressed layouts have no contiguity
        return False


def _note_mesh(found: Gradients, tensor: Tensor) -> None:
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is not None:
        groups = [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]
        found.groups += [group for group in groups if group not in found.groups]


def _collect_one(found: Gradients, param: Tensor, grad: Tensor, coalesce: bool) -> None:
    local = grad
    shard_groups: tuple[Any, ...] = ()
    if hasattr(grad, "placements"):
        grad, local, shard_groups = _local_shard(param, grad)
        _note_mesh(found, grad)
    if local.layout is torch.sparse_coo:
        if local is grad and (coalesce or local.dtype is torch.float16):
            # Sums of scaled fp16 duplicates overflow easily: check the sums, as torch does.
            local = param.grad = grad.coalesce()
        elif not local.is_coalesced():
            found.duplicated.append(local)
        local = local._values()
    elif local.layout in _COMPRESSED:
        local = local.values()
    elif local is grad:
        local = _writable(param, grad)
    if local.is_complex():
        local = torch.view_as_real(local)
    if local.dtype not in REAL_FLOATS or local.layout is not torch.strided:
        raise TypeError(
            f"a gradient has dtype {local.dtype} and layout {local.layout}; expected a floating-point or complex "
            "gradient, dense or sparse: leave this parameter out of the optimizer"
        )
    found.add(local)
    if shard_groups:
        found.shards.append((shard_groups, local))


def _writable(param: Tensor, grad: Tensor) -> Tensor:
    """A dense gradient without overlapping elements, lazy conjugation or negation; replaces `param.grad` if it has any.

    torch's operators for lists refuse to write to lazily negated tensors.
    """
    if grad.is_conj() or grad.is_neg():
        grad = param.grad = grad.resolve_conj().resolve_neg()
    if not grad.is_contiguous() and any(
        stride == 0 and size > 1 for size, stride in zip(grad.shape, grad.stride(), strict=True)
    ):
        grad = param.grad = grad.clone(memory_format=torch.contiguous_format)
    return grad


def _local_shard(param: Tensor, grad: Any) -> tuple[Any, Tensor, tuple[Any, ...]]:
    """A DTensor gradient without pending reductions, its local part, and the groups that hold the other parts."""
    if any(placement.is_partial() for placement in grad.placements):
        from torch.distributed.tensor import Replicate

        settled = [Replicate() if placement.is_partial() else placement for placement in grad.placements]
        grad = param.grad = grad.redistribute(placements=settled)
    local = grad.to_local()
    if hasattr(local, "wait"):  # AsyncCollectiveTensor
        local = local.wait()
    mesh = grad.device_mesh
    groups = tuple(
        mesh.get_group(dim)
        for dim, placement in enumerate(grad.placements)
        if not placement.is_replicate() and mesh.size(dim) > 1
    )
    return grad, local, groups


def unscale_(gradients: Gradients, factor: Tensor, found: Mapping[torch.device, Tensor]) -> None:
    """Multiply all gradients by a 0-d factor, in place, and set the flag of a device where one is not finite then.

    Sums over repeated indices of sparse gradients are checked too. Call it without autograd. Never syncs.
    """
    for device, tensors in gradients.by_device.items():
        flag = found[device]
        local = factor if factor.device == device else moved(factor, device)
        ampkit_kernels.backend(flag).unscale_(tensors, local, flag)
    if gradients.duplicated:
        _check_sums(gradients.duplicated, None, found)


def check_finite(gradients: Gradients, factor: Tensor, found: Mapping[torch.device, Tensor]) -> None:
    """Set the flags that `unscale_` would set; no gradient's value changes. Call it without autograd. Never syncs."""
    for device, tensors in gradients.by_device.items():
        _check(tensors, moved(factor, device), found[device])
    if gradients.duplicated:
        _check_sums(gradients.duplicated, factor, found)


def _check(tensors: Sequence[Tensor], factor: Tensor, flag: Tensor) -> None:
    ops, on_host = ampkit_kernels.backend(flag), host_value_or_none(factor)
    if ops is _REFERENCE and on_host is not None and on_host <= 1.0:
        # torch's check operator, which multiplies by 1: it takes half the time of a norm on the CPU. A factor of at
        # most 1 makes no inf of a finite value.
        ops.unscale_(tensors, torch.ones_like(flag), flag)
    else:
        ops.norm_and_check(tensors, factor, flag)


def _check_sums(duplicated: Sequence[Tensor], factor: Tensor | None, found: Mapping[torch.device, Tensor]) -> None:
    """Check the sums over repeated indices of sparse gradients, times `factor`, for inf and NaN."""
    for grad in duplicated:
        values = grad.coalesce().values()
        flag = found[values.device]
        by = torch.ones_like(flag) if factor is None else moved(factor, flag.device)
        _check([torch.view_as_real(values) if values.is_complex() else values], by, flag)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`; itself if it is there.

    Copies between devices are ordered by their streams. A `non_blocking` copy to the CPU returns before the values have
    arrived (torch copies into pinned memory), and reading them at once gives garbage. So a copy to the CPU syncs; every
    other one does not.
    """
    if tensor.device == device:
        return tensor
    return tensor.to(device, non_blocking=device.type != "cpu")


def host_value_or_none(value: Tensor) -> float | None:
    """The number in a one-element tensor if the host can see it without waiting for a device, else None."""
    return value.numpy().item() if value.is_cpu and type(value) is Tensor else None  # a FakeTensor holds no number


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; any other tensor itself."""
    if type(tensor) in _ORDINARY or not hasattr(tensor, "to_local"):
        return tensor
    return tensor.to_local()  # type: ignore[attr-defined]


def combined(flags: Sequence[Tensor], device: torch.device) -> Tensor:
    """One 0-d flag on `device` that is exactly 0.0 or 1.0: set when any of `flags` is nonzero, NaN included."""
    if len(flags) == 1 and flags[0].ndim == 0 and flags[0].device == device:
        return flags[0]
    return torch.stack([moved(flag.reshape(()), device) for flag in flags]).ne(0).any().float()


def merged(before: dict[torch.device, Tensor], found: dict[torch.device, Tensor]) -> dict[torch.device, Tensor]:
    """The flags of two checks, by device: set where either is."""
    both = {device: torch.maximum(before[device], flag) for device, flag in found.items() if device in before}
    return {**before, **found, **both}


def note_written(tensors: Sequence[Tensor]) -> None:
    """Bump the versions of tensors and of their shards, as an in-place operation would: what is saved for backward is
    stale now. Neither a kernel does it, nor, for the DTensor that autograd has saved, a write to its shard.
    """
    torch.autograd.graph.increment_version([*tensors, *map(local_tensor, tensors)])


def masters_of(optimizer: Any) -> Any:
    """The `MasterWeights` of an optimizer; None where it has none."""
    return getattr(optimizer, _MASTERS, None)


def set_masters(optimizer: Any, masters: Any) -> None:
    """Let `masters_of` find them from now on."""
    setattr(optimizer, _MASTERS, masters)


def take_master_gradients(optimizer: Any) -> None:
    """Move gradients that arrived at 16-bit parameters to their masters; no-op for an optimizer without masters."""
    masters = getattr(optimizer, _MASTERS, None)      # not `masters_of`: a call more in every step
    if masters is not None:
        masters.take_gradients_()
