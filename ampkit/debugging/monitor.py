"""`TensorMonitor`: how near to the ends of their ranges a run's tensors are, on a step now and then."""

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

_MOST_ELEMENTS = 1 << 16    # of a parameter


class TensorMonitor:
    """Context that samples a run every so many optimizer steps: headroom, underflow, updates that are lost::

        with debugging.TensorMonitor(model, every=100, path="run.jsonl"):
            train(model, loader)

    A step ends with `optimizer.step()`; one that a scaler skips does not count. On a sampled step (the first one, and
    each `every` steps after it) modules have hooks, whose numbers are read on the host; on others nothing is there but
    a counter. Each sample is a dict, a line of JSON in `path`, which is emptied first, and the last one in `last`:

    - `outputs` and `gradients`, of what modules return in float16 or bfloat16: `headroom`, the powers of two between
      the largest magnitude and the end of the range, 0 with an inf or NaN; `underflow`, the share of elements below the
      smallest normal number but not zero (of float16: bfloat16 has float32's range). Of a module that is called often,
      the worst.
    - `lost_updates`, by parameter: of the elements with a gradient (65,536 at most are looked at), the share that the
      optimizer did not move.
    - `step`, counted from 0.

    Results and random numbers are the same to the bit. Inside compiled functions no module is seen.
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
        self._open, self._hooks = ExitStack(), ExitStack()     # of the context, and of a sampled step
        self._worst: dict[str, dict[str, dict[str, float]]] = {}        # by kind and module
        self._before: list[tuple[Tensor, Tensor, Tensor]] = []      # parameter, its value, where it should change

    def __enter__(self) -> TensorMonitor:
        if self._path is not None:
            self._path.write_text("", encoding="utf-8")     # lines of a former run are none of this one's
        # Torch does not let a hook of optimizers remove one: they stay between samples.
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
        hooks.enter_context(register_module_forward_hook(self._look))   # before `modules` leaves the module
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
        largest, range_ = max(-low, high), torch.finfo(tensor.dtype)
        headroom = 0.0 if not math.isfinite(high - low) else math.log2(range_.max / largest) if largest else math.inf
        small = 0.0
        if tensor.dtype is torch.float16:
            small = float(((tensor.abs() < range_.tiny) & (tensor != 0)).float().mean())
        worst = self._worst[kind].setdefault(module, {"headroom": headroom, "underflow": small})
        worst["headroom"] = min(worst["headroom"], headroom)
        worst["underflow"] = max(worst["underflow"], small)

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
            names.get(id(one[0]), f"parameter {place}"): float(lost_share(*one))
            for place, one in enumerate(self._before)
        }
        self.last = {"step": self._step, **self._worst, "lost_updates": lost}
        self._before = []
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(plain(self.last), allow_nan=False) + "\n")

    def __str__(self) -> str:
        """The last sample's worst."""
        if self.last is None:
            return "no step was sampled"
        lines = [f"step {self.last['step']}"]
        for kind in ("outputs", "gradients"):
            found = self.last[kind]
            if found:
                near = min(found, key=lambda name: found[name]["headroom"])
                small = max(found, key=lambda name: found[name]["underflow"])
                lines.append(f"  {kind:12} headroom {found[near]['headroom']:.1f} powers of two in {near}; "
                             f"underflow {found[small]['underflow']:.1%} in {small}")
        lost = self.last["lost_updates"]
        if lost:
            most = max(lost, key=lost.__getitem__)
            lines.append(f"  {'updates':12} {lost[most]:.1%} lost of {most}")
        return "\n".join(lines)


@torch.no_grad()
def before_update(optimizer: Any) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of an optimizer that is about to step: parameters, elements of them, and which of these have a gradient."""
    return [
        (p, _some(p).clone(), _some(p.grad) != 0)
        for group in optimizer.param_groups for p in group["params"]
        if p.grad is not None and p.grad.layout is torch.strided and p.numel()
    ]


@torch.no_grad()
def lost_share(parameter: Tensor, before: Tensor, wanted: Tensor) -> Tensor:
    """Of the elements that an update was to change, the share that it did not."""
    return (wanted & (_some(parameter) == before)).sum() / wanted.sum().clamp_min(1)


def _some(tensor: Tensor) -> Tensor:
    """Evenly spaced elements."""
    return tensor.detach().flatten()[::-(-tensor.numel() // _MOST_ELEMENTS)]
