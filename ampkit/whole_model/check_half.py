"""check_half: what converting a model to half precision does to its numbers, module by module.

A float32 copy and a half copy run on the same sample (`half_comparison`); what is worth keeping is found by trying it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import Module

from ampkit.containers import REAL_FLOATS
from ampkit.whole_model.half import BATCH_NORMS, Keep, half
from ampkit.whole_model.half_comparison import Comparison, Found
from ampkit.whole_model.half_report import HalfReport, ModuleError

__all__ = ["HalfReport", "ModuleError", "check_half"]

_HELPS = 2 / 3          # of the error that is left when that share of the model no longer rounds
_AS_GOOD = 1.25         # a part in place of the whole: so many times its error


def check_half(
    model: Module,
    sample: Any,
    dtype: torch.dtype = torch.float16,
    keep_fp32: Keep | str = BATCH_NORMS,
    *,
    in_region: bool = False,
    trials: int = 100,
) -> HalfReport:
    """Run copies of a float32 model in float32 and in half on a sample, in eval mode, and compare every module.

    Args:
        model: stays as it is.
        sample: what to call it with: a tuple of positional arguments, a mapping of keyword arguments, or one.
        dtype, keep_fp32, in_region: as of `half`.
        trials: how many forwards finding out what is worth keeping may take at most; 0: do not try.

    Returns:
        A `HalfReport`; print it, or call `half` with its `keep` added to `keep_fp32`.

    Raises:
        What `half` raises, apart from parameters that do not fit: they are reported. ValueError: negative `trials`.

    Reads the device, and holds the outputs of every module in float32.

    >>> report = check_half(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.ones(1, 4))
    >>> report.overflows, report.keep
    (False, [])
    """
    if trials < 0:
        raise ValueError(f"trials is {trials}; expected how many forwards may be run to find what to keep, or 0")
    args, kwargs = _arguments(sample)
    plain = copy.deepcopy(model).eval()
    keep = (keep_fp32,) if isinstance(keep_fp32, str) else tuple(keep_fp32)
    unfit = _unfit_parameters(model, dtype, keep)
    owners = {name: name.rpartition(".")[0] for name in unfit}
    halved = half(model, dtype, _in(model, (*keep, *(model.get_submodule(path) for path in owners.values()))),
                  in_region=in_region).eval()
    comparison = Comparison(plain, halved, dtype, args, kwargs)
    first = comparison.found()
    report = HalfReport(dtype, list(first.modules.values()), first.output, unfit, _too_large(first, dtype))
    keep_more, error = _kept_for_range(comparison, first, dtype)
    if error > torch.finfo(dtype).eps or not math.isfinite(error):
        error = _keep_what_helps(comparison, first, keep_more, error, trials)
    report.keep = list(dict.fromkeys([*keep_more, *(path for path in owners.values() if path)]))
    report.kept_error = error if keep_more else None
    return report


def _too_large(found: Found, dtype: torch.dtype) -> list[str]:
    """Modules that make what `dtype` cannot carry; those after them that break as well are not at fault."""
    limit = torch.finfo(dtype).max
    return [path for path, module in found.modules.items() if module.own_overflows and module.largest > limit]


def _kept_for_range(comparison: Comparison, found: Found, dtype: torch.dtype) -> tuple[list[str], float]:
    """What to keep so that no inf or NaN is made, with the output's error then.

    A module hands on `dtype` even when kept, so for an output too large for that it is the nearest enclosing module
    whose own output is not. What lies behind shows once that is kept.
    """
    keep: list[str] = []
    limit = torch.finfo(dtype).max
    while True:
        more = []
        for path in [path for path, module in found.modules.items() if module.own_overflows]:
            while path and found.modules[path].largest > limit:
                path = path.rpartition(".")[0]
                while path and path not in found.modules:      # a container that is not called
                    path = path.rpartition(".")[0]
            if path and path not in keep:
                more.append(path)
        if not more:
            return keep, found.output.error
        keep += dict.fromkeys(more)
        found = comparison.found(keep)


def _keep_what_helps(comparison: Comparison, found: Found, keep: list[str], error: float, trials: int) -> float:
    """Add to `keep` the modules that cut the output's error by more than their share, one by one; returns what is left.

    Of roundings that add up like random numbers, a share `s` of the modules makes the share `sqrt(s)` of the error. A
    module is worth keeping if at most two thirds are left of what would be without it by that rule.
    """
    spent = 0

    def tried(path: str) -> float:
        nonlocal spent
        spent += 1
        left = comparison.error((*keep, path))
        return math.inf if math.isnan(left) else left

    def fair(path: str) -> float:
        share = found.share(path)
        return math.sqrt(1 - share) if share < 1 or path in found.called_by else 1.0    # all that there is: no rule

    eps = torch.finfo(comparison.dtype).eps
    error = math.inf if math.isnan(error) else error
    while error > eps and spent < trials:
        left: dict[str, float] = {}
        for path in found.parts(""):
            if spent < trials and path not in keep and fair(path):
                left[path] = tried(path)
        worth = {path: value for path, value in left.items() if value <= _HELPS * error * fair(path)}
        if not worth:
            break
        best = min(worth, key=lambda path: worth[path] / fair(path))
        error = worth[best]
        while spent < trials:
            inside = {path: tried(path) for path in found.called_by.get(best, ())}
            if not inside or min(inside.values()) > _AS_GOOD * error:
                break
            best = min(inside, key=lambda path: inside[path])
            error = inside[best]
        keep.append(best)
    return error


def _unfit_parameters(model: Module, dtype: torch.dtype, keep: tuple[Any, ...]) -> list[str]:
    limit = torch.finfo(dtype).max
    kept_types = tuple(key for key in keep if isinstance(key, type))
    found = []
    for name, param in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        if param.dtype in REAL_FLOATS and param.numel() and not isinstance(owner, kept_types):
            largest = param.detach().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max()
            if torch.isinf(largest.to(dtype)) and float(largest) > limit:
                found.append(name)
    return found


def _in(model: Module, keep: tuple[Any, ...]) -> tuple[Any, ...]:
    """Without the model itself, which a parameter directly on it would name."""
    return tuple(key for key in keep if key is not model)


def _arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(sample, Mapping):
        return (), dict(sample)
    return (tuple(sample), {}) if isinstance(sample, tuple | list) else ((sample,), {})
