"""What the optimizers share: the scalars that a scaler leaves for one step, local shards, rows by device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

import ampkit_kernels as kernels
from ampkit.gradients.transfer import host_value_or_none, moved
from ampkit.torch_internals.optimizers import foreach_mul

Loss = TypeVar("Loss")      # what a closure returns, and `step` then
# Gradients scaled on the host are copies, made for so many elements at a time.
_ELEMENTS_AT_A_TIME = 1 << 24
# Neither has a local part of its own; by type, because a failing attribute lookup costs more than the rest.
_ORDINARY = frozenset({Tensor, torch.nn.Parameter})


class CastSource(Protocol):
    """What keeps low-precision casts of parameters: a `WeightCache`."""

    def casts_to_write(self, optimizer: Any) -> dict[Tensor, Tensor]: ...
    def casts_written(self, optimizer: Any, casts: dict[Tensor, Tensor], *, changed: bool) -> None: ...


class ScaledStep:
    """Mixin for a `torch.optim` optimizer whose step reads its scalars on the device.

    `_step_supports_amp_scaling` is torch's contract with fused optimizers, `_step_supports_grad_multiplier`
    is ampkit's: the scaler may hand over `grad_multiplier`, the inverse scale times a clipping coefficient.
    """

    _step_supports_amp_scaling = True
    _step_supports_grad_multiplier = True
    impl: str
    param_groups: list[dict[str, Any]]
    _copies: dict[Tensor, Tensor]       # that the user wants written
    _targets: dict[Tensor, Tensor]      # those, and the casts that sources keep, as of this step
    _sources: list[weakref.ref[CastSource]]

    def _prepare(self, impl: str) -> None:
        if impl not in kernels.IMPLS:
            raise ValueError(f"unknown impl {impl!r}; expected 'auto', 'triton' or 'reference'")
        self.impl = impl
        self._sources = []
        self._set_copies({})

    def _set_copies(self, copies: dict[Tensor, Tensor]) -> None:
        self._copies = self._targets = copies
        self._forget_plans()

    def _forget_plans(self) -> None:
        """Drop what has been kept about the last step: nothing that has to be saved or copied."""

    def write_copies(self, copies: Mapping[Tensor, Tensor]) -> None:
        """Have every step also write new parameter values, converted, into these tensors.

        Args: copies: low-precision tensor per parameter, of its shape and on its device; an empty mapping
        ends it. A skipped step leaves them as they are. Not part of the `state_dict`; pickles and copies of the
        optimizer have copies of their own.

        Raises:
            ValueError: a key is not one of the optimizer's parameters, or a copy differs in shape or device.
        """
        known = {param for group in self.param_groups for param in group["params"]}
        for param, copy in copies.items():
            if param not in known:
                raise ValueError(
                    f"write_copies got a key of shape {tuple(param.shape)} that is not a parameter of this "
                    f"optimizer; expected tensors from its param_groups"
                )
            if copy.shape != param.shape or copy.device != param.device:
                raise ValueError(
                    f"write_copies got a copy of shape {tuple(copy.shape)} on {copy.device} for a parameter of shape "
                    f"{tuple(param.shape)} on {param.device}; expected the same: torch.empty_like(param, dtype=...)"
                )
        self._set_copies(dict(copies))

    def write_casts_of(self, source: CastSource) -> None:
        """Have every step also write the casts that a `WeightCache` keeps, which asks for it in `follow`.

        The source is asked at each step, and kept by a weak reference. Copies by `write_copies` come first.
        """
        if all(ref() is not source for ref in self._sources):
            self._sources.append(weakref.ref(source))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled or copied optimizer, and what `load_state_dict` of torch hands over: state and groups."""
        super().__setstate__(state)  # type: ignore[misc]
        self.__dict__.setdefault("impl", "auto")
        self.__dict__.setdefault("_sources", [])
        self._set_copies(self.__dict__.get("_copies", {}))

    def __getstate__(self) -> dict[str, Any]:
        """What pickling keeps: with torch's entries `impl`, and the tensors that `write_copies` has named."""
        return {**super().__getstate__(), "impl": self.impl, "_copies": self._copies}  # type: ignore[misc]


class Row(NamedTuple):
    """A parameter with a gradient, and the local tensors behind both."""

    param: Tensor
    local: Tensor
    grad: Tensor


