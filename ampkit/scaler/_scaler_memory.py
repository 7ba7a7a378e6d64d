"""What a GradScaler remembers between iterations: the scale, its counters, and how they are saved and loaded."""

from __future__ import annotations

import copy
import numbers
import warnings
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampkit.scaler import loss_scale as scales
from ampkit.scaler import saved_state
from ampkit.scaler.history import Ledger
from ampkit.scaler.loss_scale import DynamicLossScale, LossScale, ScaleState
from ampkit.scaler.saved_state import OWN_KEY, SavedState, usable_scale
from ampkit.torch_internals.optimizers import update_scale_

_LIVE = ("_scale", "_growth_tracker", "_counters", "_ledger", "_outcomes", "_examined")
"""Attributes made anew on the other side of a pickle: tensors, and what is known about living optimizers."""
_ITERATION = ("_per_optimizer_states", "_norm", "_scale_calls", "_losses", "_scale_used")
"""What `_begin_iteration` sets: the other side of a pickle is at the beginning of one."""
_DEFAULTS = (2.0**16, 2.0, 0.5, 2000)


class Loadable(NamedTuple):
    """A saved state that a scaler can take over: the strategy it will follow, and the scale within its bounds."""

    rule: LossScale
    scale: float
    saved: SavedState


class ScalerMemory(torch.amp.GradScaler):
    """The lasting half of `ampkit.GradScaler`; not meant to be used alone."""

    # Set by GradScaler; declared for the reader and the type checker.
    _device: str
    _enabled: bool
    process_group: Any
    _per_optimizer_states: dict[int, dict[str, Any]]

    def _remember(
        self,
        loss_scale: LossScale | None,
        plain: tuple[float, float, float, int],
        history_size: int,
        validate: bool,
    ) -> None:
        """Choose the strategy and start with nothing on any device; the first `scale` call says where to live."""
        if loss_scale is not None and plain != _DEFAULTS:
            raise ValueError(
                f"got loss_scale={loss_scale} together with init_scale, growth_factor, backoff_factor or "
                f"growth_interval; expected one or the other: set the numbers on the strategy"
            )
        _, growth_factor, backoff_factor, _ = plain
        if loss_scale is None and validate:
            # torch raises AssertionError here; code that catches it keeps working
            if not growth_factor > 1.0:
                raise AssertionError(f"The growth factor must be > 1.0; got {growth_factor}.")
            if not backoff_factor < 1.0:
                raise AssertionError(f"The backoff factor must be < 1.0; got {backoff_factor}.")
        if loss_scale is None:
            # torch checks nothing when disabled, so neither must we
            loss_scale = DynamicLossScale(*plain) if validate else DynamicLossScale()
        if history_size < 0:
            raise ValueError(f"history_size is {history_size}; expected 0 (keep none) or more")
        self._loss_scale: LossScale = loss_scale
        self._init_scale = loss_scale.init_scale
        self._init_growth_tracker = 0
        self._init_counters: dict[str, int] = {}
        self._init_totals: dict[str, int] = {}
        self._history_size = history_size
        self._forget_tensors()

    def _forget_tensors(self) -> None:
        self._scale: Tensor | None = None
        self._growth_tracker: Tensor | None = None
        self._counters: tuple[Tensor, Tensor, Tensor] | None = None
        self._ledger: Ledger | None = None

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        if self._growth_tracker is not None:
            raise AssertionError("_growth_tracker initialized before _scale")
        state = self._loss_scale.init(
            dev, scale=self._init_scale, growth_tracker=self._init_growth_tracker, **self._init_counters
        )
        self._scale, self._growth_tracker = state.scale, state.growth_tracker
        self._counters = state[2:]
        self._ledger = Ledger(dev, self._history_size, self._init_totals)

    def _live_state(self) -> tuple[ScaleState, Ledger]:
        """The state as tensors. Code that set `_scale` by hand has made no counters: they start here.

        Raises:
            AssertionError: no loss has been scaled yet.
        """
        if self._scale is None or self._growth_tracker is None:
            raise AssertionError("the loss scale is on no device yet: call scaler.scale(loss) first")
        if self._counters is None or self._ledger is None:
            self._counters = self._loss_scale.init(self._scale.device, **self._init_counters)[2:]
            self._ledger = Ledger(self._scale.device, self._history_size, self._init_totals)
        return ScaleState(self._scale, self._growth_tracker, *self._counters), self._ledger

    def _live_scale(self) -> Tensor:
        """The scale alone; see `_live_state`."""
        return self._live_state()[0].scale if self._scale is None else self._scale

    def _scale_on(self, device: torch.device) -> Tensor:
        """The scale where it lives; before it lives anywhere, the first one on `device`."""
        return torch.full((), self._init_scale, device=device) if self._scale is None else self._scale

    def _advance(
        self, found_inf: Tensor, norm: Tensor | None, scale_used: Tensor | None, *, clean: bool = False
    ) -> None:
        """Let the strategy answer one update, in place and without a sync, and note it in the ledger.

        `clean` says that the host knows that nothing has overflowed.
        """
        state, ledger = self._live_state()
        rule = self._loss_scale
        due = ledger.note_update(state.scale.clone() if scale_used is None else scale_used, found_inf, norm)
        if rule.is_plain:
            update_scale_(
                state.scale,
                state.growth_tracker,
                found_inf,
                rule.growth_factor,
                rule.backoff_factor,
                rule.growth_interval,
            )
            # growth never passes the largest float: nothing to clamp where nothing has overflowed
            if not clean or rule.max_scale < scales.LARGEST_SCALE:
                state.scale.clamp_(rule.min_scale, rule.max_scale)
        else:
            for old, new in zip(state, rule.next_state(state, found_inf), strict=True):
                old.copy_(new)
        if due:
            ledger.fold(state.scale)

    def _set_scale(self, new_scale: float | Tensor) -> None:
        """Put the scale where the user wants it; a tensor that holds no usable scale changes nothing."""
        state, ledger = self._live_state()
        rule = self._loss_scale
        if isinstance(new_scale, Tensor):
            if new_scale.device.type not in (self._device, state.scale.device.type):
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
        # What was noted so far must not read this change as growth or backoff.
        ledger.note_update(state.scale.clone(), torch.zeros_like(state.scale), None)
        ledger.fold(state.scale)
        state.scale.copy_(wanted)

    @property
    def loss_scale(self) -> LossScale:
        """The strategy in force."""
        return self._loss_scale

    # torch's getters, setters and users of its private names work on these.
    @property
    def _growth_factor(self) -> float:
        return self._loss_scale.growth_factor

    @_growth_factor.setter
    def _growth_factor(self, value: float) -> None:
        self._change("growth_factor", value)

    @property
    def _backoff_factor(self) -> float:
        return self._loss_scale.backoff_factor

    @_backoff_factor.setter
    def _backoff_factor(self, value: float) -> None:
        self._change("backoff_factor", value)

    @property
    def _growth_interval(self) -> int:
        return self._loss_scale.growth_interval

    @_growth_interval.setter
    def _growth_interval(self, value: int) -> None:
        self._change("growth_interval", value)

    def _change(self, name: str, value: Any) -> None:
        if not isinstance(self._loss_scale, DynamicLossScale):
            raise ValueError(f"cannot set {name} on {self._loss_scale}: its scale never moves; use DynamicLossScale")
        self._loss_scale = replace(self._loss_scale, **{name: value})

    def state_dict(self) -> dict[str, Any]:
        """The scaler as plain Python values; `{}` when disabled. Reads the device: call it after `update()`.

        torch's five entries, so that torch.amp.GradScaler loads it, and one more, "ampkit", with the whole strategy and
        the counts.
        """
        if not self._enabled:
            return {}
        own: dict[str, Any] = {"version": 1, "loss_scale": scales.to_dict(self._loss_scale)}
        if self._scale is None or self._growth_tracker is None:
            scale, tracker = self._init_scale, self._init_growth_tracker
            own["counters"], own["totals"] = dict(self._init_counters), dict(self._init_totals)
        else:
            state, ledger = self._live_state()
            own["totals"] = ledger.to_dict(state.scale)
            scale, tracker, *counters = torch.stack([part.double() for part in state]).tolist()
            own["counters"] = dict(zip(ScaleState._fields[2:], map(int, counters), strict=True))
        return {
            "scale": scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": int(tracker),
            OWN_KEY: own,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` of this class or of torch.amp.GradScaler returned; nothing happens when disabled.

        The saved factors win over the constructor's, as in torch. Entries that belong to another kind of strategy than
        this scaler's are left aside with a warning. Unknown entries are named in a warning.

        Nothing has been loaded when it raises.

        Raises:
            RuntimeError: an empty dict, as a disabled scaler saves it.
            KeyError: missing entries, all of them named.
            TypeError: an entry of another type.
            ValueError: a scale, a strategy or a count that cannot be used.
        """
        if self._enabled:
            self._take_over(self._loadable(state_dict))

    def _loadable(self, state_dict: Any) -> Loadable:
        """What `state_dict` would make of this scaler; raises and warns for `load_state_dict`, and changes nothing."""
        saved = saved_state.read(state_dict)
        if saved.unknown:
            warnings.warn(f"ignored unknown entries in the scaler's state dict: {saved.unknown}", stacklevel=3)
        rule = self._loaded_rule(saved)
        scale = rule.init_scale
        if isinstance(rule, DynamicLossScale):
            scale = min(max(usable_scale(saved.scale, "the saved scale"), rule.min_scale), rule.max_scale)
        return Loadable(rule, scale, saved)

    def _take_over(self, new: Loadable) -> None:
        saved = new.saved
        self._loss_scale = new.rule
        self._init_scale = new.scale
        self._init_growth_tracker = saved.growth_tracker
        self._init_counters, self._init_totals = saved.counters, saved.totals
        if self._scale is not None and self._growth_tracker is not None:
            start = {"growth_tracker": saved.growth_tracker, **saved.counters}
            fresh = new.rule.init(self._scale.device, scale=new.scale, **start)
            for old, value in zip(self._live_state()[0], fresh, strict=True):
                old.copy_(value)
            self._ledger = Ledger(self._scale.device, self._history_size, saved.totals)

    def _loaded_rule(self, saved: SavedState) -> LossScale:
        """This scaler's strategy with the saved numbers."""
        rule = self._loss_scale
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

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        if not self._enabled:
            for name in (*_LIVE, *_ITERATION):
                state.pop(name, None)
            return state
        if self._per_optimizer_states:
            raise AssertionError(
                "A GradScaler instance may only be pickled at the beginning of an iteration, or at the end after "
                "scaler.update(): what is known about this iteration's gradients would be lost."
            )
        if self.process_group is not None:
            raise TypeError(
                "a GradScaler with a process_group cannot be pickled, because process groups cannot: save "
                "scaler.state_dict() instead"
            )
        saved = self.state_dict()
        state.update(
            _init_scale=saved["scale"],
            _init_growth_tracker=saved["_growth_tracker"],
            _init_counters=saved[OWN_KEY]["counters"],
            _init_totals=saved[OWN_KEY]["totals"],
        )
        for name in (*_LIVE, *_ITERATION):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_tensors()
        self._start_watching()
        self._begin_iteration()

    def _start_watching(self) -> None:
        """Begin with no step observed; `ScalerInsight` says what there is to observe."""

    def _begin_iteration(self) -> None:
        """Forget what is known about gradients; `ScalerChecks` says what there is to know."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ScalerMemory:
        group, self.process_group = self.process_group, None
        try:
            state = copy.deepcopy(self.__getstate__(), memo)
        finally:
            self.process_group = group
        twin = self.__class__.__new__(self.__class__)
        twin.__setstate__(state)
        twin.process_group = group
        return twin


def _bad_scale(got: str) -> str:
    return (
        f"new_scale should be a number or a 1-element tensor on the scaler's device with requires_grad=False; got {got}"
    )
