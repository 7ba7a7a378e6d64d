"""Gradients of one optimizer around a scaled backward, where some may have been unscaled before.

Each backward under a loss scale must meet empty `.grad`s, or scaled values would be added to unscaled ones.
`stash_unscaled` sets aside what is there; `unscale_and_merge` unscales the new gradients, in master weights if there
are any, and adds what was set aside.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import ampkit_kernels
from ampkit.gradients.collect import check_sums, collect
from ampkit.gradients.transfer import moved
from ampkit.whole_model.master_weights import MasterWeights


class GradientFlow:
    """The gradients of an optimizer, with or without master weights."""

    def __init__(self, optimizer: torch.optim.Optimizer, masters: MasterWeights | None = None) -> None:
        self.optimizer = optimizer
        self.masters = masters
        self._stashed: dict[Tensor, Tensor] = {}

    def params(self) -> list[Tensor]:
        """Every tensor in the optimizer's groups: masters where there are any."""
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def own_params(self) -> list[Tensor]:
        """The optimizer's parameters that backward itself fills: all but masters."""
        if self.masters is None:
            return self.params()
        masters = {id(master) for master in self.masters.masters()}
        return [param for param in self.params() if id(param) not in masters]

    def has_pending(self) -> bool:
        """Whether any parameter that backward fills holds a gradient."""
        halves = [] if self.masters is None else self.masters.halves()
        return any(param.grad is not None for param in (*self.own_params(), *halves))

    def stash_unscaled(self) -> None:
        """Set aside the unscaled gradients, so that backward starts from none."""
        for param in self.own_params():
            grad = param.grad
            if grad is not None:
                # A view is DDP's gradient_as_bucket_view: the next backward writes to that memory.
                self._stashed[param] = grad.clone() if grad._is_view() else grad
                param.grad = None

    def restore(self) -> None:
        """Drop what backward has left, and restore what was set aside."""
        for param in (*self.own_params(), *([] if self.masters is None else self.masters.halves())):
            param.grad = self._stashed.pop(param, None)

    def forget(self) -> None:
        """Drop what was set aside."""
        self._stashed.clear()

    @torch.no_grad()
    def unscale_and_merge(self, inv_scale: Tensor) -> tuple[dict[torch.device, Tensor], list[Any]]:
        """Multiply what backward has left by `inv_scale`, check it, and add what was set aside.

        Returns:
            Flags by device, 1 where a gradient was not finite, and the process groups that must agree on
            them. Never syncs.
        """
        found: dict[torch.device, Tensor] = {}
        groups: list[Any] = []
        if self.masters is not None:
            self.masters.take_gradients_(inv_scale, found)
            groups += collect(self.masters.masters()).groups
        gradients = collect(self.own_params())
        groups += gradients.groups
        for device, tensors in gradients.by_device.items():
            if device not in found:
                found[device] = torch.zeros((), dtype=torch.float32, device=device)
            factor = moved(inv_scale, device)
            ampkit_kernels.backend(factor).unscale_(tensors, factor, found[device])
        check_sums(gradients.duplicated, None, found)
        for param, held in self._stashed.items():
            param.grad = held if param.grad is None else held + param.grad
        self._stashed.clear()
        return found, list(dict.fromkeys(groups))
