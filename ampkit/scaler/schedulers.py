"""Learning-rate schedules under loss scaling: no step of the optimizer, no step of the schedule."""

from __future__ import annotations

from typing import Any

from ampkit.scaler.grad_scaler import GradScaler


def scheduler_step(scheduler: Any, scaler: GradScaler, *args: Any) -> bool:
    """Advance a learning-rate scheduler if its optimizer's last step was taken; call it after `scaler.step`.

    A schedule that advances on skipped steps ends too early. Waits for the device only when the optimizer skips there
    by itself (`fused=True`, `ampkit.optim`) and the answer is not known yet.

    Args:
        scheduler: a scheduler of torch.optim.lr_scheduler, or anything with `optimizer` and `step`.
        scaler: the scaler that stepped `scheduler.optimizer`.
        args: handed to `scheduler.step`, as ReduceLROnPlateau needs.

    Returns:
        Whether the scheduler was advanced.

    Raises:
        RuntimeError: the scaler has not stepped this optimizer.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = torch.optim.SGD([weight], lr=1.0)
    >>> schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    >>> scaler = GradScaler("cpu")
    >>> scaler.scale(weight.sum() * float("inf")).backward()
    >>> scaler.step(optimizer)
    >>> scheduler_step(schedule, scaler)
    False
    """
    if not scaler.stepped(scheduler.optimizer):
        return False
    scheduler.step(*args)
    return True
