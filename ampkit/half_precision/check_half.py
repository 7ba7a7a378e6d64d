"""check_half: which modules to keep in float32 when a model is converted to half precision, found by trying.

A copy is converted with one more module kept, and runs on a sample: the error of its output is what counts. What single
operators of a converted model do, `debugging.find_nonfinite` and `compare_precision` show.
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

__all__ = ["HalfModule", "HalfReport", "check_half"]

_LEAST_GAIN = 1 / 3     # of two modules that round alike, keeping either one takes 0.29 off the error


class HalfModule(NamedTuple):
    """A module, and what it returns in half beside what it returns in float32.

    `largest` is the largest finite magnitude in float32, `error` the relative L2 error in half, with what came in (NaN
    where the module did not run), `overflows` counts what is inf or NaN in half alone. `kept_error` is the error of the
    model's output with this module in float32 too; None where that was not tried, inf where `half` refuses it: one of
    two tied weights.
    """

    path: str
    largest: float
    error: float
    overflows: int
    kept_error: float | None


@dataclass
class HalfReport:
    """What `check_half` found. `str()` is a table in the order in which modules returned.

    `error` is the relative L2 error of the model's output in half, inf where that is inf or NaN and float32's is not.
    `unfit` names parameters that the dtype cannot hold, `too_large` modules whose outputs it cannot carry. `keep` is
    what to add to `keep_fp32`: the owners of `unfit`, modules around what is `too_large` (where there is none, use
    bfloat16), and modules whose own operators make a third of the error; `kept_error` is the error that is left.
    `largest_input` is the largest finite magnitude in the sample: where `dtype` cannot hold it, no `keep` helps.
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
        width = max(len(row.path or "(the model)") for row in self.modules)
        lines = [f"{name}: output error {self.error:.2e}"]
        lines.append(f"{'module':<{width}}  {'largest':>9}  {'error':>9}  overflows  output error with it in float32")
        for path, largest, error, overflows, kept_error in self.modules:
            kept = "" if kept_error is None else f"  {kept_error:.2e}"
            lines.append(f"{path or '(the model)':<{width}}  {largest:>9.3g}  {error:>9.2e}  {overflows:>9}{kept}")
        if self.unfit:
            lines.append(f"parameters that {name} cannot hold: {', '.join(self.unfit)}")
        if self.too_large:
            lines.append(f"outputs that {name} cannot carry: {', '.join(self.too_large)}")
        limit = torch.finfo(self.dtype).max
        if self.largest_input > limit:
            lines.append(
                f"the sample holds {self.largest_input:.3g} and {name} ends at {limit:.3g}: the inputs are cast before "
                "any module runs, kept ones too; scale them down first, or use bfloat16"
            )
        then = f" (output error {self.error:.2e} -> {self.kept_error:.2e})" if self.keep else ""
        lines.append(f"worth keeping in float32: {', '.join(self.keep) or 'nothing'}{then}")
        return "\n".join(lines)


def check_half(
    model: Module,
    sample: Any,
    dtype: torch.dtype | str = torch.float16,
    keep_fp32: Keep | str = BATCH_NORMS,
    *,
    in_region: bool = False,
) -> HalfReport:
    """Run copies of a float32 model in float32 and in half on a sample, in eval mode, and try what to keep in float32.

    Args:
        model: stays as it is.
        sample: what to call it with: a tuple of positional arguments, a mapping of keyword arguments, or one argument.
        dtype, keep_fp32, in_region: as of `half`.

    Returns:
        A `HalfReport`; print it, or call `half` with its `keep` added to `keep_fp32`.

    Raises:
        What `half` raises, apart from parameters that do not fit: they are reported.

    Reads the device. While the error is above the dtype's `eps`, it converts and runs a copy for each module, and again
    after each module that it proposes.

    >>> report = check_half(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.ones(1, 4))
    >>> report.too_large, report.keep
    ([], [])
    """
    _require_order(sample, dtype)
    dtype, _ = checked_dtypes(model, dtype)
    keys, limits = kept_keys(keep_fp32), torch.finfo(dtype)
    plan = HalfPlan(model, dtype, keys)
    can_be_kept = {path for path, module in model.named_modules() if not is_scripted(module)}
    expected: dict[str, _Calls] = {}
    output = _called(copy.deepcopy(model), sample, expected)

    def error(keep: Sequence[str], calls: dict[str, _Calls] | None = None) -> float:
        try:
            low = half(model, dtype, (*keys, *keep), in_region=in_region)
        except ValueError:      # one of two tied weights
            return math.inf
        return _compared(_called(low, sample, calls), output)[0]

    owners = (_around(name.rpartition(".")[0], can_be_kept) for name in plan.unfit)
    keep = list(dict.fromkeys(path for path in owners if path))
    low: dict[str, _Calls] = {}
    before = error(keep, low)
    largest = {path: max(map(_magnitude, calls.outputs), default=0.0) for path, calls in expected.items()}
    fit = {path for path, most in largest.items() if most <= limits.max and path in can_be_kept}
    found = low
    while (path := _overflowing(found, expected, fit)) and path not in keep:
        keep.append(path)
        error(keep, found := {})
    tried, after = _keep_what_helps(error, keep, [path for path in expected if path in can_be_kept], limits.eps)
    inside = {path for module, path in plan.kept.items() if module not in plan.outermost}
    too_large = [path for path, most in largest.items() if most > limits.max and path not in inside]
    modules = [_row(path, most, low, expected, tried) for path, most in largest.items()]
    largest_input = max(map(_magnitude, _floats(sample)), default=0.0)
    return HalfReport(dtype, before, after, modules, list(plan.unfit), too_large, keep, largest_input)


