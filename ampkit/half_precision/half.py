"""half: convert a model to float16 or bfloat16 that takes the same float32 inputs as before.

After `module.half()` the caller has to cast every input, batch norms lose the range of their statistics, and a mask of
-1e9 becomes -inf. Here the model casts its inputs, chosen modules stay in float32 with casts around them, and
parameters that do not fit are found before anything changes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import Module

from ampkit.containers import cast
from ampkit.dtypes import REAL_FLOATS, SIXTEEN_BIT, as_dtype, short
from ampkit.half_precision.boundary import Boundary, keep_in_float32, put_boundary, refuse_bounded, refuse_patched
from ampkit.policy.module_paths import is_container, is_scripted
from ampkit.policy.module_rules import matches
from ampkit.torch_private import BatchNorm, InstanceNorm

__all__ = ["BATCH_NORMS", "NORMS", "half"]

M = TypeVar("M", bound=Module)
Keep = Iterable[type[Module] | Module | str]

BATCH_NORMS: tuple[type[Module], ...] = (BatchNorm,)
"""Normalization with running statistics: a variance above 65504 does not fit float16. Its kernels take 16-bit inputs
beside float32 weights, so that keeping it in float32 needs no casts of inputs."""

NORMS: tuple[type[Module], ...] = (
    BatchNorm,
    InstanceNorm,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)
"""All normalization modules of torch. Inputs are cast up, except those of batch norms, and outputs are cast back."""


def half(
    model: M,
    dtype: torch.dtype | str = torch.float16,
    keep_fp32: Keep | str = BATCH_NORMS,
    cast_outputs: torch.dtype | str | None = None,
    *,
    in_place: bool = False,
    in_region: bool = False,
) -> M:
    """Convert the floating-point parameters and buffers of a model to `dtype`, and make it cast its inputs.

    The model is called as before, with float32 (or float64) tensors anywhere in lists, tuples, mappings and
    dataclasses, positional or by keyword; integers and bools are not cast. Tensors that forward makes from others
    (`x.new_zeros`, `torch.zeros_like(x)`) are then in `dtype`; for tensors made without a source (`torch.zeros(n)`) use
    `in_region`. Converting synchronizes with the device, forward does not.

    Args:
        model: a float32 model, which is copied. Elements of buffers too large for `dtype`, such as masks of -1e9, are
            set to its largest finite value; parameters too large are an error.
        dtype: torch.float16 or torch.bfloat16, or its name.
        keep_fp32: modules that stay in float32, with inputs cast up and outputs cast back: module classes, modules, or
            path patterns of `Policy.for_modules` ("blocks.*.norm"); a ModuleList or ModuleDict stands for the modules
            in it. `ampkit.half_precision.half.NORMS` has all normalization classes.
        cast_outputs: a dtype, or its name, for floating-point outputs; None leaves them in `dtype`.
        in_place: convert `model` itself rather than a copy.
        in_region: run forward in an `ampkit.autocast` region of `dtype`, which casts float32 tensors that meet 16-bit
            weights, and computes softmax and losses in float32.

    Returns:
        The converted model. With `in_place` it is `model`, with the same parameter objects.

    Raises:
        TypeError: `model` is not a module, or a `keep_fp32` entry is of another type.
        ValueError: another dtype; a pattern that names no module; a scripted module to keep, or a batch norm in one; a
            parameter that does not fit `dtype`, or is tied between a kept module and another.
        RuntimeError: the model is converted already or scripted, or the forward of a converted or kept module was
            replaced on the instance. Nothing has been changed when it raises.

    >>> model = half(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), torch.bfloat16)
    >>> model(torch.ones(2, 4)).dtype, model[1].running_var.dtype
    (torch.bfloat16, torch.float32)
    """
    dtype, outputs = checked_dtypes(model, dtype, cast_outputs)
    keep = kept_keys(keep_fp32)
    if not in_place:
        memo: dict[int, Any] = {}
        require_grad = [param.requires_grad for _, param in model.named_parameters(remove_duplicate=False)]
        with torch.no_grad():  # else parameters of a scripted module's copy are not leaves
            model = copy.deepcopy(model, memo)
        for (_, param), requires_grad in zip(model.named_parameters(remove_duplicate=False), require_grad, strict=True):
            param.requires_grad_(requires_grad)
        keep = tuple(memo.get(id(key), key) for key in keep)  # the copy's modules
    plan = HalfPlan(model, dtype, keep)
    plan.require_fit()
    plan.carry_out()
    return put_boundary(model, Boundary(dtype, outputs, dtype if in_region else None))


def kept_keys(keep_fp32: Keep | str) -> tuple[Any, ...]:
    """`keep_fp32`, which may be one pattern, as a tuple; raises `TypeError` for keys of another type."""
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

    `unfit` has the parameters to convert that `dtype` cannot hold, by name, each with its largest magnitude.
    """

    def __init__(self, model: Module, dtype: torch.dtype, keep: tuple[Any, ...]) -> None:
        self.dtype = dtype
        self.kept: dict[Module, str] = {}
        self.outermost: list[Module] = []
        used: set[int] = set()
        for path, module in model.named_modules():
            matching = [index for index, key in enumerate(keep) if _matches(key, module, path)]
            used.update(matching)
            for called_path, called in _called_modules(path, module) if matching else ():
                if called not in self.kept:
                    if is_scripted(called):
                        raise ValueError(_scripted_message(called_path, called))
                    refuse_patched(called)
                    self.outermost.append(called)
                    self.kept.update((inner, name) for name, inner in called.named_modules(prefix=called_path))
        for index, key in enumerate(keep):
            if index not in used and not isinstance(key, type):
                raise ValueError(_unused_message(model, key))
        self.converted = {module: path for path, module in model.named_modules() if module not in self.kept}
        self.unfit: dict[str, float] = {}
        self._check_parameters()

    def _check_parameters(self) -> None:
        """Fill `unfit`, and refuse parameters that are tied between converted and kept modules."""
        owners: dict[int, str] = {}
        for module, path in self.converted.items():
            for name, param in module.named_parameters(prefix=path, recurse=False):
                owners[id(param)] = name
                largest = _overflowing_magnitude(param, self.dtype)
                if largest is not None:
                    self.unfit[name] = largest
        for module, path in self.kept.items():
            for name, param in module.named_parameters(prefix=path, recurse=False):
                if id(param) in owners:
                    raise ValueError(
                        f"parameters {name} and {owners[id(param)]} are one tensor, and only one of them would "
                        f"stay in float32; name both their modules in keep_fp32, or neither"
                    )

    def require_fit(self) -> None:
        """Raise `ValueError` that names the first parameter which does not fit."""
        if self.unfit:
            name, largest = next(iter(self.unfit.items()))
            raise ValueError(
                f"parameter {name} holds {largest:.4g}; {self.dtype} ends at {torch.finfo(self.dtype).max:.4g}; "
                f"keep its module in float32 with keep_fp32, or use bfloat16"
            )

    def carry_out(self) -> None:
        """Convert the model, and put casts around the kept modules."""
        for module in self.converted:
            module._apply(self._convert, recurse=False)
        for module in self.kept:
            module._apply(lambda tensor: cast(tensor, torch.float32), recurse=False)
        for module in self.outermost:
            keep_in_float32(module, self.dtype)

    def _convert(self, tensor: Tensor) -> Tensor:
        """Cast a parameter or buffer; finite elements that overflow become the largest finite value."""
        converted = cast(tensor, self.dtype)
        if converted is tensor or tensor.is_meta:
            return converted
        overflowed = torch.isinf(converted) & torch.isfinite(tensor)
        return torch.where(overflowed, torch.sign(converted) * torch.finfo(self.dtype).max, converted)


