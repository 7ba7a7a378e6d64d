"""What a GradScaler can tell about itself: counts, history, culprits, and the alarm for a collapsed scale."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ampkit.gradients import kernels
from ampkit.scaler._scaler_checks import ScalerChecks
from ampkit.scaler.history import Ledger, ScalerStats
from ampkit.scaler.loss_scale import DynamicLossScale
from ampkit.scaler.overflow import Examined, LossScaleStuckError, OverflowReport, examine


class _Outcome(NamedTuple):
    """How an optimizer's last step ended: the flag, and what the host knows of it (None: not yet)."""

    found_inf: Tensor
    skipped: bool | None


class ScalerInsight(ScalerChecks):
    """Step results, statistics and reports; not meant to be used alone."""

    on_stuck: Literal["warn", "raise"] | Callable[[ScalerStats], None]
    count_every_step: bool

    def _start_watching(self) -> None:
        self._outcomes: weakref.WeakKeyDictionary[Any, _Outcome] = weakref.WeakKeyDictionary()
        self._examined: weakref.WeakKeyDictionary[Any, Examined] = weakref.WeakKeyDictionary()
        self._warned: set[str] = set()
        self._alarm_due = False

    def skipped(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """Whether the last `step(optimizer)` left the parameters alone, as a 0-d bool tensor on the device.

        True after inf or NaN, and after a step that found no gradients. Right for every optimizer, fused ones included;
        `if scaler.skipped(optimizer):` is where a host would wait. False when the scaler is disabled.

        Raises:
            RuntimeError: `step` has not been called with this optimizer.
        """
        if not self._enabled:
            return torch.zeros((), dtype=torch.bool)
        return self._outcome(optimizer).found_inf != 0

    def stepped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the last `step(optimizer)` was taken, as a Python value: the opposite of `skipped`.

        Waits for the device only when the optimizer skips there by itself. True when the scaler is disabled.

        Raises:
            RuntimeError: `step` has not been called with this optimizer.
        """
        if not self._enabled:
            return True
        found_inf, skipped = self._outcome(optimizer)
        return not (bool(found_inf != 0) if skipped is None else skipped)

    def _outcome(self, optimizer: Any) -> _Outcome:
        if optimizer not in self._outcomes:
            raise RuntimeError(
                f"scaler.step() has not been called with this {type(optimizer).__name__} yet; expected the object that "
                "was passed to step(), not an optimizer that it wraps"
            )
        return self._outcomes[optimizer]

    def stats(self) -> ScalerStats:
        """Counts of steps, skips, growths and more, with the scale. One host read."""
        if not self._enabled:
            return ScalerStats(scale=1.0)
        if self._scale is None:
            # nothing lives on a device yet: what a checkpoint brought is all there is
            return Ledger(torch.device("cpu"), 0, self._init_totals).totals(torch.tensor(self._init_scale))
        state, ledger = self._live_state()
        stats = ledger.totals(state.scale)
        if self._alarm_due and stats.consecutive_skips:
            self._alarm_due = False
            self._sound_alarm(stats.scale)
        return stats

    @property
    def history(self) -> list[dict[str, Any]]:
        """The last updates as plain dicts, oldest first: `update`, `scale`, `overflow`, `grad_norm`. One host read."""
        if not self._enabled or self._scale is None:
            return []
        state, ledger = self._live_state()
        return ledger.rows(state.scale)

    def overflow_report(
        self, model: torch.nn.Module | None = None, *, optimizer: torch.optim.Optimizer | None = None
    ) -> OverflowReport:
        """Which parameters held inf or NaN in the last skipped step, worst first. Reads the device.

        Optimizers that skip on an accelerator are examined when this is called, so call it before their gradients are
        cleared, or make the scaler with `count_every_step=True`.

        Args:
            model: names parameters; without it the optimizer's own names are used, where it was made with
                `named_parameters()`, else group and position.
            optimizer: whose step; by default every optimizer's that this scaler has stepped.
        """
        chosen = list(self._outcomes) if optimizer is None else [optimizer]
        found: OverflowReport = OverflowReport()
        for each in chosen:
            examined = self._examined.get(each)
            if examined is None and each in self._outcomes and not self.stepped(each):
                examined = examine(each)
            if examined is not None:
                found = found.merged(examined.report(model))
        return found

    def _examine(self, optimizer: Any, found_inf: Tensor, *, skipped: bool | None) -> bool | None:
        """Count inf and NaN for the report where that is due, before the step: master weights' gradients are gone
        after it. Returns `skipped`, or where that was None the flag as far as the host can see it.
        """
        if skipped is None and found_inf.is_cpu:
            skipped = kernels.host_value_or_none(found_inf) != 0
        if skipped or (skipped is None and self.count_every_step):
            self._examined[optimizer] = examined = examine(optimizer)
            for _, counts in examined.counts if self._scale is not None else ():
                self._live_state()[1].note_nonfinite(counts)
        elif skipped is None:
            self._examined.pop(optimizer, None)
        return skipped

    def _note_step(self, optimizer: Any, found_inf: Tensor, *, skipped: bool | None) -> None:
        """Remember how a step ended; `skipped` None when only the device knows."""
        if self._scale is not None:  # else another's scale, which is not this scaler's to count
            ledger = self._live_state()[1] if self._ledger is None else self._ledger
            ledger.note_step(found_inf)
        self._outcomes[optimizer] = _Outcome(found_inf, skipped)
        self._alarm_due = skipped is None
        if skipped:
            _calm_schedulers(optimizer)
            self._sound_alarm(self.get_scale())

    def _note_no_gradients(self, optimizer: Any) -> None:
        state, ledger = self._live_state()
        ledger.note_no_gradients()
        self._outcomes[optimizer] = _Outcome(torch.ones_like(state.scale), True)
        self._examined.pop(optimizer, None)
        _calm_schedulers(optimizer)

    def _read_flag(self, found_inf: Tensor, state: dict[str, Any]) -> bool:
        """The flag as a Python value: one host read. Ranks' scales, where known, come with it and are compared."""
        if "spread" not in state:
            return found_inf.item() != 0
        flag, lowest, highest = torch.cat((found_inf.reshape(1), state["spread"])).tolist()
        if lowest != highest:
            self._warn_once(
                "spread",
                f"ranks that must skip together hold different loss scales, from {lowest:.6g} to {highest:.6g}: their "
                "gradients are weighted differently. Load the same scaler state on all ranks, and call update() "
                "equally often on each.",
                stacklevel=5,
            )
        return flag != 0

    def _sound_alarm(self, scale: float) -> None:
        """Call `on_stuck` when a step overflowed at a scale that can hardly fall further."""
        rule = self._loss_scale
        if not isinstance(rule, DynamicLossScale) or scale > rule.stuck_scale:
            return
        if callable(self.on_stuck):
            self.on_stuck(self.stats())
            return
        message = (
            f"the loss scale has fallen to {scale:.3g} and gradients still overflow: no scale will help. The "
            f"values are inf or NaN for another reason; scaler.overflow_report() names the parameters, "
            f"scaler.history shows when it began."
        )
        if self.on_stuck == "raise":
            raise LossScaleStuckError(message)
        self._warn_once("stuck", message, stacklevel=6)

    def _warn_once(self, topic: str, message: str, stacklevel: int) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            warnings.warn(message, stacklevel=stacklevel)


def _calm_schedulers(optimizer: Any) -> None:
    """Tell torch's LR schedulers that the skipped step was asked for: they warn when none has been seen."""
    if hasattr(getattr(optimizer, "step", None), "_wrapped_by_lr_sched"):
        optimizer._opt_called = True
