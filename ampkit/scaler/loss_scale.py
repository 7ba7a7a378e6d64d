"""Loss-scale strategies: how a scale reacts to overflow, as pure arithmetic on tensors.

A strategy is a frozen description; what changes from step to step is a `ScaleState` of 0-d tensors. `next_state` maps
one state to the next without reading a value, so nothing here waits for a device. `GradScaler` owns a state and writes
the next one into the same tensors, which keeps their addresses fixed (CUDA graphs replay them).

The dynamic rule is Micikevicius et al. 2018, section 3.2, as torch implements it; hysteresis follows Megatron-LM
(refill on growth) and Apex (refill on every clean update); the tolerated overflow rate follows fairseq.
"""

from __future__ import annotations

import numbers
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32: the least scale whose reciprocal is still finite."""

LARGEST_SCALE = torch.finfo(torch.float32).max

_RANGE = f"a number from {SMALLEST_SCALE:.3g} to {LARGEST_SCALE:.3g}: a scale of 0 or inf destroys gradients"


class ScaleState(NamedTuple):
    """What a strategy remembers between updates; 0-d tensors on one device.

    `scale` is float32, the rest int32. `growth_tracker` counts finite updates since the last overflow or growth,
    `hysteresis_left` the overflows up to the one that backs off, `window_updates` and `window_overflows` the updates
    and overflows since the scale last changed.
    """

    scale: Tensor
    growth_tracker: Tensor
    hysteresis_left: Tensor
    window_updates: Tensor
    window_overflows: Tensor


def number(given: Any, name: str, *, whole: bool = False) -> float:
    """A real number, also in a one-element tensor, as Python's own; `TypeError` for anything else."""
    value = given.item() if isinstance(given, Tensor) and given.numel() == 1 else given
    if isinstance(value, bool) or not isinstance(value, numbers.Integral if whole else numbers.Real):
        raise TypeError(f"{name} is {value!r}; expected a {'whole ' * whole}number")
    plain: Any = value
    return plain if isinstance(plain, int | float) else int(plain) if whole else float(plain)


def to_python_numbers(strategy: Any) -> None:
    """Convert a dataclass's fields to Python numbers; `TypeError` for one that is none, or no integer where one is due.
    """
    for each in fields(strategy):
        if each.type != "str":
            value = number(getattr(strategy, each.name), each.name, whole=each.type == "int")
            object.__setattr__(strategy, each.name, value)  # frozen to others


class _LossScale:
    def init(self: Any, device: torch.device | str, *, scale: float | None = None, **counters: int) -> ScaleState:
        """A state on `device`, fresh unless `scale` and counters by their field names say otherwise."""
        first = self.init_scale if scale is None else scale
        start = {"hysteresis_left": self.hysteresis, **counters}
        return ScaleState(
            torch.full((), first, dtype=torch.float32, device=device),
            *(torch.full((), start.get(name, 0), dtype=torch.int32, device=device) for name in ScaleState._fields[1:]),
        )


