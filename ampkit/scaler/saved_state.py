"""What a scaler's `state_dict` may hold, converted and checked entry by entry before anything is loaded."""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ampkit.scaler import loss_scale as scales
from ampkit.scaler.history import COUNTS
from ampkit.scaler.loss_scale import DynamicLossScale, LossScale, ScaleState
from ampkit.user_warnings import warn_user

TORCH_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
OWN_KEY = "ampkit"
COUNTERS = ScaleState._fields[2:]
_VERSION = 1
_INT64 = 2**63 - 1
# Counting continues from these, in int32 and int64 on the device: half of the range, or float64's, leaves room.
_MOST_IN_A_ROW = 2**30
_MOST_IN_TOTAL = 2**53


@dataclass(frozen=True)
class Loadable:
    """A saved state, checked: the strategy to go on with, the scale within its bounds, and counts."""

    rule: LossScale
    scale: float
    growth_tracker: int
    counters: dict[str, int]
    totals: dict[str, int]


def loadable(state_dict: Any, rule: LossScale) -> Loadable:
    """The state that `state_dict` describes, for a scaler with this strategy. Changes nothing.

    Warns about unknown entries, and about a strategy of another kind, whose numbers are ignored.

    Raises:
        RuntimeError: an empty dict, as a disabled scaler saves it.
        KeyError: missing entries, all of them named.
        TypeError: an entry of another type.
        ValueError: a number out of range, or an entry of ampkit's own that this version does not know.
    """
    given = _mapping(state_dict, "the scaler's state dict")
    if not given:
        raise RuntimeError(
            "The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler."
        )
    missing = [key for key in TORCH_KEYS if key not in given]
    if missing:
        raise KeyError(f"the scaler's state dict has no {', '.join(map(repr, missing))}; expected {list(TORCH_KEYS)}")
    own = _mapping(given.get(OWN_KEY, {}), f"the saved {OWN_KEY!r}")
    _refuse_unknown(own, ("version", "loss_scale", "counters", "totals"), OWN_KEY)
    version = own.get("version", _VERSION)
    if type(version) is not int or version != _VERSION:
        raise ValueError(f"the saved 'version' is {version!r}; expected {_VERSION}: a newer ampkit may have written it")
    saved_rule = None
    if "loss_scale" in own:
        saved_rule = scales.from_dict(_mapping(own["loss_scale"], "the saved 'loss_scale'"))
    saved_scale = number(given["scale"], "the saved scale")
    plain = {
        "growth_factor": number(given["growth_factor"], "the saved growth_factor"),
        "backoff_factor": number(given["backoff_factor"], "the saved backoff_factor"),
        "growth_interval": _whole(given["growth_interval"], "the saved growth_interval", -_INT64 - 1, _INT64),
    }
    tracker = _whole(given["_growth_tracker"], "the saved _growth_tracker", 0, _MOST_IN_A_ROW)
    counters = _counts(own.get("counters", {}), "counters", COUNTERS, _MOST_IN_A_ROW)
    totals = _counts(own.get("totals", {}), "totals", COUNTS, _MOST_IN_TOTAL)
    unknown = sorted(set(map(str, given)) - {*TORCH_KEYS, OWN_KEY})
    if unknown:
        warn_user(f"ignored unknown entries in the scaler's state dict: {unknown}")
    rule = _with_saved_numbers(rule, saved_rule, plain)
    scale = rule.init_scale
    if isinstance(rule, DynamicLossScale):
        scale = min(max(usable_scale(saved_scale, "the saved scale"), rule.min_scale), rule.max_scale)
    return Loadable(rule, scale, tracker, counters, totals)


def _with_saved_numbers(rule: LossScale, saved: LossScale | None, plain: dict[str, Any]) -> LossScale:
    """This strategy with the saved numbers: torch's `plain` ones, and those of the `saved` strategy if there is one."""
    if saved is not None and saved.kind != rule.kind:
        warn_user(f"the checkpoint was saved with {saved}; this scaler keeps {rule}, as the script says")
        return rule
    if not isinstance(rule, DynamicLossScale):
        return rule if saved is None else saved
    return replace(saved if isinstance(saved, DynamicLossScale) else rule, **plain)


def usable_scale(value: float, name: str) -> float:
    """The value, if it can multiply losses. Raises `ValueError` where it cannot."""
    if not (math.isfinite(value) and value > 0.0):
        raise ValueError(f"{name} is {value}; expected a positive finite number: it multiplies every loss")
    return value


def number(value: Any, name: str) -> float:
    """A real number, given as such or as a one-element tensor, as a float. Raises `TypeError` for anything else."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r}; expected a number")
    try:
        return float(value)
    except OverflowError:  # an integer beyond float64
        return math.copysign(math.inf, bool(value > 0) - 0.5)  # pyright: ignore[reportOperatorIssue]


def _whole(value: Any, name: str, least: int, most: int) -> int:
    as_float = number(value, name)
    exact = int(value) if math.isfinite(as_float) else None
    if exact is None or exact != value or not least <= exact <= most:
        raise ValueError(f"{name} is {value!r}; expected a whole number from {least} to {most}")
    return exact


def _counts(saved: Any, what: str, known: Collection[str], most: int) -> dict[str, int]:
    counts = _mapping(saved, f"the saved {what!r}")
    _refuse_unknown(counts, known, what)
    return {name: _whole(value, f"the saved {name} of {what!r}", 0, most) for name, value in counts.items()}


def _mapping(value: Any, name: str) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} is {value!r}; expected a dict, as GradScaler.state_dict() returns it")
    return value


def _refuse_unknown(given: Mapping[Any, Any], known: Collection[str], where: str) -> None:
    unknown = sorted(map(str, set(given) - set(known)))
    if unknown:
        raise ValueError(
            f"the saved {where!r} has unknown entries {unknown}; expected {sorted(known)}: it may come from a newer "
            "ampkit"
        )
