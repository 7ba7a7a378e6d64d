"""What a scaler answers about the past: was a step skipped, why, how often, and is the scale stuck."""

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
    """The methods of `GradScaler` that answer questions; none of them changes the scale or an optimizer."""

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
        flag: Any = self._last_step_taken_of(optimizer).found_inf
        return flag != 0

    def stepped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the last `step(optimizer)` was taken, so that a schedule can follow its optimizer.

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
        last = self._last_step_taken_of(optimizer)
        if last.outlier is not None and bool(last.outlier != 0):
            return False
        if last.skipped is None:  # only the device knows
            return bool(last.found_inf == 0)
        return not last.skipped

    def _last_step_taken_of(self, optimizer: Any) -> LastStep:
        last = self._last_steps.get(optimizer)
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
        if self._scale is None or self._history is None:  # the counts are those that were loaded, if any
            cpu = torch.device("cpu")
            return History(cpu, self._init_totals).totals(torch.full((), self.get_scale(), device=cpu))
        stats = self._history.totals(self._scale)
        if self._stuck_check_due and stats.consecutive_skips:
            self._stuck_check_due = False
            self._check_stuck(stats.scale)
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

        Keys: `update`, counted from 1; `scale`, the one that the iteration used; `overflow`; `grad_norm`; `outlier`,
        whether a step was skipped for its norm alone. `grad_norm` is the result of `clip_grad_norm_`, without that call
        the norm that `skip_above` judged, and None without either; of several calls and optimizers it is the largest.
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
            model: the model whose names for parameters to use; None: those of an optimizer that was made with
                `named_parameters()`, else group and position.
            optimizer: the optimizer whose last step to report; None: all optimizers.

        Returns:
            A tuple of `NonFiniteGradient`, which prints as a report; empty if nothing was skipped.

        Raises:
            TypeError: `model` is no module.
        """
        if model is not None and not hasattr(model, "named_parameters"):
            raise TypeError(
                f"model is {type(model).__name__}; expected the model whose names to use; pass optimizer= by keyword"
            )
        gradients: list[Counted] = []
        for stepped, last in list(self._last_steps.items()):
            if last.found_inf is None or (optimizer is not None and optimizer is not stepped):
                continue
            if last.counts is not None:
                gradients += last.counts
            elif bool(last.found_inf != 0):
                gradients += count_nonfinite(stepped)
        return report(gradients, model)

    def check_ranks(self, process_group: Any = None) -> None:
        """Raise if ranks hold different loss scales or have taken different numbers of steps. Every rank must call it.

        Under DDP all ranks see the same gradients, and the scaler exchanges nothing. Ranks still drift apart if one of
        them loads another state, or steps parameters that DDP does not know. Call it now and then, after `update`. It
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
                f"ranks have drifted apart: {ranges}. Load the same scaler state on all ranks, and name the ranks "
                "that hold shards: GradScaler(process_group=...)"
            )

    def _check_stuck(self, scale: float) -> None:
        """Call `on_stuck` for a step that overflowed at a scale that can hardly fall further."""
        rule = self._rule
        if not isinstance(rule, DynamicLossScale) or scale > rule.stuck_scale:
            return
        message = (
            f"the loss scale has fallen to {scale:.3g} and gradients still overflow: no scale will help. The "
            "values are inf or NaN for another reason; scaler.overflow_report() names the parameters, "
            "scaler.history shows when it began."
        )
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
