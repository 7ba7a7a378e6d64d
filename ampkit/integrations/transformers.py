"""transformers: `use_ampkit(trainer)` before `train`, for `Trainer` and its subclasses, TRL's among them."""

from __future__ import annotations

from typing import Any, TypeVar

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ampkit.engine.weight_cache import WeightCache
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
    cache: WeightCache | None = None,
) -> T:
    """Let a `Trainer` cast by ampkit's regions and scale by its `GradScaler`; returns it. Call it before `train`.

    `TrainingArguments` say what is done, as ever: `bf16=True`, `fp16=True` or neither, which leaves the trainer as it
    is. Clipping, `grad_norm`, schedulers and checkpoints follow; with a scaler the logs also have `loss_scale` and
    `skipped_steps`. What the model wants kept in float32 is kept (`Policy.keep_in_fp32`), except under FSDP and torch's
    own policy: T5 trains in float16.

    Args:
        trainer: one that has not trained yet.
        policy: what its regions cast; None: the default for its device.
        scaler: in place of `GradScaler(device)`, with `fp16=True`; with `bf16=True`, where there is none, for the steps
            that it skips: `GradScaler(device, loss_scale=NoOpLossScale(), skip_above=...)`.
        cache: a `WeightCache` that keeps casts between batches.

    After an error the trainer is as it was.

    Raises:
        ValueError: a scaler with neither `fp16` nor `bf16`, or the name of no policy.
        RuntimeError: the trainer has prepared its model, or DeepSpeed or XLA do the casting.
        TypeError: something that is not a `Trainer`, or a scaler of torch's.
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(f"use_ampkit takes a transformers.Trainer; got {type(trainer).__name__}")
    accelerate.use_ampkit(trainer.accelerator, policy=policy, scaler=scaler, cache=cache)
    if isinstance(trainer.accelerator.scaler, GradScaler):
        trainer.callback_handler.callbacks.insert(0, _LogScale(trainer.accelerator))    # before those that report logs
    return trainer


class _LogScale(TrainerCallback):
    """Adds the loss scale and the count of skipped steps to what is logged; of several ranks, that they agree."""

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
        """Called with what is about to be shown."""
        if logs is not None and "loss" in logs:
            self._accelerator.scaler.check_ranks()
            stats = self._accelerator.scaler.stats()
            seen = {"loss_scale": stats.scale, "skipped_steps": stats.skips + stats.outliers}
            logs.update(seen)
            state.log_history[-1].update(seen)
