"""Constructor and attributes of `GradScaler`, and how it is saved, loaded and copied.

`ScalerState` says which attribute holds what, and for how long. The class to use is `grad_scaler.GradScaler`.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

import ampkit_kernels
from ampkit.scaler import loss_scale as scales
from ampkit.scaler import skip_above as norm_limit
from ampkit.scaler import state_dict_checks
from ampkit.scaler.history import COUNTS, History, ScalerStats
from ampkit.scaler.loss_scale import DynamicLossScale, LossScale, ScaleState
from ampkit.scaler.optimizer_notes import LastStep, Notes
from ampkit.scaler.skip_above import TimesMedian
from ampkit.scaler.state_dict_checks import Loadable
from ampkit.torch_internals.operators import current_device_type
from ampkit.torch_internals.optimizers import ready_record
from ampkit.user_code import warn_user

OnStuck = Literal["warn", "raise"] | Callable[[ScalerStats], None]


class ScalerState(torch.amp.GradScaler):
    """The attributes of `GradScaler`, and their saved forms.

    What a scaler knows about the past is in five places, by how long it has to last:

    - `_per_optimizer_states`, until `update()`: torch's record of each optimizer, a dict with "stage" (READY, UNSCALED,
      STEPPED) and "found_inf_per_device". Libraries hold, change and replace it, so it has torch's entries alone.
    - `_notes`, until `update()`: one `Notes` per record, with what the record has no entry for: a clipping factor that
      is still to be applied, the verdict of `skip_above`, the mark on the optimizer's gradients. The attributes from
      `_clipped_norms` to `_used_scale` belong to the iteration as a whole. `_begin_iteration` drops all of these.
    - `_last_steps`, as long as the optimizer lives: one `LastStep` per optimizer with the end of its last step, for
      `found_inf`, `stepped` and `overflow_report`, and its last norms, for `TimesMedian`.
    - `_history`, as long as the scale: the counts of all steps and updates, and the last updates, for `stats` and
      `history`. It is made with the scale, and made again by `load_state_dict`.
    - `_init_scale` to `_init_norms`, always: the values that the scale, its counters, the history and the norms of an
      optimizer begin with: the constructor's, or those that were loaded or unpickled.
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        loss_scale: LossScale | None = None,
        process_group: Any = None,
        allow_fp16: bool = False,
        on_stuck: OnStuck = "warn",
        skip_above: float | TimesMedian | None = None,
    ) -> None:
        self._device = _device_type(device)
        self._enabled = enabled and _can_scale_on(self._device)
        if self._enabled:
            self._rule = scales.from_numbers(loss_scale, (init_scale, growth_factor, backoff_factor, growth_interval))
        else:  # a disabled scaler of torch checks no number
            self._rule = scales.checked(loss_scale)
        if on_stuck not in ("warn", "raise") and not callable(on_stuck):
            raise ValueError(f"on_stuck is {on_stuck!r}; expected 'warn', 'raise' or a function of ScalerStats")
        self.process_group = process_group
        self.allow_fp16 = allow_fp16
        self.on_stuck = on_stuck
        self._skip_above = norm_limit.checked(skip_above)
        self._warned: set[str] = set()
        self._stuck_check_due = False
        self._init_scale = self._rule.init_scale
        self._init_growth_tracker = 0
        self._init_counters: dict[str, int] = {}
        self._init_totals: dict[str, int] = {}
        self._init_norms: list[list[Any]] = []
        self._start()

    def _start(self) -> None:
        """Create the attributes that are not pickled, as they are before the first iteration."""
        self._scale: Any = None
        self._growth_tracker: Any = None
        self._counters: Sequence[Tensor] = ()  # the strategy's other counters
        self._history: Any = None  # made with the scale
        self._last_steps: weakref.WeakKeyDictionary[Any, LastStep] = weakref.WeakKeyDictionary()
        self._begin_iteration()

    def _begin_iteration(self) -> None:
        """Make every optimizer READY, and forget the notes about the last iteration."""
        self._states: MutableMapping[int, Any] = defaultdict(ready_record)
        self._notes: dict[int, Notes] = {}
        self._by_mark: dict[int, Notes] = {}  # the same notes by `Notes.mark`, which their gradients have
        # The largest norms by `id(optimizer)`: returned by `clip_grad_norm_`, and judged without it.
        self._clipped_norms: dict[int, Tensor] = {}
        self._judged_norms: dict[int, Tensor] = {}
        self._outlier: Tensor | None = None  # whether a step of any optimizer was skipped for its norm alone
        self._used_scale: Tensor | None = None  # a copy of the scale that unscaled gradients

    @property
    def _per_optimizer_states(self) -> MutableMapping[int, Any]:
        """torch's records by `id(optimizer)`.

        Setting them begins an iteration, because `update` of other subclasses of torch's scaler ends with that.
        """
        return self._states

    @_per_optimizer_states.setter
    def _per_optimizer_states(  # pyright: ignore[reportIncompatibleVariableOverride]  torch has a plain attribute
        self, states: MutableMapping[int, Any]
    ) -> None:
        self._begin_iteration()
        self._states = states

    @property
    def loss_scale(self) -> LossScale:
        """The active strategy."""
        return self._rule

    def _change_rule(self, name: str, value: Any) -> None:
        """Set a number of the strategy."""
        if not isinstance(self._rule, DynamicLossScale):
            raise ValueError(f"cannot set {name} on {self._rule}: its scale never changes; use DynamicLossScale")
        self._rule = replace(self._rule, **{name: value})

    # Used by torch's getters and setters, and by libraries.
    _growth_factor: Any = property(
        lambda self: self._rule.growth_factor, lambda self, value: self._change_rule("growth_factor", value)
    )
    _backoff_factor: Any = property(
        lambda self: self._rule.backoff_factor, lambda self, value: self._change_rule("backoff_factor", value)
    )
    _growth_interval: Any = property(
        lambda self: self._rule.growth_interval, lambda self, value: self._change_rule("growth_interval", value)
    )

    # The scale, made on the device of the first loss

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        """Make the scale, its counters and the history, on the device of the first loss."""
        if self._growth_tracker is not None:
            raise AssertionError("_growth_tracker initialized before _scale")
        _refuse_capture(dev, "the scale")
        self._scale, self._growth_tracker, *self._counters = self._first_state(dev)
        self._history = History(dev, self._init_totals)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        """Return scale and growth tracker; `AssertionError` with the method's name if there are none."""
        scale, tracker = super()._check_scale_growth_tracker(funcname)
        if self._history is None:  # other code has set both
            self._counters = self._rule.init(scale.device, **self._init_counters)[2:]
            self._history = History(scale.device, self._init_totals)
        return scale, tracker

    def _first_state(self, device: torch.device) -> ScaleState:
        """The scale and counters to begin with: the strategy's, or those that were loaded."""
        return self._rule.init(
            device, scale=self._init_scale, growth_tracker=self._init_growth_tracker, **self._init_counters
        )

    def _first_norms(self, optimizer: Any) -> Tensor | None:
        """The norms that `TimesMedian` begins with for an optimizer: saved ones, if only one saved optimizer fits.

        If several have its size it starts empty: with the norms of another optimizer it would skip good steps.
        """
        limit = self._skip_above
        if not isinstance(limit, TimesMedian):
            return None
        device = self._where() if self._scale is not None else torch.device("cpu")
        _refuse_capture(device, "the last norms of TimesMedian")
        size = norm_limit.size(optimizer)
        fitting = [norms for *saved_size, norms in self._init_norms if saved_size == size]
        self._init_norms = [entry for entry in self._init_norms if entry[:2] != size]
        return norm_limit.first_norms(limit, fitting[0] if len(fitting) == 1 else ()).to(device)

    def _where(self) -> torch.device:
        """The device where the scale is or will be. Ranks exchange flags there: NCCL takes no tensors on the CPU."""
        return torch.device(self._device) if self._scale is None else self._scale.device

    def _scale_on(self, device: torch.device) -> Tensor:
        """The scale; before it is on a device, a new tensor with its first value on `device`."""
        if self._scale is not None:
            return self._scale
        return torch.full((), self._init_scale, dtype=torch.float32, device=device)

    # Saving, loading, copying

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain Python values. Synchronizes; call it after `update()`.

        Returns:
            torch's five entries, which torch.amp.GradScaler loads too, and "ampkit" with the strategy, its counters,
            the counts of `stats` and the norms of `TimesMedian`; `{}` when disabled.
        """
        if not self._enabled:
            return {}
        # All entries are there before the first use too: torch.distributed.checkpoint loads no others.
        if self._scale is None or self._history is None:
            counters = self._first_state(torch.device("cpu"))[2:]
            totals = {**dict.fromkeys(COUNTS, 0), **self._init_totals}
        else:
            counters, totals = self._counters, self._history.to_dict(self._scale)
        return {
            "scale": self.get_scale(),
            "growth_factor": self._rule.growth_factor,
            "backoff_factor": self._rule.backoff_factor,
            "growth_interval": self._rule.growth_interval,
            "_growth_tracker": self._get_growth_tracker(),
            state_dict_checks.OWN_KEY: {
                "loss_scale": scales.to_dict(self._rule),
                "counters": dict(zip(state_dict_checks.COUNTERS, map(int, counters), strict=True)),
                "totals": totals,
                "norms": [
                    *(
                        [*norm_limit.size(optimizer), [norm for norm in last.norms.tolist() if norm < math.inf]]
                        for optimizer, last in self._last_steps.items()
                        if last.norms is not None
                    ),
                    *self._init_norms,
                ],
            },
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of torch.amp.GradScaler. Does nothing when disabled. Never synchronizes.

        The saved factors override the constructor's, as in torch. Unknown entries, and those of another kind of
        strategy than this scaler's, are ignored with a warning. After an error nothing has been loaded.

        Args:
            state_dict: the result of `state_dict()`.

        Raises:
            RuntimeError: `state_dict` is empty, as that of a disabled scaler.
            KeyError: entries are missing; the message names them.
            TypeError: an entry has another type.
            ValueError: a scale, a strategy or a count cannot be used.
        """
        if self._enabled:
            self._take_over(state_dict_checks.loadable(state_dict, self._rule))

    def _take_over(self, new: Loadable) -> None:
        """Continue from a saved state; tensors keep their addresses."""
        self._rule, self._init_scale = new.rule, new.scale
        self._init_growth_tracker, self._init_counters = new.growth_tracker, new.counters
        self._init_totals, self._init_norms = new.totals, new.norms
        for optimizer, last in self._last_steps.items():
            norms = self._first_norms(optimizer)
            if last.norms is not None and norms is not None:
                last.norms.copy_(norms)
        if self._scale is not None and self._growth_tracker is not None:
            self._check_scale_growth_tracker("load_state_dict")
            live = self._scale, self._growth_tracker, *self._counters
            for tensor, value in zip(live, self._first_state(self._scale.device), strict=True):
                tensor.copy_(value)
            self._history = History(self._scale.device, new.totals)

    def __getstate__(self) -> dict[str, Any]:
        """The settings, and the state as numbers. Synchronizes."""
        fresh = object.__new__(ScalerState)
        fresh._start()
        state = {name: value for name, value in vars(self).items() if name not in vars(fresh)}
        if not self._enabled:
            return state
        if self._states:
            raise AssertionError(
                "A GradScaler instance may only be pickled at the beginning of an iteration, or at the end after "
                "scaler.update(): its notes about this iteration's gradients would be lost."
            )
        saved = self.state_dict()
        own = saved[state_dict_checks.OWN_KEY]
        return state | {
            "_init_scale": saved["scale"],
            "_init_growth_tracker": saved["_growth_tracker"],
            "_init_counters": own["counters"],
            "_init_totals": own["totals"],
            "_init_norms": own["norms"],
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._start()
        vars(self).update(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> ScalerState:
        memo[id(self.process_group)] = self.process_group  # process groups cannot be copied
        copied = object.__new__(type(self))
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied

    if not TYPE_CHECKING:  # a type checker would accept every name as an attribute

        def __getattr__(self, name: str) -> Any:
            """Raise for a missing attribute, and say what replaces it if it is one of Apex's."""
            if name in _NAMES_OF_APEX:
                instead = f"{type(self).__name__!r} object has no attribute {name!r}; expected {_NAMES_OF_APEX[name]}"
                raise AttributeError(instead, name=name, obj=self)
            return super().__getattribute__(name)  # raises


_NAMES_OF_APEX = {
    "clear_overflow_state": "update(), which begins an iteration",
    "cur_scale": "get_scale()",
    "dynamic": "isinstance(scaler.loss_scale, ampkit.DynamicLossScale)",
    "has_overflow": "found_inf(optimizer)",
    "overflow": "found_inf(optimizer)",
    "unscale": "unscale_(optimizer)",
    "update_scale": "update()",
}
"""Replacements for attributes of Apex's loss scalers and FP16_Optimizer."""


def _refuse_capture(device: torch.device, what: str) -> None:
    """Raise `RuntimeError` during a CUDA graph capture, where `what` would be made again by each replay."""
    if ampkit_kernels.is_capturing(device):
        raise RuntimeError(
            f"{what} would be made inside a CUDA graph capture, and each replay would reset it; run a whole iteration "
            "(scale, clipping, step, update) before the capture"
        )


def _device_type(device: str | torch.device | None) -> str:
    """The type of a device or of its name; for None that of the current accelerator, else "cpu"."""
    if device is None:
        return current_device_type()
    if not isinstance(device, str | torch.device):
        raise TypeError(
            f"device is {device!r}; expected None, a torch.device, or a device type like 'cuda'; init_scale is the "
            "second argument here, as in torch.amp (the first in torch.cuda.amp); pass enabled= by keyword"
        )
    return torch.device(device).type


def _can_scale_on(device_type: str) -> bool:
    """Whether devices of this type can be used; warns, in torch's words, if "cuda" is not available."""
    if device_type != "cuda" or torch.cuda.is_available() or find_spec("torch_xla"):
        return True
    warn_user("GradScaler is enabled for 'cuda', but CUDA is not available.  Disabling.")
    return False
