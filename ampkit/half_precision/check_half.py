"""check_half: run a model in float32 and in a 16-bit dtype, and compare the outputs of every module.

For single operators of a converted model there is `ampkit debug`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Container, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from ampkit.containers import map_tensors
from ampkit.dtypes import REAL_FLOATS, dtype_name, short
from ampkit.half_precision.half import BATCH_NORMS, Buffers, HalfPlan, Keep, checked_dtypes, float32_keys, half
from ampkit.text_tables import table

__all__ = ["HalfModule", "HalfReport", "check_half"]


class HalfModule(NamedTuple):
    """The outputs of one module in the 16-bit dtype, compared with the float32 outputs.

    Attributes:
        path: the module's path in the model.
        largest: the largest finite magnitude of its outputs in float32.
        input_error: the relative L2 error of its 16-bit inputs; NaN if the module ran in float32.
        error: the relative L2 error of its 16-bit outputs; inf if only the float32 outputs are finite.
        overflows: the number of 16-bit output elements that are inf or NaN and are finite in float32.
    """

    path: str
    largest: float
    input_error: float
    error: float
    overflows: int


@dataclass
class HalfReport:
    """The result of `check_half`; `str()` prints a table in the order in which modules returned.

    Attributes:
        dtype: the 16-bit type.
        error: the relative L2 error of the model's 16-bit output; inf if only the float32 output is finite.
        modules: a row for each module that ran.
        unfit: names of parameters that `dtype` cannot hold; the modules that own them ran in float32.
        rounded: names of converted buffers whose values `dtype` changes, masks excepted.
        too_large: paths of modules whose outputs `dtype` cannot hold.
        keep: paths to add to `keep_fp32`: the owners of `unfit`, the modules around the ones in `too_large`, and
            modules that overflow on finite inputs. An overflow hides later ones: check again with `keep` added.
        largest_input: the largest finite magnitude in the sample; if `dtype` cannot hold it, no `keep` helps.
    """

    dtype: torch.dtype
    error: float
    modules: list[HalfModule] = field(default_factory=list)
    unfit: list[str] = field(default_factory=list)
    rounded: list[str] = field(default_factory=list)
    too_large: list[str] = field(default_factory=list)
    keep: list[str] = field(default_factory=list)
    largest_input: float = 0.0

    def __str__(self) -> str:
        name, limit = dtype_name(self.dtype), torch.finfo(self.dtype).max
        rows = [("module", "largest", "error in", "error out", "overflows")]
        for path, largest, input_error, error, overflows in self.modules:
            rows.append((path or "(the model)", f"{largest:.3g}", f"{input_error:.2e}", f"{error:.2e}", str(overflows)))
        lines = [f"{name}: output error {self.error:.2e}", *table(rows, set(rows[0][1:]))]
        for found, names in (
            (f"parameters that {name} cannot hold", self.unfit),
            (f"buffers that {name} rounds", self.rounded),
            (f"outputs too large for {name}", self.too_large),
        ):
            lines += [f"{found}: {', '.join(names)}"] if names else []
        if self.largest_input > limit:
            lines.append(
                f"the largest input is {self.largest_input:.3g}, and the {name} maximum is {limit:.3g}; inputs are "
                "cast before any module runs, so keep_fp32 does not help: scale them down, or use bfloat16"
            )
        return "\n".join([*lines, f"to keep in float32: {', '.join(self.keep) or 'nothing'}"])


def check_half(
    model: Module,
    sample: Any,
    dtype: torch.dtype | str = torch.float16,
    keep_fp32: Keep | str = BATCH_NORMS,
    *,
    buffers: Buffers = "exact",
    in_region: bool = False,
) -> HalfReport:
    """Run a copy of a float32 model in float32 and one in `dtype` on a sample, and compare every module's outputs.

    Copies are in eval mode. Synchronizes with the device.

    Args:
        model: a float32 model; it is not changed.
        sample: a tuple of positional arguments, a mapping of keyword arguments, or one argument.
        dtype, keep_fp32, buffers, in_region: as of `half`.

    Returns:
        A `HalfReport`; print it. If "error out" is much larger than "error in", the module is imprecise. If "error
            in" is much larger than "error out" of the modules before, operators between them are imprecise.

    Raises:
        TypeError, ValueError, RuntimeError: as `half`, except that parameters which do not fit are reported.

    >>> report = check_half(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.ones(1, 4))
    >>> report.too_large, report.keep
    ([], [])
    """
    if isinstance(sample, torch.dtype) or isinstance(dtype, Tensor):
        raise TypeError(
            f"sample is {short(sample)} and dtype is a {type(dtype).__name__}; expected the sample first: "
            "check_half(model, sample, torch.float16)"
        )
    dtype, _ = checked_dtypes(model, dtype)
    keys, limit = float32_keys(keep_fp32), torch.finfo(dtype).max
    plan = HalfPlan(model, dtype, keys, buffers)
    outputs, calls = _run(copy.deepcopy(model), sample)
    owners = [name.rpartition(".")[0] for name in plan.unfit]
    error, in_half = math.inf, dict[str, _Calls]()
    if "" not in owners:  # nothing can keep parameters of the model itself
        converted = half(model, dtype, (*keys, *owners), buffers=buffers, in_region=in_region)
        outputs_in_half, in_half = _run(converted, sample)
        error, _ = _compared(outputs_in_half, outputs)
    rows = [_row(path, expected, in_half.get(path)) for path, expected in calls.items()]
    inside = {path for module, path in plan.in_float32.items() if module not in plan.outermost}
    too_large = [row.path for row in rows if row.largest > limit and row.path not in inside]
    fitting = {row.path for row in rows if row.largest <= limit}
    overflowing = [row.path for row in rows if row.overflows and in_half[row.path].finite_inputs]
    around = [_nearest(path, fitting) for path in (*too_large, *overflowing)]
    keep = [path for path in dict.fromkeys((*owners, *around)) if path]
    largest_input = _largest(_floats(sample))
    return HalfReport(dtype, error, rows, list(plan.unfit), plan.rounded, too_large, keep, largest_input)


@dataclass
class _Calls:
    """The floating-point inputs and outputs of one module's calls."""

    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)

    @property
    def finite_inputs(self) -> bool:
        return all(bool(tensor.isfinite().all()) for tensor in self.inputs)


