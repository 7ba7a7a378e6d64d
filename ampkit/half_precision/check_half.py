"""check_half: find by trial which modules to keep in float32 when a model is converted to half precision.

Copies of the model, each with one more module kept, run on a sample, and the errors of their outputs are compared. For
single operators of a converted model there are `debugging.examine`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_hook

from ampkit.containers import map_tensors
from ampkit.dtypes import REAL_FLOATS, dtype_name, short
from ampkit.half_precision.half import BATCH_NORMS, HalfPlan, Keep, checked_dtypes, half, kept_keys
from ampkit.policy.module_paths import is_scripted
from ampkit.text_tables import table

__all__ = ["HalfModule", "HalfReport", "check_half"]

_LEAST_GAIN = 1 / 3  # more than 0.29, the gain of keeping either of two modules with equal errors


class HalfModule(NamedTuple):
    """The outputs of one module in half precision compared with those in float32.

    Attributes:
        path: the module's path in the model.
        largest: the largest finite magnitude in float32.
        error: the relative L2 error in half, errors of the inputs included; NaN if the module did not run.
        overflows: the number of elements that are inf or NaN in half but not in float32.
        kept_error: the error of the model's output with this module in float32 too; None if that was not tried, inf if
            `half` refuses it because a weight is tied to another module's.
    """

    path: str
    largest: float
    error: float
    overflows: int
    kept_error: float | None


@dataclass
class HalfReport:
    """The result of `check_half`; `str()` prints a table in the order in which modules returned.

    Attributes:
        dtype: the 16-bit type.
        error: the relative L2 error of the model's output in half; inf if it is inf or NaN where float32's is finite.
        kept_error: the error with `keep` in float32.
        modules: a row for each module that ran.
        unfit: names of parameters that `dtype` cannot hold.
        too_large: paths of modules whose outputs `dtype` cannot hold.
        keep: paths to add to `keep_fp32`: the owners of `unfit`, modules around those of `too_large` (use bfloat16 if
            there are none), and modules whose own operators make a third of the error.
        largest_input: the largest finite magnitude in the sample; if `dtype` cannot hold it, no `keep` helps.
    """

    dtype: torch.dtype
    error: float
    kept_error: float
    modules: list[HalfModule] = field(default_factory=list)
    unfit: list[str] = field(default_factory=list)
    too_large: list[str] = field(default_factory=list)
    keep: list[str] = field(default_factory=list)
    largest_input: float = 0.0

    def __str__(self) -> str:
        name = dtype_name(self.dtype)
        rows = [("module", "largest", "error", "overflows", "output error with it in float32")]
        for path, largest, error, overflows, kept_error in self.modules:
            kept = "" if kept_error is None else f"{kept_error:.2e}"
            rows.append((path or "(the model)", f"{largest:.3g}", f"{error:.2e}", str(overflows), kept))
        lines = [f"{name}: output error {self.error:.2e}", *table(rows, {"largest", "error", "overflows"})]
        if self.unfit:
            lines.append(f"parameters that {name} cannot hold: {', '.join(self.unfit)}")
        if self.too_large:
            lines.append(f"outputs too large for {name}: {', '.join(self.too_large)}")
        limit = torch.finfo(self.dtype).max
        if self.largest_input > limit:
            lines.append(
                f"the sample holds {self.largest_input:.3g}, and {name} ends at {limit:.3g}; inputs are cast before "
                "any module runs, also before kept modules: scale them down, or use bfloat16"
            )
        gain = f" (output error {self.error:.2e} -> {self.kept_error:.2e})" if self.keep else ""
        lines.append(f"worth keeping in float32: {', '.join(self.keep) or 'nothing'}{gain}")
        return "\n".join(lines)


def check_half(
    model: Module,
    sample: Any,
    dtype: torch.dtype | str = torch.float16,
    keep_fp32: Keep | str = BATCH_NORMS,
    *,
    in_region: bool = False,
) -> HalfReport:
    """Run copies of a float32 model in float32 and half on a sample, and try which modules to keep in float32.

    Copies are in eval mode. While the error is above the dtype's `eps`, a copy is converted and run for each module,
    and again after each module that is proposed. Synchronizes with the device.

    Args:
        model: a float32 model; it is not changed.
        sample: a tuple of positional arguments, a mapping of keyword arguments, or one argument.
        dtype, keep_fp32, in_region: as of `half`.

    Returns:
        A `HalfReport`; print it, or call `half` with its `keep` added to `keep_fp32`.

    Raises:
        TypeError, ValueError, RuntimeError: as `half`, except that parameters which do not fit are reported.

    >>> report = check_half(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.ones(1, 4))
    >>> report.too_large, report.keep
    ([], [])
    """
    _refuse_swapped(sample, dtype)
    dtype, _ = checked_dtypes(model, dtype)
    keys, limits = kept_keys(keep_fp32), torch.finfo(dtype)
    plan = HalfPlan(model, dtype, keys)
    can_be_kept = {path for path, module in model.named_modules() if not is_scripted(module)}
    expected: dict[str, _Calls] = {}
    output = _run(copy.deepcopy(model), sample, expected)

    def error(keep: Sequence[str], calls: dict[str, _Calls] | None = None) -> float:
        try:
            converted = half(model, dtype, (*keys, *keep), in_region=in_region)
        except ValueError:  # a kept weight is tied to one that is not
            return math.inf
        return _compared(_run(converted, sample, calls), output)[0]

    owners = (_nearest(name.rpartition(".")[0], can_be_kept) for name in plan.unfit)
    keep = list(dict.fromkeys(path for path in owners if path))
    in_half: dict[str, _Calls] = {}
    before = error(keep, in_half)
    largest = {path: max(map(_magnitude, calls.outputs), default=0.0) for path, calls in expected.items()}
    fit = {path for path, magnitude in largest.items() if magnitude <= limits.max and path in can_be_kept}
    calls = in_half
    while (path := _overflowing(calls, expected, fit)) and path not in keep:
        keep.append(path)
        calls = {}
        error(keep, calls)
    tried, after = _keep_what_helps(error, keep, [path for path in expected if path in can_be_kept], limits.eps)
    inside = {path for module, path in plan.kept.items() if module not in plan.outermost}
    too_large = [path for path, magnitude in largest.items() if magnitude > limits.max and path not in inside]
    modules = [_row(path, magnitude, in_half, expected, tried) for path, magnitude in largest.items()]
    largest_input = max(map(_magnitude, _floats(sample)), default=0.0)
    return HalfReport(dtype, before, after, modules, list(plan.unfit), too_large, keep, largest_input)


def _row(
    path: str, largest: float, in_half: Mapping[str, _Calls], expected: Mapping[str, _Calls], tried: Mapping[str, float]
) -> HalfModule:
    error, overflows = math.nan, 0
    if path in in_half:
        error, overflows = _compared(in_half[path].outputs, expected[path].outputs)
    return HalfModule(path, largest, error, overflows, tried.get(path))


def _refuse_swapped(sample: Any, dtype: Any) -> None:
    """Raise `TypeError` for a dtype in the place of the sample, or a tensor in that of the dtype."""
    if isinstance(sample, torch.dtype) or isinstance(dtype, Tensor):
        raise TypeError(
            f"sample is {short(sample)} and dtype is a {type(dtype).__name__}; expected the sample first: "
            "check_half(model, sample, torch.float16)"
        )


@dataclass
class _Calls:
    """The outputs of one module's calls, and whether all inputs were finite."""

    outputs: list[Tensor] = field(default_factory=list)
    finite_inputs: bool = True


