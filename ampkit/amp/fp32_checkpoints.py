"""State dicts of a 16-bit model in float32: its masters if it has any, otherwise its weights cast to float32.

Such a state_dict loads into the original float32 model, and into the model at every level. Masters are saved and loaded
without rounding.
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
    """The state_dict hooks of one model. Master references are not copied or pickled."""

    def __init__(self, masters: Iterable[MasterWeights] = ()) -> None:
        self._masters = [weakref.ref(of_optimizer) for of_optimizer in masters]

    def __reduce__(self) -> tuple[Any, ...]:
        return Fp32Checkpoints, ()

    def attach(self, model: Module) -> None:
        """Register the hooks; they also run for a wrapper such as DDP."""
        model.register_state_dict_post_hook(functools.partial(Fp32Checkpoints.save, self))  # torch sets an attribute
        model.register_load_state_dict_pre_hook(self.load)

    def master_of(self, param: Tensor) -> Tensor | None:
        """Return the master of a parameter, or None."""
        for reference in self._masters:
            masters = reference()
            master = None if masters is None else masters.master_of(param)
            if master is not None:
                return master
        return None

    def save(self, model: Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Replace 16-bit entries of `state_dict` by float32, but not parameters (`keep_vars=True`). A hook after it."""
        upcast: dict[int, Tensor] = {}  # by tensor: tied weights share one entry
        tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
        for name, tensor in tensors.items():
            saved = state_dict.get(prefix + name)
            if not isinstance(saved, Tensor) or isinstance(saved, Parameter) or saved.dtype not in SIXTEEN_BIT:
                continue
            if id(tensor) not in upcast:
                master = self.master_of(tensor)
                upcast[id(tensor)] = saved.to(torch.float32) if master is None else master.detach()
            state_dict[prefix + name] = upcast[id(tensor)]

    def load(self, model: Module, state_dict: dict[str, Any], prefix: str, *report: Any) -> None:
        """Copy float32 values into the masters before the model rounds them. A hook before `load_state_dict`."""
        for name, param in model.named_parameters(remove_duplicate=False):
            master, saved = self.master_of(param), state_dict.get(prefix + name)
            if master is not None and isinstance(saved, Tensor) and saved.shape == master.shape:
                with torch.no_grad():
                    master.copy_(saved)