@dataclass(frozen=True)
class DynamicLossScale(_LossScale):
    """Shrink on overflow, grow after a run of finite updates.

    Args:
        init_scale: first scale.
        growth_factor: multiplies the scale after `growth_interval` finite updates in a row; 1 never grows.
        backoff_factor: multiplies the scale on overflow; 1 never backs off.
        growth_interval: finite updates in a row before growth. 0 never grows, as in torch.
        min_scale: the scale stops here on its way down; defaults to the least scale with a finite reciprocal.
        max_scale: the scale stops here on its way up. A growth that would reach inf is never taken.
        hysteresis: the scale backs off on this many-th overflow; 1 backs off at once. The steps are skipped all the
            same.
        hysteresis_refill: when forgiven overflows are given back: "growth" of the scale (Megatron-LM) or any "clean"
            update, so that only overflows in a row count (Apex, DeepSpeed's consecutive hysteresis).
        tolerance: the scale backs off only when at least this share (0 to 1) of the updates since its last change
            overflowed (fairseq's overflow tolerance).

    Raises:
        TypeError: a field that is no number, or no whole one.
        ValueError: a field out of range.

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
    hysteresis_refill: str = "growth"
    tolerance: float = 0.0

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
            ("hysteresis", 1 <= self.hysteresis <= 2**30, "1 (back off at once) or more, at most 2**30"),
            ("hysteresis_refill", self.hysteresis_refill in ("growth", "clean"), "'growth' or 'clean'"),
            ("tolerance", 0.0 <= self.tolerance < 1.0, "a share from 0 up to, not including, 1"),
        ):
            if not is_right:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected {expected}")

    @property
    def stuck_scale(self) -> float:
        """Gradients that overflow at this scale or below overflow for another reason: 2**-14, or `min_scale`."""
        return max(self.min_scale, 2.0**-14)

    @property
    def is_plain(self) -> bool:
        """Whether the rule is torch's own, bounds aside."""
        return self.hysteresis == 1 and self.tolerance == 0.0

    def next_state(self, state: ScaleState, found_inf: Tensor) -> ScaleState:
        """The state after an update that did (`found_inf` nonzero, NaN included) or did not overflow. Never syncs."""
        overflow = found_inf != 0
        updates, overflows = state.window_updates + 1, state.window_overflows + overflow
        counted = overflow & (overflows.float() >= self.tolerance * updates.float())
        backs_off = counted & (state.hysteresis_left <= 1)
        left = torch.where(counted, torch.clamp(state.hysteresis_left - 1, min=1), state.hysteresis_left)
        finite_run = state.growth_tracker + 1
        grows = ~overflow & (finite_run == self.growth_interval)
        # Growth to inf keeps the scale and restarts the count, as in torch.
        grown = _times(state.scale, self.growth_factor)
        grown = torch.where(torch.isfinite(grown), grown, state.scale)
        shrunk = _times(state.scale, self.backoff_factor)
        scale = torch.where(backs_off, shrunk, torch.where(grows, grown, state.scale))
        refill = grows if self.hysteresis_refill == "growth" else ~overflow
        return ScaleState(
            scale.clamp(self.min_scale, self.max_scale),
            torch.where(overflow | grows, 0, finite_run).to(torch.int32),
            torch.where(refill, self.hysteresis, left).to(torch.int32),
            torch.where(backs_off | grows, 0, updates).to(torch.int32),
            torch.where(backs_off | grows, 0, overflows).to(torch.int32),
        )


@dataclass(frozen=True)
class StaticLossScale(_LossScale):
    """A constant scale; overflowing steps are still skipped.

    Args:
        scale: the scale, positive and finite in float32.

    Raises:
        TypeError: `scale` is no number.
        ValueError: `scale` out of range.

    >>> StaticLossScale(128.0).init_scale
    128.0
    """

    scale: float

    kind: ClassVar[str] = "static"
    scales_losses: ClassVar[bool] = True
    # The same names as the dynamic rule, with values that leave a scale alone: a torch scaler that loads them
    # keeps the scale too.
    growth_factor: ClassVar[float] = 1.0
    backoff_factor: ClassVar[float] = 1.0
    growth_interval: ClassVar[int] = 2**31 - 1
    min_scale: ClassVar[float] = SMALLEST_SCALE
    max_scale: ClassVar[float] = LARGEST_SCALE
    hysteresis: ClassVar[int] = 1
    is_plain: ClassVar[bool] = True

    def __post_init__(self) -> None:
        to_python_numbers(self)
        if not SMALLEST_SCALE <= self.scale <= LARGEST_SCALE:
            raise ValueError(f"scale is {self.scale}; expected {_RANGE}")

    @property
    def init_scale(self) -> float:
        """The scale, under the dynamic rule's name."""
        return self.scale

    def next_state(self, state: ScaleState, found_inf: Tensor) -> ScaleState:
        """The same scale; `growth_tracker` still counts finite updates in a row. Never syncs."""
        run = torch.where(found_inf != 0, 0, state.growth_tracker + 1).to(torch.int32)
        return state._replace(growth_tracker=run)


