"""check_half: which modules to keep in float32 when a model is converted to half precision, found by trying.

A copy is converted with one more module kept, and runs on a sample: the error of its output is what counts. What single
operators of a converted model do, `debugging.find_nonfinite` and `compare_precision` show.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from ampkit.containers import REAL_FLOATS, map_tensors
from ampkit.whole_model.half import BATCH_NORMS, HalfPlan, Keep, half, kept_keys

__all__ = ["HalfModule", "HalfReport", "check_half"]

# Of the output with these modules kept; fills a dict with the magnitudes that `_called` notes.
Error = Callable[[Sequence[str], dict[str, float]], float]
_LEAST_GAIN = 1 / 3     # of two modules that round alike, keeping either one takes 0.29 off the error


class HalfModule(NamedTuple):
    """A module: the largest magnitude that it returns in float32, and the output's error with it kept there.

    `kept_error` is None where that was not tried, and inf where `half` refuses it: one of two tied weights.
    """

    path: str
    largest: float
    kept_error: float | None


@dataclass
class HalfReport:
    """What `check_half` found. `str()` is a table in the order in which modules returned.

    `error` is the relative L2 error of the model's output in half, inf where that is inf or NaN and float32's is not.
    `unfit` names parameters that the dtype cannot hold, `too_large` modules whose outputs it cannot carry. `keep` is
    what to add to `keep_fp32`: the owners of `unfit`, modules around what is `too_large` (where there is none, use
    bfloat16), and modules whose own operators make a third of the error; `kept_error` is the error that is left.
    """

    dtype: torch.dtype
    error: float
    kept_error: float
    modules: list[HalfModule] = field(default_factory=list)
    unfit: list[str] = field(default_factory=list)
    too_large: list[str] = field(default_factory=list)
    keep: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        width = max(len(row.path or "(the model)") for row in self.modules)
        lines = [f"{name}: output error {self.error:.2e}"]
        lines.append(f"{'module':<{width}}  {'largest':>9}  output error with it in float32")
        for path, largest, kept_error in self.modules:
            error = "" if kept_error is None else f"  {kept_error:.2e}"
            lines.append(f"{path or '(the model)':<{width}}  {largest:>9.3g}{error}")
        if self.unfit:
            lines.append(f"parameters that {name} cannot hold: {', '.join(self.unfit)}")
        if self.too_large:
            lines.append(f"outputs that {name} cannot carry: {', '.join(self.too_large)}")
        then = f" (output error {self.error:.2e} -> {self.kept_error:.2e})" if self.keep else ""
        lines.append(f"worth keeping in float32: {', '.join(self.keep) or 'nothing'}{then}")
        return "\n".join(lines)


def check_half(
    model: Module,
    sample: Any,
    dtype: torch.dtype = torch.float16,
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
    keys, limits = kept_keys(keep_fp32), torch.finfo(dtype)
    plan = HalfPlan(model, dtype, keys)
    largest: dict[str, float] = {}
    expected = _called(copy.deepcopy(model), sample, largest)

    def error(keep: Sequence[str], found: dict[str, float]) -> float:
        try:
            low = half(model, dtype, (*keys, *keep), in_region=in_region)
        except ValueError:      # one of two tied weights
            return math.inf
        return _distance(_called(low, sample, found), expected)

    keep = list(dict.fromkeys(path for name in plan.unfit if (path := name.rpartition(".")[0])))
    before = error(keep, {})
    while (path := _overflowing(error, keep, largest, limits.max)) and path not in keep:
        keep.append(path)
    tried, after = _keep_what_helps(error, keep, list(largest), limits.eps)
    inside = {path for module, path in plan.kept.items() if module not in plan.outermost}
    too_large = [path for path, most in largest.items() if limits.max < most < math.inf and path not in inside]
    modules = [HalfModule(path, most, tried.get(path)) for path, most in largest.items()]
    return HalfReport(dtype, before, after, modules, list(plan.unfit), too_large, keep)


def _overflowing(error: Error, keep: Sequence[str], largest: Mapping[str, float], limit: float) -> str:
    """The module where something overflows first, or the nearest around it that returns what fits; "" for none.

    A module returns 16 bits even when it is kept, so what is too large for that has to stay inside of a kept one.
    """
    found: dict[str, float] = {}
    if error(keep, found) < math.inf:
        return ""
    path = next((path for path, most in found.items() if most == math.inf and largest.get(path) != math.inf), "")
    while path and largest.get(path, math.inf) > limit:
        path = path.rpartition(".")[0]
    return path


def _keep_what_helps(
    error: Error, keep: list[str], paths: list[str], enough: float
) -> tuple[dict[str, float], float]:
    """Add to `keep` the modules whose own operators make a third of the error or more, the worst first.

    Returns the errors with one module kept beside those that `keep` began with, and the error that is left.
    """
    tried: dict[str, float] = {}
    left = error(keep, {})
    while enough < left < math.inf:
        paths = [path for path in paths if path and not any(f"{path}.".startswith(f"{kept}.") for kept in keep)]
        errors = {path: error([*keep, path], {}) for path in paths}
        tried = tried or errors
        gains = {"": 0.0}
        for path, after in errors.items():
            if after <= (1 - _LEAST_GAIN) * left:
                # What the modules in it gain by themselves is not its own.
                has_modules = any(other.startswith(f"{path}.") for other in paths)
                gains[path] = (error([*keep, f"{path}.**"], {}) if has_modules else left) - after
        best = max(gains, key=gains.__getitem__)
        if gains[best] < _LEAST_GAIN * left:
            break
        keep.append(best)
        left = errors[best]
    return tried, left


def _called(model: Module, sample: Any, largest: dict[str, float]) -> list[Tensor]:
    """The floating-point tensors that a model returns for a copy of the sample, in eval mode.

    `largest` gets the largest magnitude that each module returned, in the order of first returns; inf for one that made
    inf or NaN of finite inputs.
    """

    def note(path: str, module: Module, args: Any, kwargs: Any, output: Any) -> None:
        most = max(map(_magnitude, _floats(output)), default=0.0)
        if most == math.inf and any(_magnitude(tensor) == math.inf for tensor in _floats((args, kwargs))):
            most = 0.0
        largest[path] = max(largest.get(path, 0.0), most)

    args, kwargs = ((), sample) if isinstance(sample, Mapping) else (sample, {})
    args = args if isinstance(args, tuple | list) else (args,)
    args, kwargs = copy.deepcopy((args, kwargs))        # forward may write to it
    with ExitStack() as hooks, torch.no_grad():
        for path, module in model.named_modules():
            hooks.callback(module.register_forward_hook(partial(note, path), with_kwargs=True).remove)
        return _floats(model.eval()(*args, **kwargs))


def _magnitude(tensor: Tensor) -> float:
    most = float(tensor.abs().max()) if tensor.numel() else 0.0
    return math.inf if math.isnan(most) else most


def _distance(got: list[Tensor], expected: list[Tensor]) -> float:
    """The relative L2 error; inf for what is not finite. Where float32 is not, nothing is compared."""
    pairs = [(a.double().flatten(), b.double().flatten()) for a, b in zip(got, expected, strict=False)]
    pairs = [(a[b.isfinite()], b[b.isfinite()]) for a, b in pairs if a.shape == b.shape]
    distance, size = sum((a - b).square().sum() for a, b in pairs), sum(b.square().sum() for _, b in pairs)
    error = float(distance / size if size > 0 else distance) ** 0.5
    return error if math.isfinite(error) else math.inf


def _floats(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(value, lambda tensor: found.append(tensor) or tensor)
    return [tensor for tensor in found if tensor.dtype in REAL_FLOATS]
