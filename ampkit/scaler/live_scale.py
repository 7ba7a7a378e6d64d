"""The scale between iterations: a strategy, its state on a device, what is counted, and how all of it is saved."""

from __future__ import annotations

import numbers
import warnings
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampkit.gradients import kernels
from ampkit.scaler import loss_scale as scales
from ampkit.scaler import saved_state
from ampkit.scaler.history import COUNTS, Ledger
from ampkit.scaler.loss_scale import DynamicLossScale, LossScale, ScaleState
from ampkit.scaler.saved_state import COUNTERS, OWN_KEY, SavedState, usable_scale
from ampkit.torch_internals.optimizers import update_scale_

_DEFAULTS = (2.0**16, 2.0, 0.5, 2000)


class Loadable(NamedTuple):
    """A saved state that a scale can take over: the strategy it will follow, and the scale within its bounds."""

    strategy: LossScale
    scale: float
    saved: SavedState


def strategy_of(
    given: LossScale | None, plain: tuple[float, float, float, int], *, validate: bool = True
) -> LossScale:
    """The strategy that a scaler was made with, given as such or as torch's four numbers, checked if `validate`.

    Raises:
        ValueError: both, or a number out of range. AssertionError: growth_factor <= 1 or backoff_factor >= 1, as torch.
    """
    if given is not None:
        if plain != _DEFAULTS:
            raise ValueError(
                f"got loss_scale={given} together with init_scale, growth_factor, backoff_factor or "
                f"growth_interval; expected one or the other: set the numbers on the strategy"
            )
        return given
    if not validate:  # torch checks nothing when disabled, so neither must we
        return DynamicLossScale()
    _, growth_factor, backoff_factor, _ = plain
    # AssertionError as in torch, so that code that catches it keeps working
    if not growth_factor > 1.0:
        raise AssertionError(f"The growth factor must be > 1.0; got {growth_factor}.")
    if not backoff_factor < 1.0:
        raise AssertionError(f"The backoff factor must be < 1.0; got {backoff_factor}.")
    return DynamicLossScale(*plain)


