"""half: convert a model to float16 or bfloat16 that takes the same float32 inputs as before.

After `module.half()` the caller has to cast every input, batch norms lose the range of their statistics, rotary
frequencies lose their digits, and a mask of -1e9 becomes -inf. Here the model casts its inputs, chosen modules remain
in float32 with casts around them, buffers remain in float32 if 16 bits would change them, and parameters that do not
fit are found before anything changes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.nn import Module

from ampkit.containers import cast
from ampkit.dtypes import REAL_FLOATS, SIXTEEN_BIT, as_dtype, short
from ampkit.half_precision.boundary import Boundary, put_boundary, refuse_bounded, refuse_patched
from ampkit.policy.module_paths import is_container, is_scripted
from ampkit.policy.module_rules import matches
from ampkit.torch_private import BatchNorm, InstanceNorm, local_tensors

__all__ = ["BATCH_NORMS", "NORMS", "Buffers", "half"]

M = TypeVar("M", bound=Module)
Keep = Iterable[type[Module] | Module | str]
Buffers = Literal["exact", "all", "none"]

BATCH_NORMS: tuple[type[Module], ...] = (BatchNorm,)
"""Normalization with running statistics: a variance above 65504 does not fit float16. Its kernels take 16-bit inputs
with float32 weights, so that keeping it in float32 needs no casts of inputs."""

NORMS: tuple[type[Module], ...] = (
    BatchNorm,
    InstanceNorm,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)
"""All normalization modules of torch. Inputs are cast up, except for batch norms, and outputs are cast back."""

_MASKED = -1e4  # a mask adds a value of at least this size to scores, so that its rounding does not matter


def half(
    model: M,
    dtype: torch.dtype | str = torch.float16,
    keep_fp32: Keep | str = BATCH_NORMS,
    cast_outputs: torch.dtype | str | None = None,
    *,
    buffers: Buffers = "exact",
    in_place: bool = False,
    in_region: bool = False,
) -> M:
    """Convert the floating-point parameters of a model to `dtype`, and make it cast its inputs.

    The model is called as before, with float32 (or float64) tensors anywhere in lists, tuples, mappings and
    dataclasses, positional or by keyword; integers and bools are not cast. Tensors that forward makes from others
    (`x.new_zeros`, `torch.zeros_like(x)`) are then in `dtype`; for tensors made without a source (`torch.zeros(n)`) use
    `in_region`. Converting synchronizes with the device, forward does not.

    Args:
        model: a float32 model, which is copied. Parameters too large for `dtype` are an error.
        dtype: torch.float16 or torch.bfloat16, or its name.
        keep_fp32: modules that remain in float32, with inputs cast up and outputs cast back: module classes, modules,
            or path patterns of `Policy.for_modules` ("blocks.*.norm"); a ModuleList or ModuleDict stands for the
            modules in it. `ampkit.half_precision.half.NORMS` has all normalization classes.
        cast_outputs: a dtype, or its name, for floating-point outputs; None leaves them in `dtype`.
        buffers: the floating-point buffers to convert. "exact": masks, and buffers whose values `dtype` holds exactly;
            others, such as rotary frequencies, keep their dtype, and so do zeros and ones, which may be counters.
            "all": all of them. "none": none. Statistics of a norm always follow its weights. Elements too large for
            `dtype` become its largest finite value.
        in_place: convert `model` itself rather than a copy.
        in_region: run forward in an `ampkit.autocast` region of `dtype`, which casts float32 inputs of operators with
            16-bit weights, and computes softmax and losses in float32.

    Returns:
        The converted model. With `in_place` it is `model`, with the same parameter objects.

    Raises:
        TypeError: `model` is not a module, or a `keep_fp32` entry is of another type.
        ValueError: another dtype or `buffers`, a pattern that names no module, or a parameter that does not fit `dtype`
            or is tied between a float32 module and another.
        RuntimeError: the model is converted already, a module is scripted, or the forward of a converted or float32
            module was replaced on the instance. Nothing has been changed when it raises.

    >>> model = half(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), torch.bfloat16)
    >>> model(torch.ones(2, 4)).dtype, model[1].running_var.dtype
    (torch.bfloat16, torch.float32)
    """
    dtype, outputs = checked_dtypes(model, dtype, cast_outputs)
    keep = float32_keys(keep_fp32)
    if not in_place:
        memo: dict[int, Any] = {}
        model = copy.deepcopy(model, memo)
        keep = tuple(memo.get(id(key), key) for key in keep)  # the copy's modules
    plan = HalfPlan(model, dtype, keep, buffers)
    plan.require_fit()
    plan.carry_out()
    return put_boundary(model, Boundary(dtype, outputs, dtype if in_region else None, note=plan.note()))


def float32_keys(keep_fp32: Keep | str) -> tuple[Any, ...]:
    """Return `keep_fp32`, which may be one pattern, as a tuple; raise `TypeError` for keys of another type."""
    keep = (keep_fp32,) if isinstance(keep_fp32, str) else tuple(keep_fp32)
    for key in keep:
        is_class = isinstance(key, type) and issubclass(key, Module)
        if not isinstance(key, str | Module) and not is_class:
            raise TypeError(
                f"keep_fp32 holds {key!r}; expected module classes, modules or path patterns like 'blocks.*.norm'"
            )
    return keep


class HalfPlan:
    """The modules of a model to convert and to keep in float32, decided before any is changed.

    Attributes:
        in_float32: each module in float32, with its path; `outermost` are the ones that get casts.
        unfit: parameters to convert that `dtype` cannot hold, by name, each with its largest magnitude.
        unchanged: buffers of converted modules that are not converted, by name.
        rounded: names of buffers to convert whose values `dtype` changes, masks excepted.
    """

    def __init__(self, model: Module, dtype: torch.dtype, keep: tuple[Any, ...], buffers: str = "exact") -> None:
        if buffers not in get_args(Buffers):
            raise ValueError(f"buffers is {short(buffers)}; expected 'exact', 'all' or 'none'")
        self.dtype = dtype
        self.in_float32: dict[Module, str] = {}
        self.outermost: list[Module] = []
        used: set[int] = set()
        for path, module in model.named_modules():
            if is_scripted(module):
                raise RuntimeError(
                    f"module {path} is scripted or traced: TorchScript computes in the dtypes that it recorded; "
                    "convert the model before torch.jit.script"
                )
            matching = [index for index, key in enumerate(keep) if _matches(key, module, path)]
            used.update(matching)
            for called_path, called in _called_modules(path, module) if matching else ():
                if called not in self.in_float32:
                    refuse_patched(called)
                    self.outermost.append(called)
                    self.in_float32.update((inner, name) for name, inner in called.named_modules(prefix=called_path))
        for index, key in enumerate(keep):
            if index not in used and not isinstance(key, type):
                raise ValueError(_unused_message(model, key))
        self.converted = {module: path for path, module in model.named_modules() if module not in self.in_float32}
        self.unfit: dict[str, float] = {}
        self._check_parameters()
        self.unchanged: dict[str, Tensor] = {}
        self.rounded: list[str] = []
        self._choose_buffers(buffers)

    def _check_parameters(self) -> None:
        """Fill `unfit`, and refuse parameters that are tied between converted and float32 modules."""
        owners: dict[int, str] = {}
        for module, path in self.converted.items():
            for name, param in module.named_parameters(prefix=path, recurse=False):
                owners[id(param)] = name
                largest = _overflowing_magnitude(param, self.dtype)
                if largest is not None:
                    self.unfit[name] = largest
        for module, path in self.in_float32.items():
            for name, param in module.named_parameters(prefix=path, recurse=False):
                if id(param) in owners:
                    raise ValueError(
                        f"parameters {name} and {owners[id(param)]} are one tensor, and only one of them would "
                        f"remain in float32; name both their modules in keep_fp32, or neither"
                    )

    def _choose_buffers(self, buffers: str) -> None:
        """Fill `unchanged` and `rounded`."""
        for module, path in self.converted.items():
            is_norm = isinstance(module, BatchNorm | InstanceNorm)
            for name, buffer in module.named_buffers(prefix=path, recurse=False):
                if buffer.dtype in REAL_FLOATS and buffer.dtype is not self.dtype:
                    fits = _holds(self.dtype, buffer)
                    follows = buffers == "exact" and fits and not _may_count(buffer)
                    if not (is_norm or buffers == "all" or follows):
                        self.unchanged[name] = buffer
                    elif not fits:
                        self.rounded.append(name)

    def require_fit(self) -> None:
        """Raise `ValueError` that names the first parameter which does not fit."""
        if self.unfit:
            name, largest = next(iter(self.unfit.items()))
            raise ValueError(
                f"parameter {name} holds {largest:.4g}, and the maximum of {self.dtype} is "
                f"{torch.finfo(self.dtype).max:.4g}; keep its module in float32 with keep_fp32, or use bfloat16"
            )

    def note(self) -> str:
        """Return a hint for errors of mixed dtypes; "" if no buffer can promote a 16-bit tensor."""
        names = [f"{name} ({buffer.dtype})" for name, buffer in self.unchanged.items() if buffer.ndim]
        if not names:
            return ""
        return (
            f"these buffers were not converted, because {self.dtype} may change their values: "
            f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}; cast the result if one of them is "
            "combined with 16-bit tensors, or convert with buffers='all'"
        )

    def carry_out(self) -> None:
        """Convert the model, and put casts around the float32 modules."""
        unchanged = {id(buffer) for buffer in self.unchanged.values()}
        for module in self.converted:
            module._apply(lambda tensor: tensor if id(tensor) in unchanged else self._convert(tensor), recurse=False)
        for module in self.in_float32:
            module._apply(lambda tensor: cast(tensor, torch.float32), recurse=False)
        for module in self.outermost:
            # The kernels of batch norms take 16-bit inputs with float32 weights.
            inputs = None if isinstance(module, BatchNorm) else torch.float32
            put_boundary(module, Boundary(inputs, self.dtype, torch.float32, is_inner=True))

    def _convert(self, tensor: Tensor) -> Tensor:
        """Cast a parameter or buffer; finite elements that overflow become the largest finite value."""
        converted = cast(tensor, self.dtype)
        if converted is tensor or tensor.is_meta:
            return converted
        overflowed = torch.isinf(converted) & torch.isfinite(tensor)
        return torch.where(overflowed, torch.sign(converted) * torch.finfo(self.dtype).max, converted)


def _called_modules(path: str, module: Module) -> Iterator[tuple[str, Module]]:
    """Yield a module with its path, or for a container, which is never called, the modules in it."""
    if not is_container(module):
        yield path, module
        return
    for name, child in module.named_children():
        yield from _called_modules(f"{path}.{name}" if path else name, child)


def _matches(key: Any, module: Any, path: str) -> bool:
    if isinstance(key, str):
        return matches(key, path)
    if isinstance(key, type):
        return isinstance(module, key)
    return module is key


def _holds(dtype: torch.dtype, buffer: Tensor) -> bool:
    """Return whether `dtype` holds a buffer's values exactly, except for one large negative value, as in a mask."""
    values = local_tensors([buffer])[0].detach()
    if values.is_meta:
        return False
    inexact = values[(values.to(dtype) != values) & ~values.isnan()]
    return not inexact.numel() or bool((inexact == inexact[0]).all() & (inexact[0] <= _MASKED))