def rows_by_device(group: dict[str, Any], name: str) -> dict[torch.device, list[Row]]:
    """The group's parameters that have gradients, as local tensors, by device.

    Raises:
        RuntimeError: a gradient is sparse.
    """
    pairs = [(param, param.grad) for param in group["params"] if param.grad is not None]
    for param, grad in pairs:
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"ampkit.optim.{name} got a {grad.layout} gradient for a parameter of shape {tuple(param.shape)}; "
                f"expected dense gradients: use torch.optim.SparseAdam or torch.optim.SGD for it, or sparse=False"
            )
    rows = [
        Row(param, param, grad)
        if type(param) in _ORDINARY and type(grad) in _ORDINARY
        else Row(param, local_tensor(param), _local_gradient(param, grad))
        for param, grad in pairs
    ]
    by_device: dict[torch.device, list[Row]] = {}
    for row in rows:
        by_device.setdefault(row.local.device, []).append(row)
    return by_device


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; any other tensor itself."""
    if type(tensor) in _ORDINARY or not hasattr(tensor, "to_local"):
        return tensor
    return tensor.to_local()  # type: ignore[attr-defined]


def _local_gradient(param: Any, grad: Any) -> Tensor:
    placements = getattr(param, "placements", None)
    if placements is not None and getattr(grad, "placements", placements) != placements:
        grad = grad.redistribute(param.device_mesh, placements)
    return local_tensor(grad)


def shaped_like(param: Any, local: Tensor | None) -> Tensor | None:
    """State for a parameter from its local part: a DTensor beside a DTensor."""
    if local is None or type(param) in _ORDINARY or not hasattr(param, "to_local"):
        return local
    whole = torch.zeros_like(param, memory_format=torch.preserve_format)
    local_tensor(whole).copy_(local)
    return whole


def scaled_parts(rows: Sequence[Row], factor: float) -> Iterator[tuple[Sequence[Row], list[Tensor]]]:
    """Rows and their gradients times `factor`, a part at a time; the gradients themselves are left alone."""
    if factor == 1.0:
        yield rows, [row.grad for row in rows]
        return
    part: list[Row] = []
    size = 0
    for row in rows:
        part.append(row)
        size += row.grad.numel()
        if size >= _ELEMENTS_AT_A_TIME or row is rows[-1]:
            yield part, list(foreach_mul([one.grad for one in part], factor))
            part, size = [], 0


def split_by_copy(
    rows: Sequence[Row], copies: Mapping[Tensor, Tensor]
) -> Iterator[tuple[list[Row], list[Tensor] | None]]:
    """Rows without a copy to write (None), then rows with one."""
    if not copies:
        yield list(rows), None
        return
    plain = [row for row in rows if row.param not in copies]
    copied = [row for row in rows if row.param in copies]
    if plain:
        yield plain, None
    if copied:
        yield copied, [local_tensor(copies[row.param]) for row in copied]


def run_closure(closure: Callable[[], Any] | None) -> Any:
    """The closure's loss, computed with gradients enabled; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def plain_number(value: Any, name: str, cls: str) -> None:
    """Refuse a hyperparameter given as a tensor where the kernels need a number."""
    if isinstance(value, Tensor):
        raise TypeError(
            f"ampkit.optim.{cls} got a tensor for {name}; expected a float: only lr may be a tensor, or use "
            f"torch.optim.{cls}(capturable=True)"
        )


def refuse_differentiable(differentiable: bool, cls: str) -> None:
    """The kernels update in place, outside autograd."""
    if differentiable:
        raise ValueError(
            f"ampkit.optim.{cls} got differentiable=True; its step is not recorded by autograd: "
            f"use torch.optim.{cls}(differentiable=True)"
        )


def lr_for_kernel(lr: float | Tensor, device: torch.device) -> float | Tensor:
    """The learning rate as a kernel takes it: a tensor on the device, or a number."""
    if not isinstance(lr, Tensor):
        return lr
    value = host_value_or_none(lr.detach())
    return moved(lr, device) if value is None else value


def default_step_dtype() -> torch.dtype:
    """The dtype in which torch.optim counts steps on the host."""
    return torch.float64 if torch.get_default_dtype() is torch.float64 else torch.float32