class LiveScale:
    """A loss scale that follows a strategy, on no device until it is `place`d.

    `scale`, `growth_tracker` and `counters` are 0-d tensors, None before that, and keep their addresses. `init_scale`,
    `init_growth_tracker`, `init_counters` and `init_totals` are what they and the ledger begin with.
    """

    def __init__(self, strategy: LossScale, history_size: int = 1000) -> None:
        if history_size < 0:
            raise ValueError(f"history_size is {history_size}; expected 0 (keep none) or more")
        self.strategy = strategy
        self.history_size = history_size
        self.init_scale = strategy.init_scale
        self.init_growth_tracker = 0
        self.init_counters: dict[str, int] = {}
        self.init_totals: dict[str, int] = {}
        self.scale: Tensor | None = None
        self.growth_tracker: Tensor | None = None
        self.counters: tuple[Tensor, Tensor, Tensor] | None = None
        self._ledger: Ledger | None = None

    def place(self, device: torch.device) -> Tensor:
        """Create the state on `device`; returns the scale."""
        if self.growth_tracker is not None:
            raise AssertionError("_growth_tracker initialized before _scale")
        state = self.strategy.init(
            device, scale=self.init_scale, growth_tracker=self.init_growth_tracker, **self.init_counters
        )
        self.scale, self.growth_tracker = state.scale, state.growth_tracker
        self.counters = state[2:]
        self._ledger = Ledger(device, self.history_size, self.init_totals)
        return state.scale

    def state(self) -> ScaleState:
        """The state as tensors. Code that set `scale` by hand has made no counters: they start here.

        Raises:
            AssertionError: the scale is on no device.
        """
        if self.scale is None or self.growth_tracker is None:
            raise AssertionError("the loss scale is on no device yet: call scaler.scale(loss) first")
        if self.counters is None:
            self.counters = self.strategy.init(self.scale.device, **self.init_counters)[2:]
        return ScaleState(self.scale, self.growth_tracker, *self.counters)

    @property
    def tensor(self) -> Tensor:
        """The scale alone. Raises as `state` does."""
        return self.state().scale if self.scale is None else self.scale

    @property
    def ledger(self) -> Ledger:
        """What is counted. Raises as `state` does."""
        if self._ledger is None:
            self._ledger = Ledger(self.tensor.device, self.history_size, self.init_totals)
        return self._ledger

    def on(self, device: torch.device) -> Tensor:
        """The scale; before it is placed, a copy of the first one on `device`."""
        return torch.full((), self.init_scale, dtype=torch.float32, device=device) if self.scale is None else self.scale

    def inverse(self) -> tuple[Tensor, Tensor | None]:
        """1 / scale, rounded once from double where the device has it, and a copy of the scale if one was made.

        Pure. For a strategy that does not scale losses it is 1, whatever the scale.
        """
        scale = self.tensor if self.scale is None else self.scale
        if not self.strategy.scales_losses:
            return torch.ones_like(scale), None
        if scale.is_mps:
            return scale.reciprocal(), None
        used = scale.double()
        return used.reciprocal().float(), used

    def inverse_and_flag(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """`inverse`, with a clear flag between the two; one launch where the kernels serve the scale's device."""
        scale = self.tensor if self.scale is None else self.scale
        if self.strategy.scales_losses and kernels.serves(scale):
            return kernels.inverse_scale(scale)
        inv_scale, used = self.inverse()
        return inv_scale, torch.zeros_like(inv_scale), used

    def advance(
        self, found_inf: Tensor, norm: Tensor | None, scale_used: Tensor | None, *, known_finite: bool = False
    ) -> None:
        """Apply the strategy's rule for one update, in place and without a sync, and note it in the ledger.

        `scale_used` is a copy of the scale that the iteration used, if there is one; `known_finite`: the host has seen
        that nothing overflowed.
        """
        ledger, rule, scale, tracker = self.ledger, self.strategy, self.scale, self.growth_tracker
        if scale is None or tracker is None:
            scale, tracker, *_ = self.state()
        due = ledger.note_update(scale.clone() if scale_used is None else scale_used, found_inf, norm)
        if isinstance(rule, DynamicLossScale) and kernels.serves(scale):
            kernels.update_scale_(
                scale, tracker, None if rule.is_plain else self.state()[2:], found_inf,
                growth_factor=rule.growth_factor, backoff_factor=rule.backoff_factor,
                growth_interval=rule.growth_interval, min_scale=rule.min_scale, max_scale=rule.max_scale,
                hysteresis=rule.hysteresis, refills_when_clean=rule.hysteresis_refill == "clean",
                tolerance=rule.tolerance,
            )
        elif rule.is_plain:
            update_scale_(
                scale, tracker, found_inf, rule.growth_factor, rule.backoff_factor, rule.growth_interval
            )
            # growth never passes the largest float: nothing to clamp where nothing has overflowed
            if not known_finite or rule.max_scale < scales.LARGEST_SCALE:
                scale.clamp_(rule.min_scale, rule.max_scale)
        else:
            state = self.state()
            for old, new in zip(state, rule.next_state(state, found_inf), strict=True):
                old.copy_(new)
        if due:
            ledger.fold(scale)

    def set(self, new_scale: Any, device_type: str) -> None:
        """Set the scale, kept within the strategy's bounds; a tensor that holds no usable scale changes nothing."""
        state, ledger, rule = self.state(), self.ledger, self.strategy
        if isinstance(new_scale, Tensor):
            if new_scale.device.type not in (device_type, state.scale.device.type):
                raise AssertionError(_bad_scale(f"one on {new_scale.device}"))
            if new_scale.numel() != 1 or new_scale.requires_grad:
                raise AssertionError(_bad_scale(f"shape {tuple(new_scale.shape)}, {new_scale.requires_grad=}"))
            wanted = new_scale.reshape(()).to(state.scale)
            usable = torch.isfinite(wanted) & (wanted > 0)
            wanted = torch.where(usable, wanted.clamp(rule.min_scale, rule.max_scale), state.scale)
        elif isinstance(new_scale, numbers.Real) and not isinstance(new_scale, bool):
            value = usable_scale(float(new_scale), "new_scale")
            wanted = torch.full_like(state.scale, min(max(value, rule.min_scale), rule.max_scale))
        else:
            raise AssertionError(_bad_scale(type(new_scale).__name__))
        # The history must not count this change as growth or backoff.
        ledger.note_update(state.scale.clone(), torch.zeros_like(state.scale), None)
        ledger.fold(state.scale)
        state.scale.copy_(wanted)

    def _change(self, name: str, value: Any) -> None:
        if not isinstance(self.strategy, DynamicLossScale):
            raise ValueError(f"cannot set {name} on {self.strategy}: its scale never moves; use DynamicLossScale")
        self.strategy = replace(self.strategy, **{name: value})

    @property
    def growth_factor(self) -> float:
        """The strategy's; may be set, as the two below."""
        return self.strategy.growth_factor

    @growth_factor.setter
    def growth_factor(self, value: float) -> None:
        self._change("growth_factor", value)

    @property
    def backoff_factor(self) -> float:
        """The strategy's."""
        return self.strategy.backoff_factor

    @backoff_factor.setter
    def backoff_factor(self, value: float) -> None:
        self._change("backoff_factor", value)

    @property
    def growth_interval(self) -> int:
        """The strategy's."""
        return self.strategy.growth_interval

    @growth_interval.setter
    def growth_interval(self, value: int) -> None:
        self._change("growth_interval", value)

    def state_dict(self) -> dict[str, Any]:
        """torch's five entries, and "ampkit" with the whole strategy and the counts. Reads the device."""
        own: dict[str, Any] = {"version": 1, "loss_scale": scales.to_dict(self.strategy)}
        if self.scale is None or self.growth_tracker is None:
            # All entries even before first use: torch.distributed.checkpoint loads only entries that it finds here.
            scale, tracker = self.init_scale, self.init_growth_tracker
            _, _, *counters = self.strategy.init(torch.device("cpu"), **self.init_counters)
            own["counters"] = dict(zip(COUNTERS, (int(count) for count in counters), strict=True))
            own["totals"] = {**dict.fromkeys(COUNTS, 0), **self.init_totals}
        else:
            state = self.state()
            own["totals"] = self.ledger.to_dict(state.scale)
            scale, tracker, *counters = torch.stack([part.double() for part in state]).tolist()
            own["counters"] = dict(zip(COUNTERS, map(int, counters), strict=True))
        return {
            "scale": scale,
            "growth_factor": self.strategy.growth_factor,
            "backoff_factor": self.strategy.backoff_factor,
            "growth_interval": self.strategy.growth_interval,
            "_growth_tracker": int(tracker),
            OWN_KEY: own,
        }

    def loadable(self, state_dict: Any) -> Loadable:
        """`state_dict` checked, with the errors and warnings of `load_state_dict`; changes nothing."""
        saved = saved_state.read(state_dict)
        if saved.unknown:
            warnings.warn(f"ignored unknown entries in the scaler's state dict: {saved.unknown}", stacklevel=3)
        strategy = self._loaded_strategy(saved)
        scale = strategy.init_scale
        if isinstance(strategy, DynamicLossScale):
            scale = min(max(usable_scale(saved.scale, "the saved scale"), strategy.min_scale), strategy.max_scale)
        return Loadable(strategy, scale, saved)

    def _loaded_strategy(self, saved: SavedState) -> LossScale:
        """This scale's strategy with the saved numbers."""
        rule = self.strategy
        if saved.strategy is not None and saved.strategy.kind != rule.kind:
            warnings.warn(
                f"the checkpoint was saved with {saved.strategy}; this scaler keeps {rule}, as the script says",
                stacklevel=4,
            )
            return rule
        if not isinstance(rule, DynamicLossScale):
            return rule if saved.strategy is None else saved.strategy
        return replace(
            saved.strategy if isinstance(saved.strategy, DynamicLossScale) else rule,
            growth_factor=saved.growth_factor,
            backoff_factor=saved.backoff_factor,
            growth_interval=saved.growth_interval,
        )

    def take_over(self, new: Loadable) -> None:
        """Continue from a saved state; tensors keep their addresses."""
        saved = new.saved
        self.strategy = new.strategy
        self.init_scale = new.scale
        self.init_growth_tracker = saved.growth_tracker
        self.init_counters, self.init_totals = saved.counters, saved.totals
        if self.scale is not None and self.growth_tracker is not None:
            start = {"growth_tracker": saved.growth_tracker, **saved.counters}
            fresh = new.strategy.init(self.scale.device, scale=new.scale, **start)
            for old, value in zip(self.state(), fresh, strict=True):
                old.copy_(value)
            self._ledger = Ledger(self.scale.device, self.history_size, saved.totals)


def _bad_scale(got: str) -> str:
    return (
        f"new_scale should be a number or a 1-element tensor on the scaler's device with requires_grad=False; got {got}"
    )