def _may_count(buffer: Tensor) -> bool:
    """Return whether a buffer holds zeros only or ones only, as counters and averages do before training."""
    return bool(buffer.numel()) and bool((buffer == 0).all() | (buffer == 1).all())


def _overflowing_magnitude(param: Tensor, dtype: torch.dtype) -> float | None:
    """Return the largest finite magnitude in a parameter if `dtype` cannot hold it, otherwise None."""
    local = local_tensors([param])[0].detach()
    if local.is_meta or local.dtype not in REAL_FLOATS or local.dtype is dtype or not local.numel():
        return None
    largest = local.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max()
    return float(largest) if torch.isinf(largest.to(dtype)) else None


def _unused_message(model: Module, key: Any) -> str:
    if isinstance(key, Module):
        return f"keep_fp32 holds a {type(key).__name__} that is not part of this {type(model).__name__}"
    names = [path for path, _ in model.named_modules() if path]
    return (
        f"keep_fp32 pattern {key!r} names no module of this {type(model).__name__}; its modules are "
        f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
    )


def checked_dtypes(model: Any, dtype: Any, cast_outputs: Any = None) -> tuple[torch.dtype, torch.dtype | None]:
    """Return `dtype` and `cast_outputs`, which may be names, as dtypes; raise as `half` for the model and both."""
    low_dtype, outputs = as_dtype(dtype), as_dtype(cast_outputs)
    if not isinstance(model, Module):
        raise TypeError(f"half takes an nn.Module, got {type(model).__name__}")
    if low_dtype not in SIXTEEN_BIT:
        raise ValueError(f"dtype is {short(dtype)}; expected torch.float16, torch.bfloat16 or the name of one")
    if outputs is not None and outputs not in REAL_FLOATS:
        raise ValueError(f"cast_outputs is {cast_outputs!r}; expected a dtype such as torch.float32, its name, or None")
    refuse_bounded(model)
    return low_dtype, outputs
