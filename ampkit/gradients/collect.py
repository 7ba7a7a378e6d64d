"""An optimizer's gradients as the kernels take them: plain local tensors, listed by device, with a flag each.

Whatever `.grad` is (sparse, complex, expanded, DTensor, CSR), the lists hold strided tensors that share its storage, so
that writing them writes the gradient. `collect` reads only metadata: it waits for no device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import filterfalse
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

import ampkit_kernels
from ampkit.dtypes import REAL_FLOATS
from ampkit.torch_private import foreach_clamp_max_, foreach_clamp_min_, is_dtensor, local_tensors, placements_of

ORDINARY = frozenset({Tensor, torch.nn.Parameter})
"""Types of tensors that are not DTensors. A test by type, since a failing attribute lookup is the largest cost."""
_COMPRESSED = frozenset({torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})

_MASTERS = "_ampkit_masters"  # the attribute of an optimizer with its `MasterWeights`

# Runs in C: a step reads the dtypes of a thousand gradients.
_dtype_of = attrgetter("dtype")


@dataclass
class Gradients:
    """The gradients of some parameters.

    Attributes:
        by_device: a strided tensor for every gradient, which shares its storage.
        meshes: each mesh that a DTensor parameter or gradient spans, as its process groups, one for each dimension of
            several ranks; in the same order on every rank. The values of the dict are None.
        parts: if there are meshes, the same tensors by the groups of their mesh, and by whether this rank counts them:
            of replicas one rank does. Tensors without a mesh: `((), True)`.
        duplicated: sparse gradients whose repeated indices have not been added up.
        originals: the `.grad` tensors themselves.
    """

    by_device: dict[torch.device, list[Tensor]] = field(default_factory=dict)
    meshes: dict[tuple[Any, ...], None] = field(default_factory=dict)
    parts: dict[tuple[tuple[Any, ...], bool], list[Tensor]] = field(default_factory=dict)
    duplicated: list[Tensor] = field(default_factory=list)
    originals: list[Tensor] = field(default_factory=list)

    def add(self, tensor: Tensor) -> None:
        """List a plain tensor under its device."""
        self.by_device.setdefault(tensor.device, []).append(tensor)

    def unscale_(self, factor: Tensor, flags: Mapping[torch.device, Tensor]) -> None:
        """Multiply by a 0-d factor, in place, and set the flag of each device with a non-finite product.

        Sums over repeated indices of sparse gradients are also checked. Call it without autograd. Never synchronizes.
        """
        for device, tensors in self.by_device.items():
            flag = flags[device]
            local = factor if factor.device == device else moved(factor, device)
            ampkit_kernels.unscale_(tensors, local, flag)
        if self.duplicated:
            _check_sums(self.duplicated, None, flags)

    def check(self, factor: Tensor, flags: Mapping[torch.device, Tensor]) -> None:
        """Set the flags that `unscale_` would set, and leave gradients as they are. Call it without autograd.

        Never synchronizes.
        """
        for device, tensors in self.by_device.items():
            _check(tensors, moved(factor, device), flags[device])
        if self.duplicated:
            _check_sums(self.duplicated, factor, flags)

    def multiply_(self, factor: Tensor, flags: Mapping[torch.device, Tensor]) -> None:
        """Multiply by a 0-d factor, in place, unless it is 1 or the flag of the gradient's device is set.

        A float64 factor, as clipping has for float64 gradients, multiplies these as it is; it is rounded to float32 for
        other gradients, and where Triton runs. Call it without autograd. Never synchronizes.
        """
        for device, tensors in self.by_device.items():
            local = factor if factor.device == device else moved(factor, device)
            ampkit_kernels.multiply_(tensors, local, flags[device])

    def clamp_(self, clip_value: float) -> None:
        """Clamp every element, and real and imaginary parts, to `[-clip_value, clip_value]`. Never synchronizes."""
        with torch.set_grad_enabled(False):
            for tensors in self.by_device.values():
                for tensor in filter(Tensor.is_neg, tensors):  # torch's operators for lists refuse these
                    tensor.clamp_(-clip_value, clip_value)
                if plain := list(filterfalse(Tensor.is_neg, tensors)):
                    foreach_clamp_min_(plain, -clip_value)
                    foreach_clamp_max_(plain, clip_value)


def parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the optimizer's parameters of all parameter groups, in order.

    Raises:
        AssertionError: a parameter is not a tensor.
        AttributeError: `optimizer` has no `param_groups`; torch's class of error.
    """
    params: list[Any] = []
    if not hasattr(optimizer, "param_groups"):
        raise AttributeError(
            f"got {type(optimizer).__name__} for an optimizer; expected a torch.optim.Optimizer, or an object with its "
            "param_groups: a scaler's methods take the optimizer, not the parameters or the model"
        )
    for group in optimizer.param_groups:
        params += group["params"]
    for cls in set(map(type, params)) - ORDINARY:
        if not issubclass(cls, Tensor):
            # torch's class of error: code may catch it
            raise AssertionError(f"expected param to be torch.Tensor, got {cls.__name__}")
    return params


