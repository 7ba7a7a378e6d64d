"""What a scaler's `state_dict` may hold, converted and checked entry by entry before anything is loaded."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ampkit.scaler import loss_scale as scales
from ampkit.scaler.history import COUNTS
from ampkit.scaler.loss_scale import DynamicLossScale, LossScale, ScaleState
from ampkit.user_code import warn_user

TORCH_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
OWN_KEY = "ampkit"
COUNTERS = ScaleState._fields[2:]
_PLAIN = DynamicLossScale()
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
    norms: list[list[Any]]


def loadable(state_dict: Any, rule: LossScale) -> Loadable:
    """The state that `state_dict` describes, for a scaler with this strategy. Changes nothing.

    Warns about unknown entries, and about a strategy of another kind, whose numbers are ignored.

    Raises:
        RuntimeError: an empty dict, as a disabled scaler saves it.
        KeyError: missing entries, all of them named.
        TypeError: an entry of another type.
        ValueError: a number out of range, or an entry of ampkit's own that this version does not know.
    """
    given = _mapping(state_dict, "scaler")
    if not given:
        raise RuntimeError(
            "The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler."
        )
    missing = [key for key in TORCH_KEYS if key not in given]
    if "loss_scaler0" in given:
        raise KeyError("the scaler's state dict is that of Apex's amp; expected ampkit.amp.load_state_dict to load it")
    if missing:
        raise KeyError(f"the scaler's state dict has no {', '.join(map(repr, missing))}; expected {list(TORCH_KEYS)}")
    own = _mapping(given.get(OWN_KEY, {}), OWN_KEY, ("loss_scale", "counters", "totals", "norms"))
    saved = scales.from_dict(_mapping(own["loss_scale"], "loss_scale")) if "loss_scale" in own else None
    plain = {name: given[name] for name in TORCH_KEYS[1:4]}
    base = saved if isinstance(saved, DynamicLossScale) else rule if isinstance(rule, DynamicLossScale) else _PLAIN
    dynamic = replace(base, **plain)    # checks the three numbers, also where they are not used
    saved_scale = usable_scale(given["scale"], "the saved scale")
    tracker = _whole(given["_growth_tracker"], "_growth_tracker", _MOST_IN_A_ROW)
    counters = _counts(own.get("counters", {}), "counters", COUNTERS, _MOST_IN_A_ROW)
    totals = _counts(own.get("totals", {}), "totals", COUNTS, _MOST_IN_TOTAL)
    norms = _norms(own.get("norms", []))
    unknown = sorted(set(map(str, given)) - {*TORCH_KEYS, OWN_KEY})
    if unknown:
        warn_user(f"ignored unknown entries in the scaler's state dict: {unknown}")
    if saved is not None and saved.kind != rule.kind:
        warn_user(f"the checkpoint was saved with {saved}; this scaler keeps {rule}, as the script says")
    elif isinstance(rule, DynamicLossScale):
        rule = dynamic
    elif saved is not None:
        rule = saved
    scale = rule.init_scale
    if isinstance(rule, DynamicLossScale):
        scale = min(max(saved_scale, rule.min_scale), rule.max_scale)
    return Loadable(rule, scale, tracker, counters, totals, norms)


def usable_scale(value: Any, name: str) -> float:
    """The value, if it is a number that can multiply losses. Raises `TypeError` or `ValueError` where it is not."""
    number = scales.number(value, name)
    if not 0.0 < number <= sys.float_info.max:
        raise ValueError(f"{name} is {value}; expected a positive finite number: it multiplies every loss")
    return float(number)


def _whole(value: Any, name: str, most: int) -> int:
    number = scales.number(value, f"the saved {name}")
    if number != number or not 0 <= number <= most or number != int(number):
        raise ValueError(f"the saved {name} is {value!r}; expected a whole number from 0 to {most}")
    return int(number)


def _counts(saved: Any, what: str, known: Collection[str], most: int) -> dict[str, int]:
    return {name: _whole(value, f"{name} of {what!r}", most) for name, value in _mapping(saved, what, known).items()}


def _norms(saved: Any) -> list[list[Any]]:
    """For each optimizer the number of its parameters, of their elements, and its norms, for `TimesMedian`."""
    found = []
    for each in saved if isinstance(saved, list) else [saved]:
        if not isinstance(each, list) or len(each) != 3 or not isinstance(each[2], list):
            raise TypeError(
                f"the saved 'norms' have {each!r}; expected a list for each optimizer: the number of its parameters, "
                "of their elements, and a list of norms"
            )
        *size, norms = each
        if not all(0.0 <= scales.number(norm, "a saved norm") <= scales.LARGEST_SCALE for norm in norms):
            raise ValueError("the saved 'norms' have one that is negative, inf or NaN; expected finite ones from 0 on")
        found.append([*(_whole(count, "size of 'norms'", _MOST_IN_TOTAL) for count in size), list(map(float, norms))])
    return found


def _mapping(value: Any, name: str, known: Collection[str] | None = None) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"the saved {name!r} is {value!r}; expected a dict, as GradScaler.state_dict() returns it")
    unknown = [] if known is None else sorted(map(str, set(value) - set(known)))
    if unknown:
        raise ValueError(
            f"the saved {name!r} has unknown entries {unknown}; expected {sorted(known or ())}: it may come from a "
            "newer ampkit"
        )
    return value
