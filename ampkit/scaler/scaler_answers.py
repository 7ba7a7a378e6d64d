"""What a scaler answers about the past: skipped steps, counts, overflow reports, a scale that is stuck."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampkit.gradients import ranks
from ampkit.scaler.history import History, ScalerStats
from ampkit.scaler.loss_scale import DynamicLossScale
from ampkit.scaler.optimizer_notes import LastStep
from ampkit.scaler.overflow_report import Counted, OverflowReport, count_nonfinite, report
from ampkit.scaler.scaler_state import ScalerState
from ampkit.user_code import warn_user


class LossScaleStuckError(RuntimeError):
    """Gradients keep overflowing although the loss scale has collapsed."""


class ScalerAnswers(ScalerState):
    """The methods of `GradScaler` that answer questions; none changes the scale or an optimizer."""

    def found_inf(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """Whether the last `step(optimizer)` found inf or NaN and was skipped, as a 0-d bool tensor on the device.

        Valid for every optimizer, fused ones included. Never syncs, unlike `if scaler.found_inf(optimizer):`. False
        after a step that found no gradients, and when the scaler is disabled.

        Raises:
            RuntimeError: `step` has not been called with this optimizer.
        """
        if not self._enabled:
            return torch.zeros((), dtype=torch.bool, device="cpu")
        flag: Any = self._last_step_taken_of(optimizer).found_inf
        return flag != 0

    def stepped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the last `step(optimizer)` was taken, as a Python value; False without gradients too.

        Waits for the device only when the optimizer skips there by itself. True when the scaler is disabled. Raises
        RuntimeError if `step` has not been called with this optimizer. So a schedule follows its optimizer:
        `if scaler.stepped(optimizer): schedule.step()`.
        """
        if not self._enabled:
            return True
        last = self._last_step_taken_of(optimizer)
        is_outlier = last.outlier is not None and bool(last.outlier != 0)
        return not (is_outlier or (bool(last.found_inf != 0) if last.skipped is None else last.skipped))

    def _last_step_taken_of(self, optimizer: Any) -> LastStep:
        last = self._last_steps.get(optimizer)
        if last is None or last.found_inf is None:
            raise RuntimeError(
                f"scaler.step() has not been called with this {type(optimizer).__name__} yet; expected the object that "
                "was passed to step(), not an optimizer that it wraps"
            )
        return last

    def stats(self) -> ScalerStats:
        """Counts of steps, skips, growths and more, with the scale; calls `on_stuck` if that is due. One host read."""
        if self._scale is None or self._history is None:    # the counts are those of a checkpoint, if any
            cpu = torch.device("cpu")
            return History(cpu, self._init_totals).totals(torch.full((), self.get_scale(), device=cpu))
        stats = self._history.totals(self._scale)
        if self._stuck_check_due and stats.consecutive_skips:
            self._stuck_check_due = False
            self._check_stuck(stats.scale)
        return stats

    @property
    def history(self) -> list[dict[str, Any]]:
        """The last 1,000 updates as plain dicts, oldest first: `update`, `scale`, `overflow`, `grad_norm`, `outlier`.

        `grad_norm` is what `clip_grad_norm_` returned; without that call the norm that `skip_above` judged, None where
        there is neither. Of several calls and optimizers it is the largest. Empty before the first update, after
        `load_state_dict`, and when disabled. Waits for the device.
        """
        return [] if self._scale is None or self._history is None else self._history.rows(self._scale)

    def overflow_report(
        self, model: torch.nn.Module | None = None, *, optimizer: torch.optim.Optimizer | None = None
    ) -> OverflowReport:
        """Which parameters held inf or NaN in the last skipped step, the likely origin first. Reads the device.

        Optimizers that skip on an accelerator are examined when this is called: call it before their gradients are
        cleared.

        `model` names parameters; without it the optimizer's own names are used, where it was made with
        `named_parameters()`, else group and position. `optimizer` says whose step; by default of every optimizer.
        """
        if model is not None and not hasattr(model, "named_parameters"):
            raise TypeError(
                f"model is {type(model).__name__}; expected the model whose names to use; optimizer= goes by keyword"
            )
        found: list[Counted] = []
        for each, last in list(self._last_steps.items()):
            if last.found_inf is None or (optimizer is not None and optimizer is not each):
                continue
            if last.counts is not None:
                found += last.counts
            elif bool(last.found_inf != 0):
                found += count_nonfinite(each)
        return report(found, model)

    def check_ranks(self, process_group: Any = None) -> None:
        """Raise if ranks hold different loss scales or have taken different numbers of steps. Every rank must call it.

        Under DDP all ranks see the same gradients, and the scaler exchanges nothing. They still drift apart when one of
        them loads another state, or steps parameters that DDP does not know. Call it now and then, after `update`: it
        costs an all-reduce of eight numbers and two host reads. No-op in a single process and when disabled.

        Args:
            process_group: the ranks to compare; None: all.

        Raises:
            RuntimeError: what differs, on every rank, with the lowest and the highest value.
        """
        if not self._enabled or not ranks.several():
            return
        stats = self.stats()
        compared = {name: float(getattr(stats, name)) for name in ("scale", "updates", "steps", "skips")}
        differing = ranks.differing(compared, self._where(), process_group)
        if differing:
            ranges = ", ".join(f"{name} from {low:g} to {high:g}" for name, (low, high) in differing.items())
            raise RuntimeError(
                f"ranks have drifted apart: {ranges}. Load the same scaler state on all ranks, and tell the "
                "scaler which ranks hold shards: GradScaler(process_group=...)"
            )

    def _check_stuck(self, scale: float) -> None:
        """Call `on_stuck` when a step overflowed at a scale that can hardly fall further."""
        rule = self._rule
        if not isinstance(rule, DynamicLossScale) or scale > rule.stuck_scale:
            return
        message = (
            f"the loss scale has fallen to {scale:.3g} and gradients still overflow: no scale will help. The "
            f"values are inf or NaN for another reason; scaler.overflow_report() names the parameters, "
            f"scaler.history shows when it began."
        )
        if callable(self.on_stuck):
            self.on_stuck(self.stats())
        elif self.on_stuck == "raise":
            raise LossScaleStuckError(message)
        else:
            self._warn_once("stuck", message)

    def _warn_once(self, topic: str, message: str) -> None:
        """Warn once per topic, at the line that called the package."""
        if topic not in self._warned:
            self._warned.add(topic)
            warn_user(message)