def places(optimizer: Any) -> Iterator[tuple[str | None, str, Tensor]]:
    """Yield the optimizer's name for each parameter, or None, its place ("group 0, parameter 3"), and the parameter."""
    for group_index, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [None] * len(group["params"])
        for index, (name, param) in enumerate(zip(names, group["params"], strict=True)):
            yield name, f"group {group_index}, parameter {index}", param


def collect(params: Sequence[Tensor], refuse_fp16_of: Any = None, *, coalesce: bool = False) -> Gradients:
    """Return the gradients of `params` as local strided float tensors; parameters without one are omitted.

    May replace a `.grad` by an equal one that can be written in place: expanded gradients become dense, DTensors with a
    pending reduction are reduced, fp16 sparse gradients are coalesced. No gradient's value changes.

    Args:
        params: the parameters.
        refuse_fp16_of: their optimizer, if float16 gradients are refused; it has names for them. None: accept them.
        coalesce: add up repeated indices of sparse gradients, whose norm would be wrong otherwise.

    Raises:
        TypeError: a gradient that is neither floating-point nor complex.
        ValueError: a gradient is float16, and these are refused. Nothing has been replaced then.
    """
    grads = [grad for param in params if (grad := param.grad) is not None]
    are_ordinary = set(map(type, params)) <= ORDINARY
    if are_ordinary and grads:
        flat = ampkit_kernels.FlatList.of(grads)
        if flat is not None:
            if refuse_fp16_of is not None and flat[0].dtype is torch.float16:
                raise _fp16_refusal(refuse_fp16_of)
            return Gradients({flat[0].device: flat}, originals=grads)
    dtypes = set(map(_dtype_of, grads))
    if refuse_fp16_of is not None and torch.float16 in dtypes:
        raise _fp16_refusal(refuse_fp16_of)
    if are_ordinary and dtypes <= REAL_FLOATS and set(map(type, grads)) <= ORDINARY and _are_dense(grads):
        if len(set(map(Tensor.get_device, grads))) == 1:  # faster than `.device`; -1 on the CPU
            return Gradients({grads[0].device: grads}, originals=grads)
        gradients = Gradients(originals=grads)
        for grad in grads:
            gradients.add(grad)
        return gradients
    gradients = Gradients()
    if not are_ordinary:
        _add_meshes(gradients, _meshes_of(params))
        if dtypes <= REAL_FLOATS and _add_shards(gradients, grads):
            return gradients
    seen: set[int] = set()
    with torch.no_grad():
        for param in params:
            if param.grad is not None and id(param.grad) not in seen:
                _add_gradient(gradients, param, param.grad, coalesce)
                seen.add(id(param.grad))
                gradients.originals.append(param.grad)
    return gradients


def _fp16_refusal(optimizer: Any) -> ValueError:
    """Return the error for float16 gradients, with the names of their parameters."""
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
    """Whether all are contiguous, none is lazily negated, and none is listed twice."""
    try:
        return (
            len(set(map(id, grads))) == len(grads)
            and all(map(Tensor.is_contiguous, grads))
            and not any(map(Tensor.is_neg, grads))
        )
    except RuntimeError:  # compressed layouts have no contiguity
        return False


