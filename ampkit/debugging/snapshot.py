"""Everything that a training step changes, kept so that the step can be run again exactly."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ampkit.engine.optimizer_steps import invalidate_casts


class Snapshot:
    """Parameters, buffers, gradients, random number generators, optimizers and scalers, as they were.

    Optimizers and scalers are handed to `add` before they change. What else a step changes goes into `others`: objects
    with `state_dict` and `load_state_dict`. The end of `with snapshot:`, which also meets optimizers that step in it,
    puts everything back.
    """

    def __init__(self, model: Module, others: Iterable[Any] = ()) -> None:
        self._tensors: dict[Tensor, tuple[Tensor, Tensor | None]] = {}      # their values and gradients
        self._keep((*model.parameters(), *model.buffers()))
        self._buffers = [(module._buffers, dict(module._buffers)) for module in model.modules()]
        self._optimizers: dict[Optimizer, tuple[dict[Any, Any], list[dict[str, Any]]]] = {}
        self._others: dict[int, tuple[Any, Any]] = {}
        self._random = [(put_back, state()) for state, put_back in _generators()]
        for one in others:
            self.add(one)

    def __enter__(self) -> Snapshot:
        self._hook = register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: self.add(optimizer))
        return self

    def __exit__(self, *error: Any) -> None:
        self._hook.remove()
        self.restore()

    def add(self, one: Any) -> None:
        """Keep the state of an optimizer, a scaler or another object, unless it is kept already."""
        if isinstance(one, Optimizer):
            if one not in self._optimizers:
                self._keep(p for group in one.param_groups for p in group["params"])
                groups = [{key: value for key, value in group.items() if key != "params"} for group in one.param_groups]
                self._optimizers[one] = (_copied(dict(one.state)), _copied(groups))
        elif not hasattr(one, "state_dict") or not hasattr(one, "load_state_dict"):
            raise TypeError(
                f"state holds {type(one).__name__}, which cannot be put back; expected state_dict and load_state_dict"
            )
        elif id(one) not in self._others:
            self._others[id(one)] = (one, copy.deepcopy(one.state_dict()))

    def _keep(self, tensors: Iterable[Tensor]) -> None:
        for one in tensors:
            if one not in self._tensors:
                gradient = one.grad if one.is_leaf else None
                self._tensors[one] = one.detach().clone(), None if gradient is None else gradient.clone()

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those that have stepped."""
        return list(self._optimizers)

    @property
    def met(self) -> list[Any]:
        """Optimizers and other objects whose state is kept."""
        return [*self._optimizers, *(one for one, _ in self._others.values())]

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back, in place: what refers to a parameter still does."""
        for buffers, before in self._buffers:
            for name, tensor in before.items():     # a step may put another tensor in the place of one
                buffers[name] = tensor              # a scripted module's table has no `update`
        for tensor, (value, _) in self._tensors.items():
            tensor.data.copy_(value)
        self.restore_gradients()
        for optimizer, (state, groups) in self._optimizers.items():
            optimizer.state.clear()
            optimizer.state.update(_copied(state))
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                group.update(_copied(values))
        for one, state in self._others.values():
            one.load_state_dict(copy.deepcopy(state))
        for put_back, state in self._random:
            put_back(state)
        invalidate_casts()      # casts of what was there until now are stale, and no version says so

    def restore_gradients(self) -> None:
        """Put gradients back."""
        for tensor, (_, gradient) in self._tensors.items():
            tensor.grad = None if gradient is None else gradient.clone()


def _copied(value: Any) -> Any:
    """A copy with tensors cloned; keys, among them parameters, stay what they are."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    return copy.copy(value)


def _generators() -> Iterator[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Of each random number generator, what returns its state and what puts it back."""
    yield random.getstate, random.setstate
    yield torch.get_rng_state, torch.set_rng_state
    if "numpy" in sys.modules:
        yield sys.modules["numpy"].random.get_state, sys.modules["numpy"].random.set_state
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        yield torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all
