"""transformers: `use_ampkit(trainer)`, before `train`, for `Trainer` and its subclasses, such as TRL's."""

from __future__ import annotations

from typing import Any, TypeVar

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ampkit.integrations import accelerate
from ampkit.policy.policy import Policy
from ampkit.scaler.grad_scaler import GradScaler

__all__ = ["use_ampkit"]

T = TypeVar("T", bound=Trainer)


def use_ampkit(
    trainer: T,
    *,
    policy: Policy | str | None = None,
    scaler: GradScaler | None = None,
) -> T:
    """Use ampkit's regions and `GradScaler` in a `Trainer`. Call it before `train`.

    `TrainingArguments` still select the precision: `bf16=True`, `fp16=True`, or neither, which leaves the trainer
    unchanged. Clipping, `grad_norm`, schedulers and checkpoints work as before; with a scaler the logs also have
    `loss_scale` and `skipped_steps`. Modules that the model declares to be kept in float32 are kept
    (`keep_in_fp32`), except under FSDP and torch's own policy: T5 trains in float16.

    Args:
        trainer: a trainer that has not trained yet.
        policy: the policy of its regions, or its name; None: the default for its device.
        scaler: the scaler; None: `GradScaler(device)` with `fp16=True`, no scaler with `bf16=True`, where one can skip
            steps: `GradGuard(device, skip_above=...)`.

    Returns:
        `trainer`.

    Raises:
        TypeError: `trainer` is not a `Trainer`, or `scaler` not an `ampkit.GradScaler`.
        ValueError: a scaler without `fp16` or `bf16`, or an unknown name of a policy.
        RuntimeError: the trainer has prepared its model, or DeepSpeed or XLA cast for it.

    After an error the trainer is unchanged.
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(f"use_ampkit takes a transformers.Trainer; got {type(trainer).__name__}")
    accelerate.use_ampkit(trainer.accelerator, policy=policy, scaler=scaler)
    if isinstance(trainer.accelerator.scaler, GradScaler):
        trainer.callback_handler.callbacks.insert(0, _LogScale(trainer.accelerator))  # before callbacks that report
    return trainer


class _LogScale(TrainerCallback):
    """Adds the loss scale and the number of skipped steps to the logs, after a check that several ranks agree."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add to `logs`, before they are shown. Synchronizes with the device."""
        if logs is not None and "loss" in logs:
            self._accelerator.scaler.check_ranks()
            stats = self._accelerator.scaler.stats()
            scaler_logs = {"loss_scale": stats.scale, "skipped_steps": stats.skips + stats.outliers}
            logs.update(scaler_logs)
            state.log_history[-1].update(scaler_logs)
