"""`TensorMonitor`: samples how near a run's tensors are to overflow and underflow, and which updates are lost."""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ampkit.debugging.call_sites import ModuleCalls
from ampkit.debugging.causes import extremes
from ampkit.debugging.operator_facts import readable, tensors_in
from ampkit.debugging.report import plain
from ampkit.dtypes import SIXTEEN_BIT

_MAX_ELEMENTS = 1 << 16  # the most elements of a parameter that are checked


class TensorMonitor:
    """Context that samples headroom, underflow and lost updates of a run on every `every`-th optimizer step.

    A step ends with `optimizer.step()`; a step that a scaler skips does not count. Each sample is a dict, written as a
    line of JSON to `path`; the attribute `last` has the last sample:

    - `step`: the number of the step, from 0;
    - `outputs` and `gradients`, by module, of results in float16 or bfloat16 and of their gradients: `headroom` is the
      number of powers of two between the largest magnitude and the end of the range, 0 with an inf or NaN; `underflow`
      is the share of elements that are not zero but below float16's smallest normal number (0 for bfloat16, which has
      float32's range). If a module is called more than once, the worst value of each;
    - `lost_updates`, by parameter: the share of the elements with a gradient that the optimizer did not change, among
      65,536 elements at most.

    Results and random numbers stay the same to the bit. Modules inside compiled functions are not seen.

    Synchronizes with the device on sampled steps, once for each result, gradient and parameter; on other steps there
    are no hooks of modules, and nothing synchronizes.

    Args:
        model: module whose submodules are named by their paths; None takes the outermost modules that run.
        every: number of optimizer steps from one sample to the next; the first step is sampled.
        path: file for the samples, which is emptied on entering; None writes no file.

    Raises:
        TypeError: if `model` is no module.
        ValueError: if `every` is less than 1.

    Entering returns the monitor, which prints the worst values of the last sample.

    Example::

        with debugging.TensorMonitor(model, every=100, path="run.jsonl"):
            train(model, loader)
    """

    def __init__(self, model: Module | None = None, *, every: int = 100, path: str | Path | None = None) -> None:
        if every < 1:
            raise ValueError(f"every is {every}; expected a number of steps, 1 or more")
        if model is not None and not isinstance(model, Module):
            raise TypeError(f"model is {type(model).__name__}; expected a torch.nn.Module, or None for whatever runs")
        self.last: dict[str, Any] | None = None
        self._every = every
        self._path = None if path is None else Path(path)
        self._step = 0
        self._modules = ModuleCalls(model)
        self._open, self._hooks = ExitStack(), ExitStack()  # of the context and of a sampled step
        self._worst: dict[str, dict[str, dict[str, float]]] = {}  # by kind and module
        self._before: list[tuple[Tensor, Tensor, Tensor]] = []  # parameter, its elements, which should change

    def __enter__(self) -> TensorMonitor:
        if self._path is not None:
            self._path.write_text("", encoding="utf-8")  # remove the lines of an earlier run
        # An optimizer's hook may not remove hooks of optimizers, so these stay between samples.
        self._open.enter_context(register_optimizer_step_pre_hook(self._optimizer_starts))
        self._open.enter_context(register_optimizer_step_post_hook(self._optimizer_ends))
        self._watch()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.close()
        self._open.close()

    def _watch(self) -> None:
        self._worst = {"outputs": {}, "gradients": {}}
        hooks = self._hooks = ExitStack()
        hooks.enter_context(register_module_forward_hook(self._look))  # before `modules` leaves the module
        hooks.enter_context(self._modules.followed())

    def _look(self, module: Module, args: Any, output: Any) -> None:
        call = None if torch.compiler.is_compiling() else self._modules.current()
        if call is None:
            return
        for tensor in readable(tensors_in(output)):
            if tensor.dtype in SIXTEEN_BIT:
                self._note("outputs", call.name, tensor)
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._note, "gradients", call.name))

    @torch.no_grad()
    def _note(self, kind: str, module: str, tensor: Tensor) -> None:
        low, high = extremes(tensor)
        largest, limits = max(-low, high), torch.finfo(tensor.dtype)
        if not math.isfinite(high - low):
            headroom = 0.0
        else:
            headroom = math.log2(limits.max / largest) if largest else math.inf
        underflow = 0.0
        if tensor.dtype is torch.float16:
            underflow = float(((tensor.abs() < limits.tiny) & (tensor != 0)).float().mean())
        worst = self._worst[kind].setdefault(module, {"headroom": headroom, "underflow": underflow})
        worst["headroom"] = min(worst["headroom"], headroom)
        worst["underflow"] = max(worst["underflow"], underflow)

    @torch.no_grad()
    def _optimizer_starts(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._step % self._every == 0:
            self._before = before_update(optimizer)

    @torch.no_grad()
    def _optimizer_ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._step % self._every == 0:
            self._hooks.close()
            self._write()
        self._step += 1
        if self._step % self._every == 0:
            self._watch()

    def _write(self) -> None:
        names = {id(p): name for root in self._modules.roots() for name, p in root.named_parameters()}
        lost = {
            names.get(id(parameter), f"parameter {index}"): float(lost_share(parameter, before, wanted))
            for index, (parameter, before, wanted) in enumerate(self._before)
        }
        self.last = {"step": self._step, **self._worst, "lost_updates": lost}
        self._before = []
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(plain(self.last), allow_nan=False) + "\n")

    def __str__(self) -> str:
        """The worst values of the last sample."""
        if self.last is None:
            return "no step was sampled"
        lines = [f"step {self.last['step']}"]
        for kind in ("outputs", "gradients"):
            modules = self.last[kind]
            if modules:
                nearest = min(modules, key=lambda name: modules[name]["headroom"])
                smallest = max(modules, key=lambda name: modules[name]["underflow"])
                lines.append(
                    f"  {kind:12} headroom {modules[nearest]['headroom']:.1f} powers of two in {nearest}; "
                    f"underflow {modules[smallest]['underflow']:.1%} in {smallest}"
                )
        lost = self.last["lost_updates"]
        if lost:
            most = max(lost, key=lost.__getitem__)
            lines.append(f"  {'updates':12} {lost[most]:.1%} lost of {most}")
        return "\n".join(lines)


@torch.no_grad()
def before_update(optimizer: Any) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Parameters with a gradient of an optimizer that is about to step, a sample of each, and what should change."""
    return [
        (p, _sample(p).clone(), _sample(p.grad) != 0)
        for group in optimizer.param_groups
        for p in group["params"]
        if p.grad is not None and p.grad.layout is torch.strided and p.numel()
    ]


@torch.no_grad()
def lost_share(parameter: Tensor, before: Tensor, wanted: Tensor) -> Tensor:
    """The share of the elements that an update should change and did not."""
    return (wanted & (_sample(parameter) == before)).sum() / wanted.sum().clamp_min(1)


def _sample(tensor: Tensor) -> Tensor:
    """Evenly spaced elements of a tensor that is not empty."""
    return tensor.detach().flatten()[:: math.ceil(tensor.numel() / _MAX_ELEMENTS)]
