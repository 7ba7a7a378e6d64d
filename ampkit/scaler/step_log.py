"""How steps ended: outcomes, culprits of skipped ones, the alarm for a collapsed scale, and warnings given once."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ampkit.gradients import kernels
from ampkit.scaler.backward_order import BackwardOrder
from ampkit.scaler.history import Ledger, ScalerStats
from ampkit.scaler.live_scale import LiveScale
from ampkit.scaler.loss_scale import DynamicLossScale
from ampkit.scaler.optimizer_record import OptimizerRecord
from ampkit.scaler.overflow import Examined, LossScaleStuckError, examine
from ampkit.scaler.overflow_report import Counted, OverflowReport, arrange
from ampkit.user_warnings import warn_user

OnStuck = Literal["warn", "raise"] | Callable[[ScalerStats], None]


_IDLE_STEPS = 3
"""Steps without gradients, from an optimizer's first step on, that are followed by a warning."""


class Outcome(NamedTuple):
    """How an optimizer's last step ended: the flag, and what the host knows of it (None: not yet); and how many steps
    there were if none of them found a gradient, else 0.
    """

    found_inf: Tensor
    skipped: bool | None
    idle_steps: int = 0


class StepLog:
    """What a scaler knows about its steps. `warned` holds the topics that have been warned about."""

    def __init__(self, live: LiveScale, *, on_stuck: OnStuck = "warn", count_every_step: bool = False) -> None:
        if on_stuck not in ("warn", "raise") and not callable(on_stuck):
            raise ValueError(f"on_stuck is {on_stuck!r}; expected 'warn', 'raise' or a function of ScalerStats")
        self._live = live
        self.on_stuck = on_stuck
        self.count_every_step = count_every_step
        self.warned: set[str] = set()
        self.alarm_due = False
        self.order = BackwardOrder()
        self._outcomes: weakref.WeakKeyDictionary[Any, Outcome] = weakref.WeakKeyDictionary()
        self._examined: weakref.WeakKeyDictionary[Any, Examined] = weakref.WeakKeyDictionary()

    def outcome_of(self, optimizer: Any) -> Outcome:
        """How the optimizer's last step ended. Raises `RuntimeError` where there was none."""
        if optimizer not in self._outcomes:
            raise RuntimeError(
                f"scaler.step() has not been called with this {type(optimizer).__name__} yet; expected the object that "
                "was passed to step(), not an optimizer that it wraps"
            )
        return self._outcomes[optimizer]

    def stepped(self, optimizer: Any) -> bool:
        """Whether the optimizer's last step was taken; waits for the device where it alone knows."""
        found_inf, skipped, _ = self.outcome_of(optimizer)
        return not (bool(found_inf != 0) if skipped is None else skipped)

    def note_step(self, optimizer: Any, found_inf: Tensor, *, skipped: bool | None) -> None:
        """Remember how a step ended; `skipped` None when only the device knows. Sounds the alarm if that is due."""
        live = self._live
        if live.scale is not None:  # else another scaler scales them; its steps are not counted here
            live.ledger.note_step(found_inf)
        self.order.note_step(first=optimizer not in self._outcomes, skipped=bool(skipped))
        self._outcomes[optimizer] = Outcome(found_inf, skipped)
        self.alarm_due = skipped is None
        if skipped:
            mark_optimizer_step_called(optimizer)
            self._sound_alarm(float(live.on(found_inf.device)))

    def note_no_gradients(self, optimizer: Any) -> None:
        """Remember a step that found nothing to do; warn of an optimizer that has never found a gradient."""
        self._live.ledger.note_no_gradients()
        before = self._outcomes.get(optimizer)
        idle_steps = 1 if before is None else before.idle_steps + (before.idle_steps > 0)
        self._outcomes[optimizer] = Outcome(torch.ones_like(self._live.tensor), True, idle_steps)
        if idle_steps == _IDLE_STEPS:
            self.warn_once(
                "idle",
                f"{type(optimizer).__name__} has found no gradients in its first {idle_steps} steps; its parameters "
                "stay as they are. Expected gradients from backward() of a scaled loss: the optimizer may hold "
                "parameters of another model, or parameters that are frozen or were replaced; the loss may be detached "
                "from them; zero_grad() may be called between backward() and step().",
            )
        self._examined.pop(optimizer, None)
        mark_optimizer_step_called(optimizer)

    def examine(self, optimizer: Any, found_inf: Tensor, *, skipped: bool | None) -> bool | None:
        """Count inf and NaN for the report where that is due, before the step: master weights' gradients are gone
        after it. Returns `skipped`, or where that was None the flag as far as the host can see it.
        """
        if skipped is None and found_inf.is_cpu:
            flag = kernels.host_value_or_none(found_inf)
            skipped = None if flag is None else flag != 0
        if skipped or (skipped is None and self.count_every_step):
            self._examined[optimizer] = examined = examine(optimizer)
            for _, counts in examined.counts if self._live.scale is not None else ():
                self._live.ledger.note_nonfinite(counts)
        elif skipped is None:
            self._examined.pop(optimizer, None)
        return skipped

    def report(self, model: torch.nn.Module | None, optimizer: Any) -> OverflowReport:
        """The culprits of the last skipped step of an optimizer; of every optimizer where it is None."""
        found: list[Counted] = []
        for each in list(self._outcomes) if optimizer is None else [optimizer]:
            examined = self._examined.get(each)
            if examined is None and each in self._outcomes and not self.stepped(each):
                examined = examine(each)
            if examined is not None:
                found += examined.read()
        self.order.wanted = True
        return arrange(found, self.order.use_of, model)

    def stats(self) -> ScalerStats:
        """The counts so far; sounds the alarm if steps that skip on the device left it due. One host read."""
        live = self._live
        if live.scale is None:
            # not placed yet: the counts are those of a checkpoint, if any
            return Ledger(torch.device("cpu"), 0, live.init_totals).totals(torch.tensor(live.init_scale, device="cpu"))
        stats = live.ledger.totals(live.scale)
        if self.alarm_due and stats.consecutive_skips:
            self.alarm_due = False
            self._sound_alarm(stats.scale)
        return stats

    def history(self) -> list[dict[str, Any]]:
        """The last updates, as `Ledger.rows`. One host read."""
        live = self._live
        return [] if live.scale is None else live.ledger.rows(live.scale)

    def read_flag(self, record: OptimizerRecord, found_inf: Tensor) -> bool:
        """The flag as a Python value: one host read. Ranks' scales, where known, come with it and are compared."""
        if record.scale_range is None:
            return found_inf.item() != 0
        flag, lowest, highest = torch.cat((found_inf.reshape(1), record.scale_range)).tolist()
        if lowest != highest:
            self.warn_once(
                "spread",
                f"ranks that must skip together hold different loss scales, from {lowest:.6g} to {highest:.6g}: their "
                "gradients are weighted differently. Load the same scaler state on all ranks, and call update() "
                "equally often on each.",
            )
        return flag != 0

    def warn_once(self, topic: str, message: str) -> None:
        """Warn once per topic, at the line that called the package."""
        if topic in self.warned:
            return
        self.warned.add(topic)
        warn_user(message)

    def _sound_alarm(self, scale: float) -> None:
        """Call `on_stuck` when a step overflowed at a scale that can hardly fall further."""
        rule = self._live.strategy
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
        self.warn_once("stuck", message)


def mark_optimizer_step_called(optimizer: Any) -> None:
    """Tell torch's LR schedulers that a skipped step was called: they warn if they have seen none."""
    if hasattr(getattr(optimizer, "step", None), "_wrapped_by_lr_sched"):
        optimizer._opt_called = True
