"""Loss-scale strategies: how a scale reacts to overflow, as pure arithmetic on tensors.

A strategy is a frozen dataclass of settings. A `ScaleState` of 0-d tensors holds everything that changes from update to
update. `next_state` maps one state to the next without reading a value, so nothing here synchronizes. `GradScaler` has
one state and writes each next one into the same tensors, whose addresses CUDA graphs replay.

The rule (Micikevicius et al. 2018, section 3.2) is torch's own operator, with bounds, and with Megatron-LM's
hysteresis: the first overflows after growth leave the scale as it is.
"""

from __future__ import annotations

import numbers
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ampkit.torch_private import update_scale_

SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32. Reciprocals of all scales from here on are finite."""

LARGEST_SCALE = torch.finfo(torch.float32).max

_RANGE = f"a number from {SMALLEST_SCALE:.3g} to {LARGEST_SCALE:.3g}: a scale of 0 or inf destroys gradients"


class ScaleState(NamedTuple):
    """The state of a strategy between updates: 0-d tensors on one device, `scale` float32, the others int32.

    Args:
        scale: the loss scale.
        growth_tracker: updates without overflow since the last overflow or growth.
        hysteresis_left: overflows until the scale backs off, that one included.
    """

    scale: Tensor
    growth_tracker: Tensor
    hysteresis_left: Tensor


def number(argument: Any, name: str, *, whole: bool = False) -> float:
    """Return a real number, or the one in a one-element tensor, as a Python number; `TypeError` for anything else."""
    value: Any = argument.item() if isinstance(argument, Tensor) and argument.numel() == 1 else argument
    if isinstance(value, bool) or not isinstance(value, numbers.Integral if whole else numbers.Real):
        raise TypeError(f"{name} is {value!r}; expected a {'whole number' if whole else 'number'}")
    plain: Any = value
    if isinstance(plain, int | float):
        return plain
    return int(plain) if whole else float(plain)


def to_python_numbers(strategy: Any) -> None:
    """Convert a dataclass's fields to Python numbers; `TypeError` if one is not a number or an int is not whole."""
    for setting in fields(strategy):
        value = number(getattr(strategy, setting.name), setting.name, whole=setting.type == "int")
        object.__setattr__(strategy, setting.name, value)  # the dataclass is frozen


class _LossScale:
    """The rule that all strategies share, with the numbers that each has as attributes."""

    def init(self: Any, device: torch.device | str, *, scale: float | None = None, **counters: int) -> ScaleState:
        """Return a first state.

        Args:
            device: where to make its tensors.
            scale: the scale to begin with; None: `init_scale`.
            counters: other entries of `ScaleState` to begin with, by name; without them `hysteresis_left` is
                `hysteresis`, and `growth_tracker` 0.
        """
        first = self.init_scale if scale is None else scale
        start = {"hysteresis_left": self.hysteresis, **counters}
        return ScaleState(
            torch.full((), first, dtype=torch.float32, device=device),
            *(torch.full((), start.get(name, 0), dtype=torch.int32, device=device) for name in ScaleState._fields[1:]),
        )

    def next_state(self: Any, state: ScaleState, found_inf: Tensor) -> ScaleState:
        """Return the state after one update. Never synchronizes.

        Args:
            state: the state before the update.
            found_inf: a flag, nonzero (or NaN) after an overflow.
        """
        scale, tracker, left = state.scale.clone(), state.growth_tracker.clone(), state.hysteresis_left
        update_scale_(scale, tracker, found_inf, self.growth_factor, self.backoff_factor, self.growth_interval)
        overflow = found_inf != 0
        scale = torch.where(overflow & (left > 1), state.scale, scale).clamp(self.min_scale, self.max_scale)
        granted = torch.where(tracker == 0, self.hysteresis, left)  # 0 without an overflow: the scale has grown
        left = torch.where(overflow, (left - 1).clamp(min=1), granted)
        return ScaleState(scale, tracker, left.to(torch.int32))


