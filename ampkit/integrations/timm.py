"""timm: its loss scaler's interface over ampkit's."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from timm.utils import NativeScaler as TimmScaler
from torch import Tensor

from ampkit.integrations._precision import checked
from ampkit.scaler.grad_scaler import GradScaler

__all__ = ["NativeScaler"]


class NativeScaler(TimmScaler):
    """timm's class of this name over `ampkit.GradScaler`, which clips gradients while it unscales them.

    Args:
        device: the device type, as "cuda".
        scaler: in place of `GradScaler(device)`.

    Raises:
        TypeError: a scaler of torch's.
    """

    def __init__(self, device: str = "cuda", *, scaler: GradScaler | None = None) -> None:
        self.scaler = self._scaler = checked(scaler) or GradScaler(device)

    def __call__(
        self,
        loss: Tensor,
        optimizer: torch.optim.Optimizer,
        clip_grad: float | None = None,
        clip_mode: str = "norm",
        parameters: Iterable[Tensor] | None = None,
        create_graph: bool = False,
        need_update: bool = True,
    ) -> None:
        """Run backward and, with `need_update`, clip and step.

        With `parameters` gradients are unscaled and clipped by timm. Without them "norm" and "value" clip all that the
        optimizer holds, in the pass that unscales.

        Raises:
            ValueError: another `clip_mode` without `parameters`. No backward has run then.
        """
        if clip_grad is None or parameters is not None or not need_update:
            super().__call__(loss, optimizer, clip_grad, clip_mode, parameters, create_graph, need_update)
            return
        if clip_mode not in ("norm", "value"):
            raise ValueError(
                f"clip_mode is {clip_mode!r} without parameters; expected 'norm' or 'value', or pass parameters="
            )
        self.scaler.scale(loss).backward(create_graph=create_graph)
        clip = self.scaler.clip_grad_norm_ if clip_mode == "norm" else self.scaler.clip_grad_value_
        clip(optimizer, clip_grad)
        self.scaler.step(optimizer)
        self.scaler.update()
