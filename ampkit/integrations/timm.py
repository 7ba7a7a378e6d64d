"""timm: `NativeScaler`, the interface of timm's loss scaler over `ampkit.GradScaler`."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from timm.utils import NativeScaler as TimmScaler
from torch import Tensor

from ampkit.integrations._precision_plugin import checked_scaler
from ampkit.scaler.grad_scaler import GradScaler

__all__ = ["NativeScaler"]


class NativeScaler(TimmScaler):
    """timm's class of this name over `ampkit.GradScaler`, which clips gradients while it unscales them.

    Args:
        device: the device type, such as "cuda".
        scaler: the scaler; None: `GradScaler(device)`.

    Raises:
        TypeError: `scaler` is not an `ampkit.GradScaler`.
    """

    def __init__(self, device: str = "cuda", *, scaler: GradScaler | None = None) -> None:
        self.scaler = self._scaler = checked_scaler(scaler) or GradScaler(device)

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
        """Run backward and, with `need_update`, clip and step, which synchronizes as `GradScaler.step` does.

        Args:
            loss: the loss, not scaled.
            optimizer: steps the parameters.
            clip_grad: the limit for the gradients; None: no clipping.
            clip_mode: "norm" or "value"; with `parameters`, also timm's other modes.
            parameters: timm unscales and clips the gradients of these; None: ampkit clips all gradients of the
                optimizer as it unscales them.
            create_graph: as of `Tensor.backward`.
            need_update: False only accumulates gradients.

        Raises:
            ValueError: `clip_mode` is another one and `parameters` is None; backward has not run.
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