def _run(model: Module, sample: Any) -> tuple[list[Tensor], dict[str, _Calls]]:
    """Return the outputs of a model in eval mode for a copy of the sample, and the calls of its modules by path."""
    calls: dict[str, _Calls] = {}

    def note(module: Module, args: Any, kwargs: Any, output: Any) -> None:
        of_module = calls.setdefault(paths[module], _Calls())
        of_module.inputs += [tensor.clone() for tensor in _floats((args, kwargs))]
        of_module.outputs += [tensor.clone() for tensor in _floats(output)]

    paths = {module: path for path, module in model.named_modules()}
    args, kwargs = ((), sample) if isinstance(sample, Mapping) else (sample, {})
    args = args if isinstance(args, tuple | list) else (args,)
    args, kwargs = copy.deepcopy((args, kwargs))  # forward may write to it
    with ExitStack() as hooks, torch.no_grad():
        for module in paths:
            hooks.callback(module.register_forward_hook(note, with_kwargs=True).remove)
        return _floats(model.eval()(*args, **kwargs)), calls


def _row(path: str, expected: _Calls, in_half: _Calls | None) -> HalfModule:
    largest = _largest(expected.outputs)
    if in_half is None:
        return HalfModule(path, largest, math.nan, math.nan, 0)
    input_error, _ = _compared(in_half.inputs, expected.inputs)
    return HalfModule(path, largest, input_error, *_compared(in_half.outputs, expected.outputs))


def _nearest(path: str, candidates: Container[str]) -> str:
    """Return the first candidate from this module outwards; "" if there is none but the model itself."""
    while path and path not in candidates:
        path = path.rpartition(".")[0]
    return path


def _largest(tensors: list[Tensor]) -> float:
    """Return the largest finite magnitude in some tensors."""
    finite = [tensor[tensor.isfinite()] for tensor in tensors]
    return max((float(values.abs().max()) for values in finite if values.numel()), default=0.0)


def _compared(outputs: list[Tensor], expected: list[Tensor]) -> tuple[float, int]:
    """Return the relative L2 error, inf if not finite, and the number of elements that are not finite.

    Elements that are not finite in float32 are omitted.
    """
    pairs = [(a.double().flatten(), b.double().flatten()) for a, b in zip(outputs, expected, strict=False)]
    pairs = [(a[b.isfinite()], b[b.isfinite()]) for a, b in pairs if a.shape == b.shape]
    distance, size = sum((a - b).square().sum() for a, b in pairs), sum(b.square().sum() for _, b in pairs)
    error = float(distance / size if size > 0 else distance) ** 0.5
    return error if math.isfinite(error) else math.inf, sum(int((~a.isfinite()).sum()) for a, _ in pairs)


def _floats(tree: Any) -> list[Tensor]:
    """Return the floating-point tensors in containers."""
    tensors: list[Tensor] = []
    map_tensors(tree, lambda tensor: tensors.append(tensor) or tensor)
    return [tensor for tensor in tensors if tensor.dtype in REAL_FLOATS]