@dataclass(frozen=True)
class DynamicLossScale(_LossScale):
    """A scale that shrinks on overflow and grows after a number of updates without overflow.

    Args:
        init_scale: first scale.
        growth_factor: multiplies the scale after `growth_interval` updates without overflow; 1: it never grows.
        backoff_factor: multiplies the scale after an overflow; 1: it never backs off.
        growth_interval: updates in a row without overflow before the scale grows; 0: it never grows, as in torch.
        min_scale: the scale never falls below it.
        max_scale: the scale never grows above it. Growth to inf never happens.
        hysteresis: overflows until the scale backs off, that one included; 1: on the first. Every overflow skips its
            step. After growth the scale again tolerates `hysteresis` - 1 overflows (Megatron-LM).

    Raises:
        TypeError: an argument is not a number, or `growth_interval` or `hysteresis` is not an integer.
        ValueError: an argument is out of range.

    >>> scale = DynamicLossScale(init_scale=8.0, growth_interval=1)
    >>> state = scale.init("cpu")
    >>> float(scale.next_state(state, torch.tensor(1.0)).scale)
    4.0
    >>> float(scale.next_state(state, torch.tensor(0.0)).scale)
    16.0
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = SMALLEST_SCALE
    max_scale: float = LARGEST_SCALE
    hysteresis: int = 1

    kind: ClassVar[str] = "dynamic"
    scales_losses: ClassVar[bool] = True

    def __post_init__(self) -> None:
        to_python_numbers(self)
        low, high = self.min_scale, self.max_scale
        for name, is_right, expected in (
            ("growth_factor", 1.0 <= self.growth_factor <= sys.float_info.max, "a finite number of 1 or more"),
            ("backoff_factor", 0.0 < self.backoff_factor <= 1.0, "a number above 0, at most 1"),
            ("growth_interval", -(2**63) <= self.growth_interval < 2**63, "a number that fits 64 bits"),
            ("min_scale", SMALLEST_SCALE <= low <= LARGEST_SCALE, _RANGE),
            ("max_scale", low <= high <= LARGEST_SCALE, f"a number from min_scale ({low}) to {LARGEST_SCALE:.3g}"),
            ("init_scale", low <= self.init_scale <= high, f"a number from min_scale ({low}) to max_scale ({high})"),
            ("hysteresis", 1 <= self.hysteresis <= 2**30, "1 (no hysteresis) or more, at most 2**30"),
        ):
            if not is_right:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected {expected}")

    @property
    def stuck_scale(self) -> float:
        """The scale at which overflows have another reason than the scale: 2**-14, or a `min_scale` above it."""
        return max(self.min_scale, 2.0**-14)


@dataclass(frozen=True)
class StaticLossScale(_LossScale):
    """A constant scale; overflowing steps are still skipped.

    Args:
        scale: the scale, positive and finite in float32.

    Raises:
        TypeError: `scale` is not a number.
        ValueError: `scale` is out of range.

    >>> StaticLossScale(128.0).init_scale
    128.0
    """

    scale: float

    kind: ClassVar[str] = "static"
    scales_losses: ClassVar[bool] = True
    # The dynamic rule with these numbers never changes the scale. torch's scaler loads them from a checkpoint.
    growth_factor: ClassVar[float] = 1.0
    backoff_factor: ClassVar[float] = 1.0
    growth_interval: ClassVar[int] = 2**31 - 1
    min_scale: ClassVar[float] = SMALLEST_SCALE
    max_scale: ClassVar[float] = LARGEST_SCALE
    hysteresis: ClassVar[int] = 1

    def __post_init__(self) -> None:
        to_python_numbers(self)
        if not SMALLEST_SCALE <= self.scale <= LARGEST_SCALE:
            raise ValueError(f"scale is {self.scale}; expected {_RANGE}")

    @property
    def init_scale(self) -> float:
        """The scale, by the dynamic rule's name."""
        return self.scale


@dataclass(frozen=True)
class NoOpLossScale(StaticLossScale):
    """No scaling: losses are unchanged; steps with non-finite gradients are still skipped.

    For training in bfloat16 and float32.

    >>> NoOpLossScale().init_scale
    1.0
    """

    scale: float = field(default=1.0, init=False, repr=False)

    kind: ClassVar[str] = "noop"
    scales_losses: ClassVar[bool] = False


LossScale = DynamicLossScale | StaticLossScale
_KINDS: dict[str, type[LossScale]] = {cls.kind: cls for cls in (DynamicLossScale, StaticLossScale, NoOpLossScale)}


def checked(strategy: LossScale | None) -> LossScale:
    """Return the strategy, or for None the default one; `TypeError` for anything else."""
    if strategy is not None and type(strategy) not in _KINDS.values():
        inherits = " of a subclass, whose rule a checkpoint could not restore" * isinstance(strategy, LossScale)
        raise TypeError(
            f"loss_scale is {strategy!r}{inherits}; expected DynamicLossScale(), StaticLossScale(scale) or "
            "NoOpLossScale()"
        )
    return DynamicLossScale() if strategy is None else strategy


def from_numbers(strategy: LossScale | None, torchs_numbers: tuple[float, float, float, int]) -> LossScale:
    """Return the strategy of a scaler that was made with a strategy or with torch's four numbers.

    Raises:
        TypeError: a strategy of another class, or a value that is not a number.
        ValueError: both a strategy and numbers, or a number out of range.
        AssertionError: growth_factor <= 1 or backoff_factor >= 1, as in torch.
    """
    if strategy is not None:
        default = checked(None)
        if torchs_numbers != (
            default.init_scale,
            default.growth_factor,
            default.backoff_factor,
            default.growth_interval,
        ):
            raise ValueError(
                f"got loss_scale={strategy} together with init_scale, growth_factor, backoff_factor or "
                "growth_interval; expected one or the other: set the numbers on the strategy"
            )
        return checked(strategy)
    _, growth_factor, backoff_factor, _ = torchs_numbers
    # AssertionError as in torch: code may catch it.
    if not number(growth_factor, "growth_factor") > 1.0:
        raise AssertionError(f"The growth factor must be > 1.0; got {growth_factor}.")
    if not number(backoff_factor, "backoff_factor") < 1.0:
        raise AssertionError(f"The backoff factor must be < 1.0; got {backoff_factor}.")
    return DynamicLossScale(*torchs_numbers)


def _settings(cls: type[LossScale]) -> list[str]:
    """Return the names of a strategy's arguments, which a checkpoint saves."""
    return [setting.name for setting in fields(cls) if setting.init]


def to_dict(strategy: LossScale) -> dict[str, Any]:
    """Return a strategy as plain Python values, for a checkpoint."""
    return {"kind": strategy.kind, **{name: getattr(strategy, name) for name in _settings(type(strategy))}}


def from_dict(saved: Mapping[str, Any]) -> LossScale:
    """Return the strategy that `to_dict` described.

    Raises:
        TypeError: an argument is not a number, or `growth_interval` or `hysteresis` is not an integer.
        ValueError: the kind is unknown, fields are missing or unknown to this version, or one is out of range.
    """
    values = dict(saved)
    kind = values.pop("kind", None)
    cls = _KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise ValueError(f"the saved loss scale is of kind {kind!r}; expected one of {sorted(_KINDS)}")
    expected = _settings(cls)
    if set(values) != set(expected):
        raise ValueError(
            f"the saved loss scale ({kind}) has the fields {sorted(map(str, values))}; expected {expected}: it may "
            "be from a newer ampkit"
        )
    return cls(**values)
