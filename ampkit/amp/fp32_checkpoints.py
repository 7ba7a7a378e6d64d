"""Checkpoints of a 16-bit model in float32: masters where there are any, else the weights widened.

A state_dict saved here loads into the float32 model it came from, at any level, and back. With masters it loses
nothing, and loading it gives the masters every digit it holds.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from ampkit.dtypes import SIXTEEN_BIT
from ampkit.half_precision.master_weights import MasterWeights


class Fp32Checkpoints:
    """The state_dict hooks of one model. Copies and pickles of the model know no masters."""

    def __init__(self, masters: Iterable[MasterWeights] = ()) -> None:
        self.masters = [weakref.ref(each) for each in masters]

    def __reduce__(self) -> tuple[Any, ...]:
        return Fp32Checkpoints, ()

    def attach(self, model: Module) -> None:
        """Save and load in float32 from now on, also through a wrapper such as DDP."""
        model.register_state_dict_post_hook(functools.partial(Fp32Checkpoints.save, self))  # torch marks the hook
        model.register_load_state_dict_pre_hook(self.load)

    def master_of(self, param: Tensor) -> Tensor | None:
        """The master of a parameter, if it has one."""
        owners = [owner for reference in self.masters if (owner := reference()) is not None]
        return next((master for owner in owners if (master := owner.master_of(param)) is not None), None)

    def save(self, model: Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        """state_dict hook. With `keep_vars` the model's own parameters are asked for, and stay."""
        widened: dict[int, Tensor] = {}     # tied weights stay one tensor in the checkpoint
        tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
        for name, tensor in tensors.items():
            saved = state_dict.get(prefix + name)
            if not isinstance(saved, Tensor) or isinstance(saved, Parameter) or saved.dtype not in SIXTEEN_BIT:
                continue
            if id(tensor) not in widened:
                master = self.master_of(tensor)
                widened[id(tensor)] = saved.to(torch.float32) if master is None else master.detach()
            state_dict[prefix + name] = widened[id(tensor)]

    def load(self, model: Module, state_dict: dict[str, Any], prefix: str, *report: Any) -> None:
        """load_state_dict hook: masters take the checkpoint's float32 values before the model rounds them."""
        for name, param in model.named_parameters(remove_duplicate=False):
            master, saved = self.master_of(param), state_dict.get(prefix + name)
            if master is not None and isinstance(saved, Tensor) and saved.shape == master.shape:
                with torch.no_grad():
                    master.copy_(saved)
