"""A copy of all state that a training step changes, so that the step can run again with the same result."""

from __future__ import annotations

import copy
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ampkit.dispatch.weight_cache import invalidate_casts
from ampkit.gradients.collect import parameters as parameters_of


class TrainingSnapshot:
    """A copy of parameters, buffers, gradients, random number generators, optimizers and scalers.

    Pass optimizers and scalers to `add` before they change. `others` are further objects that a step changes, with
    `state_dict` and `load_state_dict`. Exiting `with snapshot:` restores everything, including optimizers that stepped
    inside it.
    """

    def __init__(self, model: Module, others: Iterable[Any] = ()) -> None:
        self._tensors: dict[Tensor, tuple[Tensor, Tensor | None]] = {}  # values and gradients
        self._save((*model.parameters(), *model.buffers()))
        self._buffers = [(module._buffers, dict(module._buffers)) for module in model.modules()]
        # An optimizer that the step itself makes is freed with the step.
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, tuple[dict[Any, Any], list[dict[str, Any]]]]
        self._optimizers = weakref.WeakKeyDictionary()
        self._others: dict[int, tuple[Any, Any]] = {}
        self._random = [(set_state, get_state()) for get_state, set_state in generators()]
        for other in others:
            self.add(other)

    def __enter__(self) -> TrainingSnapshot:
        self._hook = register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: self.add(optimizer))
        return self

    def __exit__(self, *error: Any) -> None:
        self._hook.remove()
        self.restore()

    def add(self, owner: Any) -> None:
        """Copy the state of an optimizer, a scaler or another object, unless it was added before."""
        if isinstance(owner, Optimizer):
            if owner not in self._optimizers:
                self._save(parameters_of(owner))
                groups = [{k: value for k, value in group.items() if k != "params"} for group in owner.param_groups]
                self._optimizers[owner] = (_copied(dict(owner.state)), _copied(groups))
        elif not hasattr(owner, "state_dict") or not hasattr(owner, "load_state_dict"):
            raise TypeError(
                f"state holds {type(owner).__name__}, which cannot be put back; expected state_dict and load_state_dict"
            )
        elif id(owner) not in self._others:
            self._others[id(owner)] = (owner, copy.deepcopy(owner.state_dict()))

    def _save(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if tensor not in self._tensors:
                gradient = tensor.grad if tensor.is_leaf else None
                self._tensors[tensor] = tensor.detach().clone(), None if gradient is None else gradient.clone()

    @property
    def owners(self) -> list[Any]:
        """The optimizers and other objects that were added, and the optimizers that have stepped."""
        return [*self._optimizers, *(owner for owner, _ in self._others.values())]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything in place, so that references to parameters remain valid."""
        for buffers, before in self._buffers:
            for name, tensor in before.items():  # a step may replace a buffer by another tensor
                buffers[name] = tensor  # a scripted module's table has no `update`
        for tensor, (value, _) in self._tensors.items():
            tensor.data.copy_(value)
        self.restore_gradients()
        for optimizer, (state, groups) in self._optimizers.items():
            optimizer.state.clear()
            optimizer.state.update(_copied(state))
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                group.update(_copied(values))
        for owner, state in self._others.values():
            owner.load_state_dict(copy.deepcopy(state))
        for set_state, state in self._random:
            set_state(state)
        invalidate_casts()  # cached casts of the weights are stale, and the weights' versions do not show it

    def restore_gradients(self) -> None:
        """Restore gradients."""
        for tensor, (_, gradient) in self._tensors.items():
            tensor.grad = None if gradient is None else gradient.clone()


def _copied(value: Any) -> Any:
    """Return a copy with tensors cloned. Keys, which may be parameters, are not copied."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    return copy.copy(value)


def generators() -> Iterator[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Yield the functions that get and set the state of each random number generator."""
    yield random.getstate, random.setstate
    yield torch.get_rng_state, torch.set_rng_state
    if "numpy" in sys.modules:
        yield sys.modules["numpy"].random.get_state, sys.modules["numpy"].random.set_state
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        yield torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all