def _called_modules(path: str, module: Module) -> Iterator[tuple[str, Module]]:
    """A module with its path, or for a container, which is never called, the modules in it."""
    if not is_container(module):
        yield path, module
        return
    for name, child in module.named_children():
        yield from _called_modules(f"{path}.{name}" if path else name, child)


def _matches(key: Any, module: Any, path: str) -> bool:
    if isinstance(key, str):
        return matches(key, path)
    if isinstance(key, type):
        if not is_scripted(module):
            return key in type(module).__mro__
        # TorchScript keeps only the name of a class.
        original = getattr(torch.nn, module.original_name, type(module))
        return key in original.__mro__ or module.original_name == key.__name__
    return module is key


def _scripted_message(path: str, module: Any) -> str:
    return (
        f"keep_fp32 names {path!r}, a {module.original_name} that TorchScript runs; nothing can be cast around it. "
        "Convert the model before torch.jit.script, or keep a module around it, or leave it out of "
        "keep_fp32 (of amp.initialize, keep_batchnorm_fp32=False)"
    )


def _overflowing_magnitude(param: Tensor, dtype: torch.dtype) -> float | None:
    """The largest finite magnitude in a parameter if `dtype` cannot hold it, else None."""
    local: Tensor = getattr(param, "_local_tensor", param).detach()  # a DTensor's shard
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
    """`dtype` and `cast_outputs`, which may be names, as dtypes; raises as `half` for the model and both."""
    low_dtype, outputs = as_dtype(dtype), as_dtype(cast_outputs)
    if not isinstance(model, Module):
        raise TypeError(f"half takes an nn.Module, got {type(model).__name__}")
    if low_dtype not in SIXTEEN_BIT:
        raise ValueError(f"dtype is {short(dtype)}; expected torch.float16, torch.bfloat16 or the name of one")
    if outputs is not None and outputs not in REAL_FLOATS:
        raise ValueError(f"cast_outputs is {cast_outputs!r}; expected a dtype such as torch.float32, its name, or None")
    refuse_bounded(model)
    return low_dtype, outputs