@dataclass(frozen=True)
class NoOpLossScale(StaticLossScale):
    """No scaling: losses are returned unchanged; steps with non-finite gradients are still skipped.

    For bfloat16 and float32 training, which need only the skipping.

    >>> NoOpLossScale().init_scale
    1.0
    """

    scale: float = field(default=1.0, init=False, repr=False)

    kind: ClassVar[str] = "noop"
    scales_losses: ClassVar[bool] = False


LossScale = DynamicLossScale | StaticLossScale
_KINDS: dict[str, type[LossScale]] = {cls.kind: cls for cls in (DynamicLossScale, StaticLossScale, NoOpLossScale)}


def checked(strategy: LossScale | None) -> LossScale:
    """The strategy, or for None the default one; `TypeError` for what is none."""
    if not isinstance(strategy, DynamicLossScale | StaticLossScale | None):
        raise TypeError(
            f"loss_scale is {strategy!r}; expected DynamicLossScale(), StaticLossScale(scale) or NoOpLossScale()"
        )
    return DynamicLossScale() if strategy is None else strategy


def from_numbers(strategy: LossScale | None, plain: tuple[float, float, float, int]) -> LossScale:
    """The strategy that a scaler was made with, given as such or as torch's four numbers.

    Raises:
        TypeError: a strategy of another class, or what is no number.
        ValueError: both, or a number out of range. AssertionError: growth_factor <= 1 or backoff_factor >= 1, as torch.
    """
    if strategy is not None:
        fresh = checked(None)
        if plain != (fresh.init_scale, fresh.growth_factor, fresh.backoff_factor, fresh.growth_interval):
            raise ValueError(
                f"got loss_scale={strategy} together with init_scale, growth_factor, backoff_factor or "
                f"growth_interval; expected one or the other: set the numbers on the strategy"
            )
        return checked(strategy)
    _, growth_factor, backoff_factor, _ = plain
    # AssertionError as in torch, so that code that catches it keeps working
    if not number(growth_factor, "growth_factor") > 1.0:
        raise AssertionError(f"The growth factor must be > 1.0; got {growth_factor}.")
    if not number(backoff_factor, "backoff_factor") < 1.0:
        raise AssertionError(f"The backoff factor must be < 1.0; got {backoff_factor}.")
    return DynamicLossScale(*plain)


def _saved(cls: type[LossScale]) -> list[str]:
    return [each.name for each in fields(cls) if each.init]


def to_dict(strategy: LossScale) -> dict[str, Any]:
    """A strategy as plain Python values, for a checkpoint."""
    return {"kind": strategy.kind, **{name: getattr(strategy, name) for name in _saved(type(strategy))}}


def from_dict(saved: Mapping[str, Any]) -> LossScale:
    """The strategy that `to_dict` described.

    Raises:
        TypeError: a field that is no number, or no whole one.
        ValueError: unknown kind, fields that are missing or unknown to this version, or one out of range.
    """
    values = dict(saved)
    kind = values.pop("kind", None)
    cls = _KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise ValueError(f"the saved loss scale is of kind {kind!r}; expected one of {sorted(_KINDS)}")
    expected = _saved(cls)
    if set(values) != set(expected):
        raise ValueError(
            f"the saved loss scale ({kind}) has the fields {sorted(map(str, values))}; expected {expected}: it may "
            "come from a newer ampkit"
        )
    return cls(**values)


def _times(scale: Tensor, factor: float) -> Tensor:
    """The product rounded once from double, as torch's update kernel does; Metal has no double."""
    if scale.device.type == "mps":
        return scale * factor
    return (scale.double() * factor).float()
