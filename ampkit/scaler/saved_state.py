"""A scaler's state as a checkpoint holds it. Every entry is converted and checked before anything is loaded."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ampkit.scaler import loss_scale as scales
from ampkit.scaler.history import COUNTS
from ampkit.scaler.loss_scale import DynamicLossScale, LossScale, ScaleState
from ampkit.user_code import warn_user

TORCH_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
OWN_KEY = "ampkit"
COUNTERS = ScaleState._fields[2:]
_DEFAULT = DynamicLossScale()
# Saved counts continue on the device, in int32 and int64: half of int32's range, and float64's, leave enough to
# continue.
_MOST_IN_A_ROW = 2**30
_MOST_IN_TOTAL = 2**53


def to_dict(
    rule: LossScale, scale: float, tracker: int, counters: Iterable[Tensor], totals: dict[str, int], norms: list[Any]
) -> dict[str, Any]:
    """Return a state as plain Python values: torch's entries, which its scaler loads, and ampkit's under one key."""
    return {
        "scale": scale,
        "growth_factor": rule.growth_factor,
        "backoff_factor": rule.backoff_factor,
        "growth_interval": rule.growth_interval,
        "_growth_tracker": tracker,
        OWN_KEY: {
            "loss_scale": scales.to_dict(rule),
            "counters": dict(zip(COUNTERS, map(int, counters), strict=True)),
            "totals": totals,
            "norms": norms,
        },
    }


@dataclass(frozen=True)
class Loadable:
    """A checked state: the strategy to continue with, the scale within its bounds, counters, counts and norms."""

    rule: LossScale
    scale: float
    growth_tracker: int
    counters: dict[str, int]
    totals: dict[str, int]
    norms: list[list[Any]]


def loadable(state_dict: Any, rule: LossScale) -> Loadable:
    """Return the state that `state_dict` describes, for a scaler with the strategy `rule`. Changes nothing.

    Warns about unknown entries, and about a strategy of another kind, whose numbers are ignored.

    Raises:
        RuntimeError: `state_dict` is empty, as from a disabled scaler.
        KeyError: entries are missing; the message names them.
        TypeError: an entry has another type.
        ValueError: a number is out of range, or one of ampkit's own entries is unknown to this version.
    """
    entries = _mapping(state_dict, "scaler")
    if not entries:
        raise RuntimeError(
            "The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler."
        )
    missing = [key for key in TORCH_KEYS if key not in entries]
    if "loss_scaler0" in entries:
        raise KeyError("the state dict was saved by Apex's amp; expected ampkit.amp.load_state_dict to load it")
    if missing:
        raise KeyError(f"the scaler's state dict has no {', '.join(map(repr, missing))}; expected {list(TORCH_KEYS)}")
    own = _mapping(entries.get(OWN_KEY, {}), OWN_KEY, ("loss_scale", "counters", "totals", "norms"))
    saved = scales.from_dict(_mapping(own["loss_scale"], "loss_scale")) if "loss_scale" in own else None
    base = next((strategy for strategy in (saved, rule) if isinstance(strategy, DynamicLossScale)), _DEFAULT)
    # Checks torch's three numbers, even if they are not used.
    dynamic = replace(base, **{name: entries[name] for name in TORCH_KEYS[1:4]})
    saved_scale = usable_scale(entries["scale"], "the saved scale")
    tracker = _whole(entries["_growth_tracker"], "_growth_tracker", _MOST_IN_A_ROW)
    counters = _counts(own.get("counters", {}), "counters", COUNTERS, _MOST_IN_A_ROW)
    totals = _counts(own.get("totals", {}), "totals", COUNTS, _MOST_IN_TOTAL)
    norms = _norms(own.get("norms", []))
    unknown = sorted(set(map(str, entries)) - {*TORCH_KEYS, OWN_KEY})
    if unknown:
        warn_user(f"ignored unknown entries in the scaler's state dict: {unknown}")
    if saved is not None and saved.kind != rule.kind:
        warn_user(f"the checkpoint was saved with {saved}; this scaler keeps {rule}, its own strategy")
    elif isinstance(rule, DynamicLossScale):
        rule = dynamic
    elif saved is not None:
        rule = saved
    scale = rule.init_scale
    if isinstance(rule, DynamicLossScale):
        scale = min(max(saved_scale, rule.min_scale), rule.max_scale)
    return Loadable(rule, scale, tracker, counters, totals, norms)


def usable_scale(value: Any, name: str) -> float:
    """Return the value as a float; `TypeError` or `ValueError` if it is not a number that can multiply losses."""
    number = scales.number(value, name)
    if not 0.0 < number <= sys.float_info.max:
        raise ValueError(f"{name} is {value}; expected a positive finite number: it multiplies every loss")
    return float(number)


def _whole(value: Any, name: str, most: int) -> int:
    """Return a saved count as an integer from 0 to `most`."""
    number = scales.number(value, f"the saved {name}")
    if number != number or not 0 <= number <= most or number != int(number):
        raise ValueError(f"the saved {name} is {value!r}; expected a whole number from 0 to {most}")
    return int(number)


def _counts(saved: Any, entry: str, known: Collection[str], most: int) -> dict[str, int]:
    """Return an entry that maps the names in `known` to counts."""
    return {name: _whole(value, f"{name} of {entry!r}", most) for name, value in _mapping(saved, entry, known).items()}


def _norms(saved: Any) -> list[list[Any]]:
    """For each optimizer the number of its parameters, of their elements, and its norms, for `TimesMedian`."""
    checked = []
    for optimizer in saved if isinstance(saved, list) else [saved]:
        if not isinstance(optimizer, list) or len(optimizer) != 3 or not isinstance(optimizer[2], list):
            raise TypeError(
                f"the saved 'norms' have {optimizer!r}; expected a list for each optimizer: the number of its "
                "parameters, of their elements, and a list of norms"
            )
        *size, norms = optimizer
        if not all(0.0 <= scales.number(norm, "a saved norm") <= scales.LARGEST_SCALE for norm in norms):
            raise ValueError("a saved norm in 'norms' is negative, inf or NaN; expected finite numbers from 0 up")
        checked.append([*(_whole(count, "size of 'norms'", _MOST_IN_TOTAL) for count in size), list(map(float, norms))])
    return checked


def _mapping(value: Any, name: str, known: Collection[str] | None = None) -> Mapping[Any, Any]:
    """Return the value, if it is a mapping; with `known`, one without other keys."""
    if not isinstance(value, Mapping):
        raise TypeError(f"the saved {name!r} is {value!r}; expected a dict, as GradScaler.state_dict() returns it")
    unknown = [] if known is None else sorted(map(str, set(value) - set(known)))
    if unknown:
        raise ValueError(
            f"the saved {name!r} has unknown entries {unknown}; expected {sorted(known or ())}: it may be from a "
            "newer ampkit"
        )
    return value
