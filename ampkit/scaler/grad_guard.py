"""GradGuard: a `GradScaler` that only skips steps, for training in bfloat16 and float32."""

from __future__ import annotations

from typing import Any

import torch

from ampkit.scaler.grad_scaler import GradScaler
from ampkit.scaler.loss_scale import NoOpLossScale
from ampkit.scaler.scaler_base import OnStuck
from ampkit.scaler.skip_above import TimesMedian


class GradGuard(GradScaler):
    """Skip steps whose gradients are not finite; nothing is scaled. For training in bfloat16 and float32.

    One inf or NaN in a gradient makes every weight NaN, and then every checkpoint. A guard is a `GradScaler` whose
    strategy is `NoOpLossScale`, and has all its methods. `scale` returns the loss unchanged and need not be called.
    Synchronizes as `GradScaler` does.

    Args:
        device: device type that the script trains on; None: the current accelerator, or "cpu" without one.
        enabled, process_group, allow_fp16, on_stuck, skip_above: as in `GradScaler`.

    Raises:
        TypeError, ValueError: as `GradScaler`.

    >>> import torch
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> guard = GradGuard("cpu")
    >>> model(torch.full((2, 4), float("nan"))).mean().backward()
    >>> guard.step(optimizer)
    >>> guard.update()
    >>> guard.stats().skips, bool(model.weight.isfinite().all())
    (1, True)
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        enabled: bool = True,
        *,
        process_group: Any = None,
        allow_fp16: bool = False,
        on_stuck: OnStuck = "warn",
        skip_above: float | TimesMedian | None = None,
    ) -> None:
        super().__init__(
            device,
            enabled=enabled,
            loss_scale=NoOpLossScale(),
            process_group=process_group,
            allow_fp16=allow_fp16,
            on_stuck=on_stuck,
            skip_above=skip_above,
        )