def _row(
    path: str, largest: float, low: Mapping[str, _Calls], expected: Mapping[str, _Calls], tried: Mapping[str, float]
) -> HalfModule:
    compared = _compared(low[path].outputs, expected[path].outputs) if path in low else (math.nan, 0)
    return HalfModule(path, largest, *compared, tried.get(path))


def _require_order(sample: Any, dtype: Any) -> None:
    if isinstance(sample, torch.dtype) or isinstance(dtype, Tensor):
        raise TypeError(
            f"sample is {short(sample)} and dtype is a {type(dtype).__name__}; expected the sample first: "
            "check_half(model, sample, torch.float16)"
        )


@dataclass
class _Calls:
    """What the calls of one module returned, and whether all that they took was finite."""

    outputs: list[Tensor] = field(default_factory=list)
    took_finite: bool = True


def _overflowing(
    found: Mapping[str, _Calls], expected: Mapping[str, _Calls], places: Container[str]
) -> str:
    """The nearest of `places` around the module where something overflows first, that module included; "" for none.

    A module returns 16 bits even when it is kept, so what is too large for that has to stay inside of a kept one.
    """
    for path, calls in found.items():
        if path in expected and calls.took_finite and _compared(calls.outputs, expected[path].outputs)[1]:
            return _around(path, places)
    return ""


def _around(path: str, places: Container[str]) -> str:
    """The nearest of `places` from this module outwards; "" for none, or for the model itself."""
    while path and path not in places:
        path = path.rpartition(".")[0]
    return path


def _keep_what_helps(
    error: Callable[[Sequence[str]], float], keep: list[str], paths: list[str], enough: float
) -> tuple[dict[str, float], float]:
    """Add to `keep` the modules whose own operators make a third of the error or more, the worst first.

    Returns the errors with one module kept beside those that `keep` began with, and the error that is left.
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
                # What the modules in it gain by themselves is not its own.
                has_modules = any(other.startswith(f"{path}.") for other in paths)
                gains[path] = (error([*keep, f"{path}.**"]) if has_modules else left) - after
        best = max(gains, key=gains.__getitem__)
        if gains[best] < _LEAST_GAIN * left:
            break
        keep.append(best)
        left = errors[best]
    return tried, left


def _called(model: Module, sample: Any, calls: dict[str, _Calls] | None = None) -> list[Tensor]:
    """The floating-point tensors that a model returns for a copy of the sample, in eval mode.

    `calls` gets those of each module, in the order in which modules first returned.
    """

    paths = {module: path for path, module in model.named_modules()}

    def note(module: Module, args: Any, kwargs: Any, output: Any) -> None:
        if calls is not None:
            known = calls.setdefault(paths[module], _Calls())
            known.outputs += [tensor.clone() for tensor in _floats(output)]
            known.took_finite &= all(bool(tensor.isfinite().all()) for tensor in _floats((args, kwargs)))

    def note_scripted(module: Module, args: Any, output: Any) -> None:
        if is_scripted(module) and module in paths:
            note(module, args, {}, output)

    args, kwargs = ((), sample) if isinstance(sample, Mapping) else (sample, {})
    args = args if isinstance(args, tuple | list) else (args,)
    args, kwargs = copy.deepcopy((args, kwargs))        # forward may write to it
    with ExitStack() as hooks, torch.no_grad():
        if calls is not None:
            for module in paths:
                if not is_scripted(module):     # TorchScript refuses hooks of a module's own
                    hooks.callback(module.register_forward_hook(note, with_kwargs=True).remove)
            # Without keyword arguments: torch never takes the note of a global hook that asks for them back.
            hooks.callback(register_module_forward_hook(note_scripted).remove)
        return _floats(model.eval()(*args, **kwargs))


def _magnitude(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _compared(got: list[Tensor], expected: list[Tensor]) -> tuple[float, int]:
    """The relative L2 error, inf where it is not finite, and the count of those elements.

    Where float32 is not finite, nothing is compared.
    """
    pairs = [(a.double().flatten(), b.double().flatten()) for a, b in zip(got, expected, strict=False)]
    pairs = [(a[b.isfinite()], b[b.isfinite()]) for a, b in pairs if a.shape == b.shape]
    distance, size = sum((a - b).square().sum() for a, b in pairs), sum(b.square().sum() for _, b in pairs)
    error = float(distance / size if size > 0 else distance) ** 0.5
    return error if math.isfinite(error) else math.inf, sum(int((~a.isfinite()).sum()) for a, _ in pairs)


def _floats(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(value, lambda tensor: found.append(tensor) or tensor)
    return [tensor for tensor in found if tensor.dtype in REAL_FLOATS]