def _add_meshes(gradients: Gradients, meshes: Iterable[Any]) -> None:
    for mesh in meshes:
        groups = _groups_of(mesh)
        if groups:
            gradients.meshes[groups] = None


def _meshes_of(tensors: Sequence[Tensor]) -> Iterable[Any]:
    """Each mesh of DTensors once."""
    return {id(place[0]): place[0] for place in placements_of(tensors) if place is not None}.values()


def _groups_of(mesh: Any) -> tuple[Any, ...]:
    """Return a process group for each dimension of several ranks."""
    return tuple(mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1)


def _part_of(place: tuple[Any, Any] | None) -> tuple[tuple[Any, ...], bool]:
    """Return the key in `Gradients.parts` of a DTensor's mesh and placements, or of a plain tensor."""
    if place is None:
        return (), True
    mesh, placements = place
    groups, coordinate = _groups_of(mesh), mesh.get_coordinate()
    is_first = coordinate is not None and not any(
        at and placement.is_replicate() for at, placement in zip(coordinate, placements, strict=True)
    )
    return groups, is_first or not groups


def _add_shards(gradients: Gradients, grads: list[Tensor]) -> bool:
    """Add DTensors and plain tensors; False, with nothing added, if one of them is not dense or is to be reduced.

    Each mesh and placement is read once per call, and not cached longer: a group may be destroyed and made again.
    """
    tensors, where = local_tensors(grads), placements_of(grads)
    flat = None
    if grads:
        flat = ampkit_kernels.FlatList.of(tensors)
    if flat is None and not (set(map(type, tensors)) <= ORDINARY and _are_dense(tensors)):
        return False
    by_place: dict[Any, list[Tensor]] = {}
    last, here = None, by_place.setdefault(None, [])
    for tensor, place in zip(tensors, where, strict=True):
        if place != last:  # comparing costs less than a look-up: placements are hashed in Python
            last, here = place, by_place.setdefault(place, [])
        here.append(tensor)
    if any(placement.is_partial() for place in by_place if place is not None for placement in place[1]):
        return False
    _add_meshes(gradients, [place[0] for place in by_place if place is not None])
    for place, here in by_place.items():
        if here:
            gradients.parts.setdefault(_part_of(place), []).extend(here)
    if flat is not None or len(set(map(Tensor.get_device, tensors))) == 1:
        gradients.by_device[tensors[0].device] = tensors if flat is None else flat
    else:
        for tensor in tensors:
            gradients.add(tensor)
    gradients.originals += grads
    return True


def _add_gradient(gradients: Gradients, param: Tensor, grad: Tensor, coalesce: bool) -> None:
    """Add a gradient of any kind, as a strided real tensor."""
    local = grad
    if is_dtensor(grad):
        grad, local = _local_shard(param, grad)
        _add_meshes(gradients, _meshes_of([grad]))
    if local.layout is torch.sparse_coo:
        if local is grad and (coalesce or local.dtype is torch.float16):
            # Sums over repeated indices overflow easily in scaled float16: check the sums, as torch does.
            local = param.grad = grad.coalesce()
        elif not local.is_coalesced():
            gradients.duplicated.append(local)
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
    gradients.add(local)
    gradients.parts.setdefault(_part_of(placements_of([grad])[0]), []).append(local)


def _writable(param: Tensor, grad: Tensor) -> Tensor:
    """Return a dense gradient that can be written in place; replaces `param.grad` if that one cannot.

    Expanded gradients have overlapping elements, and torch's operators for lists refuse lazily negated tensors.
    """
    if grad.is_conj() or grad.is_neg():
        grad = param.grad = grad.resolve_conj().resolve_neg()
    if not grad.is_contiguous() and any(
        stride == 0 and size > 1 for size, stride in zip(grad.shape, grad.stride(), strict=True)
    ):
        grad = param.grad = grad.clone(memory_format=torch.contiguous_format)
    return grad


def _local_shard(param: Tensor, grad: Any) -> tuple[Any, Tensor]:
    """Return a DTensor gradient without pending reductions, and its local part."""
    if any(placement.is_partial() for placement in grad.placements):
        from torch.distributed.tensor import Replicate

        reduced = [Replicate() if placement.is_partial() else placement for placement in grad.placements]
        grad = param.grad = grad.redistribute(placements=reduced)
    local = grad.to_local()
    if hasattr(local, "wait"):  # AsyncCollectiveTensor
        local = local.wait()
    return grad, local