def _overflowing(in_half: Mapping[str, _Calls], expected: Mapping[str, _Calls], candidates: Container[str]) -> str:
    """The nearest candidate at or around the first module that overflows; "" if there is none.

    A kept module returns 16 bits too, so a value too large for them has to stay inside a kept module.
    """
    for path, calls in in_half.items():
        if path in expected and calls.finite_inputs and _compared(calls.outputs, expected[path].outputs)[1]:
            return _nearest(path, candidates)
    return ""


def _nearest(path: str, candidates: Container[str]) -> str:
    """The first candidate from this module outwards; "" if there is none but the model itself."""
    while path and path not in candidates:
        path = path.rpartition(".")[0]
    return path


def _keep_what_helps(
    error: Callable[[Sequence[str]], float], keep: list[str], paths: list[str], enough: float
) -> tuple[dict[str, float], float]:
    """Add to `keep` the modules whose own operators make a third of the error or more, the worst first.

    Returns the error for each module kept beside the initial `keep`, and the error with the final `keep`.
    """
    tried: dict[str, float] = {}
    left = error(keep)
    while enough < left < math.inf:
        paths = [path for path in paths if path and not any(f"{path}.".startswith(f"{kept}.") for kept in keep)]
        errors = {path: error([*keep, path]) for path in paths}
        tried = tried or errors
        gains = {"": 0.0}
        for path, after in errors.items():
            if after <= (1 - _LEAST_GAIN) * left:
                # The gain of keeping the modules inside it is not its own.
                has_modules = any(other.startswith(f"{path}.") for other in paths)
                gains[path] = (error([*keep, f"{path}.**"]) if has_modules else left) - after
        best = max(gains, key=gains.__getitem__)
        if gains[best] < _LEAST_GAIN * left:
            break
        keep.append(best)
        left = errors[best]
    return tried, left


