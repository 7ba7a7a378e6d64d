"""ScalerBase: all of a scaler except the iteration: its settings, the scale, queries about past steps, saving.

`GradScaler` inherits from it. Nothing here calls a method of the iteration.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Literal, Self

import torch
from torch import Tensor

import ampkit_kernels
from ampkit.gradients import ranks
from ampkit.scaler import loss_scale as scales
from ampkit.scaler import saved_state
from ampkit.scaler import skip_above as norm_limit
from ampkit.scaler.history import COUNTS, History, ScalerStats
from ampkit.scaler.loss_scale import DynamicLossScale, LossScale, ScaleState
from ampkit.scaler.optimizer_record import OptimizerRecord
from ampkit.scaler.overflow_report import Counted, OverflowReport, count_nonfinite, report
from ampkit.scaler.skip_above import TimesMedian
from ampkit.torch_private import current_device_type, ready_record
from ampkit.user_code import warn_user

OnStuck = Literal["warn", "raise"] | Callable[[ScalerStats], None]

_STUCK_STEPS = 20
"""Steps skipped in a row, with a scale that never changes, after which the scaler is stuck."""


class LossScaleStuckError(RuntimeError):
    """Gradients keep overflowing although the loss scale has collapsed, or with a scale that never changes."""


class ScalerBase(torch.amp.GradScaler):
    """The settings and the scale of a `GradScaler`, its queries about past steps, and its saved state."""

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
        self._records: weakref.WeakKeyDictionary[Any, OptimizerRecord] = weakref.WeakKeyDictionary()
        self._by_owner_id: dict[int, OptimizerRecord] = {}
        self._begin_iteration()

    def _begin_iteration(self) -> None:
        """Make every optimizer READY, and forget everything about the last iteration."""
        self._states: MutableMapping[int, Any] = defaultdict(ready_record)
        for record in self._by_owner_id.values():
            record.end_iteration()
        self._by_owner_id = {}  # the records of this iteration's optimizers
        self._outlier: Tensor | None = None  # whether a step of any optimizer was skipped only for its norm
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
        if self._scale is None and not self._rule.scales_losses:  # nothing has to be scaled first
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        scale, growth_tracker = self._scale, self._growth_tracker
        if scale is None or growth_tracker is None:
            return super()._check_scale_growth_tracker(funcname)  # raises
        if self._history is None:  # other code has set both
            self._counters = self._rule.init(scale.device, **self._init_counters)[2:]
            self._history = History(scale.device, self._init_totals)
        return scale, growth_tracker

    def _first_state(self, device: torch.device) -> ScaleState:
        """Return the scale and counters to begin with: the strategy's, or the loaded ones."""
        return self._rule.init(
            device, scale=self._init_scale, growth_tracker=self._init_growth_tracker, **self._init_counters
        )

    def _first_norms(self, optimizer: Any) -> Tensor | None:
        """Return the first norms of `TimesMedian` for an optimizer: saved ones, if only one saved optimizer fits.

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
        """Return the device of the scale, now or later. Ranks exchange flags there: NCCL takes no CPU tensors."""
        return torch.device(self._device) if self._scale is None else self._scale.device

    def _scale_on(self, device: torch.device) -> Tensor:
        """Return the scale; before it is on a device, a new tensor with its first value on `device`."""
        if self._scale is not None:
            return self._scale
        return torch.full((), self._init_scale, dtype=torch.float32, device=device)

    # Queries about past steps

    def found_inf(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """Return whether the last `step(optimizer)` was skipped for inf or NaN, as a tensor.

        Valid for every optimizer, fused ones included. Never synchronizes, unlike `if scaler.found_inf(optimizer):`.

        Args:
            optimizer: the optimizer that was passed to `step`.

        Returns:
            A 0-d bool tensor on the device; False after a step that found no gradients, and when disabled.

        Raises:
            RuntimeError: `step` has not been called with this optimizer.
        """
        if not self._enabled:
            return torch.zeros((), dtype=torch.bool, device="cpu")
        flag: Any = self._stepped_record_of(optimizer).found_inf
        return flag != 0

    def stepped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the last `step(optimizer)` was executed, so that a schedule can step with its optimizer.

        `if scaler.stepped(optimizer): schedule.step()`. Synchronizes if the optimizer skips on the device.

        Args:
            optimizer: the optimizer that was passed to `step`.

        Returns:
            A Python bool; False after a step that found no gradients, True when disabled.

        Raises:
            RuntimeError: `step` has not been called with this optimizer.
        """
        if not self._enabled:
            return True
        last = self._stepped_record_of(optimizer)
        if last.was_outlier is not None and bool(last.was_outlier != 0):
            return False
        if last.skipped is None:  # only the device has the flag
            return bool(last.found_inf == 0)
        return not last.skipped

    def _stepped_record_of(self, optimizer: Any) -> OptimizerRecord:
        last = self._records.get(optimizer)
        if last is None or last.found_inf is None:
            raise RuntimeError(
                f"scaler.step() has not been called with this {type(optimizer).__name__}; expected the object that "
                "was passed to step(), not an optimizer that it wraps"
            )
        return last

    def stats(self) -> ScalerStats:
        """Return the scale and counts of steps, skips, growths and more. Synchronizes; reads the device once.

        Calls `on_stuck` if optimizers that skip on the device have overflowed at a scale that can hardly fall further.

        Returns:
            A `ScalerStats`.
        """
        if self._scale is None or self._history is None:  # the counts are the loaded ones, if any
            cpu = torch.device("cpu")
            return History(cpu, self._init_totals).totals(torch.full((), self.get_scale(), device=cpu))
        stats = self._history.totals(self._scale)
        if self._stuck_check_due and stats.consecutive_skips:
            self._stuck_check_due = False
            self._check_stuck(stats.scale, stats.consecutive_skips)
        return stats

    def metrics(self) -> dict[str, float]:
        """Return numbers for a logger, as W&B's `log` and MLflow's `log_metrics` take them. Synchronizes.

        Returns:
            `loss_scale`, `skipped_steps` and `outlier_steps` of `stats()`; `grad_norm` of the last update, if
            `history` has one. Numbers only, also before the first update and for a disabled scaler.
        """
        stats = self.stats()
        found: dict[str, float] = {
            "loss_scale": stats.scale,
            "skipped_steps": stats.skips,
            "outlier_steps": stats.outliers,
        }
        last = [] if self._history is None else self._history.rows(self._scale, 1)
        if last and last[0]["grad_norm"] is not None:
            found["grad_norm"] = last[0]["grad_norm"]
        return found

    @property
    def history(self) -> list[dict[str, Any]]:
        """The last 1,000 updates as plain dicts, oldest first. Synchronizes.

        Keys: `update` (counted from 1), `scale` (of the iteration), `overflow`, `grad_norm`, and `outlier` (whether a
        step was skipped only for its norm). `grad_norm` is the result of `clip_grad_norm_`, or the norm for
        `skip_above` without that call, or None. Of several calls and optimizers it is the largest.
        Empty before the first update, after `load_state_dict`, and when disabled.
        """
        return [] if self._scale is None or self._history is None else self._history.rows(self._scale)

    def overflow_report(
        self, model: torch.nn.Module | None = None, *, optimizer: torch.optim.Optimizer | None = None
    ) -> OverflowReport:
        """Report which parameters held inf or NaN in the last skipped step, the likely origin first. Synchronizes.

        The gradients of optimizers that skip on an accelerator are counted by this call: make it before they are
        cleared.

        Args:
            model: the model whose names for parameters to use; None: the names of an optimizer that was made
                with `named_parameters()`, or group and position.
            optimizer: the optimizer whose last step to report; None: all optimizers.

        Returns:
            A tuple of `NonFiniteGradient`, which prints as a report; empty if nothing was skipped.

        Raises:
            TypeError: `model` is not a module.
        """
        if model is not None and not hasattr(model, "named_parameters"):
            raise TypeError(
                f"model is {type(model).__name__}; expected the model whose names to use; pass optimizer= by keyword"
            )
        gradients: list[Counted] = []
        for stepped, last in list(self._records.items()):
            if last.found_inf is None or (optimizer is not None and optimizer is not stepped):
                continue
            if last.counts is not None:
                gradients += last.counts
            elif bool(last.found_inf != 0):
                gradients += count_nonfinite(stepped)
        return report(gradients, model)

    def check_ranks(self, process_group: Any = None) -> None:
        """Raise if loss scales or numbers of executed steps differ between ranks. Every rank must call it.

        Under DDP all ranks have the same gradients, and the scaler exchanges nothing. Ranks still diverge if one of
        them loads another state, or steps parameters outside DDP. Call it now and then, after `update`. It
        synchronizes: an all-reduce of eight numbers and two reads. No-op in a single process and when disabled.

        Args:
            process_group: the ranks to compare; None: all.

        Raises:
            RuntimeError: ranks differ; the message, on every rank, has the lowest and the highest values.
        """
        if not self._enabled or not ranks.several():
            return
        stats = self.stats()
        compared = {name: float(getattr(stats, name)) for name in ("scale", "updates", "steps", "skips")}
        differing = ranks.differing(compared, self._where(), process_group)
        if differing:
            ranges = ", ".join(f"{name} from {low:g} to {high:g}" for name, (low, high) in differing.items())
            raise RuntimeError(
                f"the scalers of the ranks differ: {ranges}. Load the same scaler state on all ranks, and name the "
                "ranks that hold shards: GradScaler(process_group=...)"
            )

    def _check_stuck(self, scale: float, skips_in_a_row: int) -> None:
        """Call `on_stuck` for a step that overflowed at a scale that can hardly fall further, or never falls."""
        rule = self._rule
        if isinstance(rule, DynamicLossScale):
            is_stuck = scale <= rule.stuck_scale
            message = (
                f"the loss scale has fallen to {scale:.3g} and gradients still overflow: no scale will help. The "
                "values are inf or NaN for another reason; "
            )
        else:
            is_stuck = skips_in_a_row >= _STUCK_STEPS
            message = f"gradients were inf or NaN in {skips_in_a_row} steps in a row, and all of them were skipped; "
        message += "scaler.overflow_report() names the parameters, scaler.history shows when it began."
        if not is_stuck:
            return
        if callable(self.on_stuck):
            self.on_stuck(self.stats())
        elif self.on_stuck == "raise":
            raise LossScaleStuckError(message)
        else:
            self._warn_once("stuck", message)

    def _warn_once(self, topic: str, message: str) -> None:
        """Warn once per topic, at the user's line."""
        if topic not in self._warned:
            self._warned.add(topic)
            warn_user(message)

    # Saving, loading, copying

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain Python values. Synchronizes; call it after `update()`.

        Returns:
            torch's five entries, which torch.amp.GradScaler can load, and "ampkit" with the strategy, its counters,
            the counts of `stats` and the norms of `TimesMedian`; `{}` when disabled.
        """
        if not self._enabled:
            return {}
        # All entries exist before the first use: torch.distributed.checkpoint loads no others.
        if self._scale is None or self._history is None:
            counters = self._first_state(torch.device("cpu"))[2:]
            totals = {**dict.fromkeys(COUNTS, 0), **self._init_totals}
        else:
            counters, totals = self._counters, self._history.to_dict(self._scale)
        norms = [
            [*norm_limit.size(optimizer), [norm for norm in record.norms.tolist() if norm < math.inf]]
            for optimizer, record in self._records.items()
            if record.norms is not None
        ]
        saved = [*norms, *self._init_norms]
        return saved_state.to_dict(self._rule, self.get_scale(), self._get_growth_tracker(), counters, totals, saved)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of torch.amp.GradScaler. Does nothing when disabled. Never synchronizes.

        The saved factors override the constructor's, as in torch. Unknown entries, and entries of another kind of
        strategy than this scaler's, are ignored with a warning. After an error nothing has been loaded.

        Args:
            state_dict: the result of `state_dict()`.

        Raises:
            RuntimeError: `state_dict` is empty, as from a disabled scaler.
            KeyError: entries are missing; the message names them.
            TypeError: an entry has another type.
            ValueError: a scale, a strategy or a count cannot be used.
        """
        if self._enabled:
            self._take_over(saved_state.loadable(state_dict, self._rule))

    def _take_over(self, new: saved_state.Loadable) -> None:
        """Continue from a saved state; tensors keep their addresses."""
        self._rule, self._init_scale = new.rule, new.scale
        self._init_growth_tracker, self._init_counters = new.growth_tracker, new.counters
        self._init_totals, self._init_norms = new.totals, new.norms
        for optimizer, record in self._records.items():
            norms = self._first_norms(optimizer)
            if record.norms is not None and norms is not None:
                record.norms.copy_(norms)
        if self._scale is not None and self._growth_tracker is not None:
            self._check_scale_growth_tracker("load_state_dict")
            live = self._scale, self._growth_tracker, *self._counters
            for tensor, value in zip(live, self._first_state(self._scale.device), strict=True):
                tensor.copy_(value)
            self._history = History(self._scale.device, new.totals)

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings, and the state as numbers. Synchronizes."""
        fresh = object.__new__(ScalerBase)
        fresh._start()
        state = {name: value for name, value in vars(self).items() if name not in vars(fresh)}
        if not self._enabled:
            return state
        if self._states:
            raise AssertionError(
                "A GradScaler instance may only be pickled at the beginning of an iteration, or at the end after "
                "scaler.update(): its record of this iteration's gradients is not saved."
            )
        saved = self.state_dict()
        own = saved[saved_state.OWN_KEY]
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

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self.process_group)] = self.process_group  # process groups cannot be copied
        copied = object.__new__(type(self))
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied


def _refuse_capture(device: torch.device, what: str) -> None:
    """Raise `RuntimeError` during a CUDA graph capture, where `what` would be made again by each replay."""
    if ampkit_kernels.is_capturing(device):
        raise RuntimeError(
            f"{what} would be made inside a CUDA graph capture, and each replay would reset it; run a whole iteration "
            "(scale, clipping, step, update) before the capture"
        )


def _device_type(device: str | torch.device | None) -> str:
    """Return the type of a device or of its name; for None the current accelerator's, or "cpu" without one."""
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