def _check(tensors: Sequence[Tensor], factor: Tensor, flag: Tensor) -> None:
    """Set the flag if a tensor of one device, times the factor, is not finite."""
    on_host = host_value_or_none(factor)
    if on_host is not None and on_host <= 1.0 and not ampkit_kernels.uses_triton("auto", flag.device):
        # On the CPU torch's operator, here with a factor of 1, takes half the time of a norm. A factor of at most 1
        # turns no finite value into inf.
        ampkit_kernels.unscale_(tensors, torch.ones_like(flag), flag)
    else:
        ampkit_kernels.norm_and_check(tensors, factor, flag)


def _check_sums(duplicated: Sequence[Tensor], factor: Tensor | None, flags: Mapping[torch.device, Tensor]) -> None:
    """Check the sums over repeated indices of sparse gradients, times `factor` (None: 1), for inf and NaN."""
    for grad in duplicated:
        values = grad.coalesce().values()
        flag = flags[values.device]
        local_factor = torch.ones_like(flag) if factor is None else moved(factor, flag.device)
        _check([torch.view_as_real(values) if values.is_complex() else values], local_factor, flag)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on `device`; itself if it is there.

    Only a copy to the CPU synchronizes: a `non_blocking` one would return before its values have arrived (torch copies
    into pinned memory). Streams order all other copies.
    """
    if tensor.device == device:
        return tensor
    return tensor.to(device, non_blocking=device.type != "cpu")


def host_value_or_none(value: Tensor) -> float | None:
    """Return the number in a one-element tensor if the host can read it without waiting for a device, or None."""
    return value.numpy().item() if value.is_cpu and type(value) is Tensor else None  # a FakeTensor holds no number


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor; any other tensor itself."""
    if type(tensor) in ORDINARY or not is_dtensor(tensor):
        return tensor
    return tensor.to_local()  # type: ignore[attr-defined]


def combined(flags: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return one 0-d flag on `device`, 0.0 or 1.0, set if any of `flags` is nonzero or NaN; a single flag itself."""
    if len(flags) == 1 and flags[0].ndim == 0 and flags[0].device == device:
        return flags[0]
    return torch.stack([moved(flag.reshape(()), device) for flag in flags]).ne(0).any().float()


def merged(first: dict[torch.device, Tensor], second: dict[torch.device, Tensor]) -> dict[torch.device, Tensor]:
    """Return the flags of two checks, by device, set if either is."""
    both = {device: torch.maximum(first[device], flag) for device, flag in second.items() if device in first}
    return {**first, **second, **both}


def note_written(tensors: Sequence[Tensor]) -> None:
    """Bump the version counters of tensors and of their shards, by which autograd finds stale saved tensors.

    In-place operations do that, but kernels do not; nor does a write to a shard bump the counter of its DTensor.
    """
    torch.autograd.graph.increment_version([*tensors, *map(local_tensor, tensors)])


def masters_of(optimizer: Any) -> Any:
    """Return the float32 `MasterWeights` of an optimizer; None if it has none."""
    return getattr(optimizer, _MASTERS, None)


def set_masters(optimizer: Any, masters: Any) -> None:
    """Set the `MasterWeights` that `masters_of` returns."""
    setattr(optimizer, _MASTERS, masters)


def take_master_gradients(optimizer: Any) -> None:
    """Move gradients that arrived at 16-bit parameters to their masters; no-op for an optimizer without masters."""
    masters = getattr(optimizer, _MASTERS, None)
    if masters is not None:
        masters.take_gradients_()


def gradients_of(optimizer: Any, *, allow_fp16: bool = True, coalesce: bool = False) -> Gradients:
    """Return an optimizer's gradients by `collect`. Gradients of 16-bit parameters move to their masters first."""
    take_master_gradients(optimizer)
    return collect(parameters(optimizer), None if allow_fp16 else optimizer, coalesce=coalesce)