def _run(model: Module, sample: Any, calls: dict[str, _Calls] | None = None) -> list[Tensor]:
    """The floating-point outputs of a model in eval mode for a copy of the sample.

    `calls` is filled with those of each module, in the order in which modules first returned.
    """
    paths = {module: path for path, module in model.named_modules()}

    def note(module: Module, args: Any, kwargs: Any, output: Any) -> None:
        if calls is not None:
            module_calls = calls.setdefault(paths[module], _Calls())
            module_calls.outputs += [tensor.clone() for tensor in _floats(output)]
            module_calls.finite_inputs &= all(bool(tensor.isfinite().all()) for tensor in _floats((args, kwargs)))

    def note_scripted(module: Module, args: Any, output: Any) -> None:
        if is_scripted(module) and module in paths:
            note(module, args, {}, output)

    args, kwargs = ((), sample) if isinstance(sample, Mapping) else (sample, {})
    args = args if isinstance(args, tuple | list) else (args,)
    args, kwargs = copy.deepcopy((args, kwargs))  # forward may write to it
    with ExitStack() as hooks, torch.no_grad():
        if calls is not None:
            for module in paths:
                if not is_scripted(module):  # which would refuse the hook
                    hooks.callback(module.register_forward_hook(note, with_kwargs=True).remove)
            # Without keyword arguments: torch does not clean up after global hooks that take them.
            hooks.callback(register_module_forward_hook(note_scripted).remove)
        return _floats(model.eval()(*args, **kwargs))


def _magnitude(tensor: Tensor) -> float:
    """The largest finite magnitude in a tensor."""
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _compared(outputs: list[Tensor], expected: list[Tensor]) -> tuple[float, int]:
    """The relative L2 error, inf if not finite, and the number of elements that are not finite.

    Elements that are not finite in float32 are left out.
    """
    pairs = [(a.double().flatten(), b.double().flatten()) for a, b in zip(outputs, expected, strict=False)]
    pairs = [(a[b.isfinite()], b[b.isfinite()]) for a, b in pairs if a.shape == b.shape]
    distance, size = sum((a - b).square().sum() for a, b in pairs), sum(b.square().sum() for _, b in pairs)
    error = float(distance / size if size > 0 else distance) ** 0.5
    return error if math.isfinite(error) else math.inf, sum(int((~a.isfinite()).sum()) for a, _ in pairs)


def _floats(tree: Any) -> list[Tensor]:
    """The floating-point tensors in containers."""
    tensors: list[Tensor] = []
    map_tensors(tree, lambda tensor: tensors.append(tensor) or tensor)
    return [tensor for tensor in tensors if tensor.dtype in REAL_FLOATS]
