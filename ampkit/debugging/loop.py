"""`check_loop`: what a training loop does with scaler, gradients and optimizer in the wrong order, by line.

A few functions of torch are wrapped while the context is open: the scaler's, `backward`, `zero_grad`, clipping, the
scheduler's `step`. Nothing is computed but two flags per gradient, so the cost is that of a few Python calls per step.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ampkit.debugging.call_sites import find_caller
from ampkit.debugging.report import LoopFinding, LoopReport
from ampkit.region.autocast import autocast
from ampkit.torch_internals.operators import current_device_type

_LEVELS = tuple(str(Path(__file__).resolve().parents[1] / name) for name in ("half_precision", "amp"))
_MOST_PARAMETERS = 64       # of an optimizer whose gradients are followed
_NORMAL = torch.finfo(torch.float16).smallest_normal
_VANISHING = 2.0**-21       # three bits of float16 are left of smaller numbers, or none


@dataclass
class _Optimizer:
    """What is known of an optimizer and its gradients."""

    parameters: list[Tensor] = field(default_factory=list)
    marks: list[tuple[int, int]] = field(default_factory=list)      # of gradients, after the last backward
    scaled: bool = False                # they are, since the last backward that reached them
    backwards: dict[tuple[str, int], int] = field(default_factory=dict)     # by line, since the last step
    divided: bool = False               # some loss was
    last: list[Tensor | None] = field(default_factory=list)    # the gradients of the last step
    cleared: bool = True                # they are gone
    skipped: bool = False               # the scaler did not take the last step
    attempts: int = 0                   # since the scheduler stepped
    clips: dict[tuple[str, int], int] = field(default_factory=dict)         # by line, since the last step
    zeroed: tuple[str, int] | None = None       # where, after backward and before the step
    scaler: Any = None                  # the last that unscaled it or stepped
    unscaled: bool = False              # by `unscale_`, since the last `update`
    stepped: tuple[str, int] | None = None      # where by the scaler, since the last `update`
    largest: Tensor | None = None       # the magnitude in each gradient of an unscaled backward of float16
    vanishes: bool = False              # a gradient was next to 0 after one

    def current(self) -> list[tuple[int, int]]:
        """Another value where a gradient was written since."""
        return [(0, 0) if one.grad is None else (id(one.grad), one.grad._version) for one in self.parameters]


class check_loop:
    """Context that watches a training loop for what goes wrong without an error::

        with debugging.check_loop() as report:
            train(model, loader)
        print(report)

    Found, each with its line and the change: gradients that are clipped or read while they are scaled; an optimizer
    that steps with scaled gradients; `update` that is missing or called twice; `unscale_` twice; `backward` inside an
    autocast region; a scaler with bfloat16; float16 without a scaler where gradients underflow; gradients that are
    never zeroed; accumulation over micro-batches whose losses are not divided; clipping after each of them; zero_grad
    between backward and step; a second step with the same gradients; a scheduler that steps although the scaler skipped
    the step. Two iterations are enough for all but the last. Open it before the loop; functions that code holds already
    are seen all the same, but for `torch.nn.utils.clip_grad_value_`. No host syncs but one small read per step where
    gradients may be zero, and one in float16 without a scaler.
    """

    def __init__(self) -> None:
        self.report = LoopReport()
        self.scaler: torch.amp.GradScaler | None = None     # the last one that was called
        self._optimizers: dict[Optimizer, _Optimizer] = {}
        self._new = _Optimizer()    # one that has not stepped yet
        self._updated: set[Any] = set()         # the scalers that were, since the last backward of a scaled loss
        self._pending_scale = False
        self._dtypes: set[torch.dtype] = set()
        self._casts: list[Tensor] = []      # of float16 in backward: whether the gradient is no rounding; and all lost
        self._depth = 0
        self._in_scaler_step = self._optimizer_ran = False
        self._open = ExitStack()

    def __enter__(self) -> LoopReport:
        with ExitStack() as stack:
            for cls in _with_subclasses(torch.amp.GradScaler):
                for name in ("scale", "unscale_", "step", "update"):
                    if name in vars(cls):
                        self._wrap(stack, cls, name, getattr(self, f"_{name.rstrip('_')}"))
            self._wrap(stack, torch.autograd, "backward", self._backward)
            self._wrap(stack, Optimizer, "zero_grad", self._zero_grad)
            self._wrap(stack, Module, "zero_grad", self._zero_grad)
            clip = torch.nn.utils.clip_grad
            for owner, name in ((clip, "_get_total_norm"), (clip, "_clip_grads_with_norm_"),
                                (torch.nn.utils, "get_total_norm"), (torch.nn.utils, "clip_grads_with_norm_"),
                                (torch.nn.utils, "clip_grad_value_")):
                if hasattr(owner, name):
                    self._wrap(stack, owner, name, functools.partial(self._read, "clip" in name))
            for cls in _with_subclasses(LRScheduler):
                if "step" in vars(cls):
                    self._wrap(stack, cls, "step", self._scheduler)
            for cls in (torch.autocast, autocast):
                self._wrap(stack, cls, "__enter__", self._region)
            stack.enter_context(register_optimizer_step_pre_hook(self._optimizer_starts))
            stack.enter_context(register_optimizer_step_post_hook(self._optimizer_ends))
            self._open = stack.pop_all()
        return self.report

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        self._open.close()
        if error is not None:
            self.report.incomplete = f"the loop ended with {type(error).__name__}"
        elif not self.report.iterations:
            self.report.incomplete = "no optimizer stepped"

    def _wrap(self, stack: ExitStack, owner: Any, name: str, watch: Callable[..., Any]) -> None:
        """Have `watch`, a generator, run until its `yield` before a function, and from there after it."""
        inner = vars(owner)[name]

        @functools.wraps(inner)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if args and isinstance(args[0], torch.amp.GradScaler):
                self.scaler = args[0]
            if self._depth or sys._getframe(1).f_code.co_filename.startswith(_LEVELS):
                return inner(*args, **kwargs)       # called by another one of them, or by a loop of ampkit's own
            self._depth += 1
            try:
                around: Iterator[None] = watch(*args, **kwargs)
                next(around)
                result = inner(*args, **kwargs)
                next(around, None)
                return result
            finally:
                self._depth -= 1

        setattr(owner, name, wrapped)
        stack.callback(setattr, owner, name, inner)

    def _add(self, what: str, change: str, at: tuple[str, int] | None = None) -> None:
        file, line = at or _caller()
        now = self.report.iterations
        for one in self.report.loop:
            if (one.what, one.file, one.line) == (what, file, line):
                one.last = now
                return
        self.report.loop.append(LoopFinding(what, file, line, change, now, now))

    # --- the scaler

    def _scale(self, scaler: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        if scaler.is_enabled():
            self._pending_scale = True
            if self._dtypes == {torch.bfloat16}:
                self._add("a loss is scaled for bfloat16, which has float32's range: it gains nothing, and loses steps",
                          "scaler = GradScaler(enabled=False), or float16 in the region")
        yield

    def _unscale(self, scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Iterator[None]:
        one = self._of(optimizer)
        if one.unscaled and scaler.is_enabled() and not kwargs.get("allow_repeat"):
            self._add("unscale_ is called twice without an update",
                      "call scaler.update() where the step is left out, too" if one.scaled else
                      "call scaler.unscale_(optimizer) once, before clipping")
        one.scaler, one.unscaled = scaler, True
        yield
        one.scaled = False

    def _step(self, scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Iterator[None]:
        one = self._of(optimizer)
        if one.stepped and scaler.is_enabled():
            self._add("update is not called after step: the scale never changes, and a second step is refused",
                      "scaler.update() after scaler.step(optimizer)", one.stepped)
        one.scaler, one.stepped, one.scaled = scaler, _caller(), False
        self._in_scaler_step, self._optimizer_ran = True, False
        try:
            yield
        finally:
            self._in_scaler_step = False
        one.skipped = not self._optimizer_ran
        if one.skipped:
            self._ended(optimizer)

    def _update(self, scaler: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        if scaler in self._updated and scaler.is_enabled() and not args and not kwargs:
            self._add("update is called twice for one backward",
                      "call scaler.update() once, after the last scaler.step")
        self._updated.add(scaler)
        for one in self._optimizers.values():
            if one.scaler is scaler:
                one.stepped, one.unscaled = None, False
        yield

    # --- gradients

    def _backward(self, tensors: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        scaled, self._pending_scale = self._pending_scale, False
        roots = [tensors] if isinstance(tensors, Tensor) else tensors if isinstance(tensors, (list, tuple)) else ()
        root = next((one for one in roots if isinstance(one, Tensor)), None)
        if root is not None and torch.is_autocast_enabled(root.device.type):
            self._add("backward runs inside the autocast region: its operators would be cast once more",
                      "leave the region first: loss.backward() outside of `with autocast`")
        if scaled:
            self._updated.clear()
        for one in self._optimizers.values():
            self._look_whether_cleared(one)
            one.marks = one.current()
        retained = kwargs.get("retain_graph", args[1] if len(args) > 1 else None)
        divided = retained or (root is not None and _is_divided(root, scaled))
        unscaled = not scaled and torch.float16 in self._dtypes
        with ExitStack() as hooks:
            if unscaled and root is not None and any(one.vanishes for one in self._optimizers.values()):
                self._casts.clear()
                _note_casts(root, self._casts, hooks)
            yield
        line = _caller()
        for one in (*self._optimizers.values(), self._new):
            if one is self._new or one.marks != one.current():
                one.scaled, one.zeroed = scaled, None
                one.largest = _largest(one.parameters) if unscaled else None
                one.divided |= bool(divided)
                one.backwards[line] = one.backwards.get(line, 0) + 1

    def _zero_grad(self, owner: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        if isinstance(owner, Optimizer):
            self._of(owner)     # from its first backward on it is followed by itself
        yield
        self._new.backwards.clear()
        for one in self._optimizers.values():
            self._look_whether_cleared(one)
            if one.backwards and all(p.grad is None for p in one.parameters):
                one.backwards.clear()
                one.zeroed = _caller()

    def _look_whether_cleared(self, one: _Optimizer) -> None:
        """Gradients of the last step are gone where they are None, others, or zero."""
        if not one.cleared and one.last:
            one.cleared = all(
                p.grad is None or p.grad is not before or not _holds_numbers(p.grad)
                for p, before in zip(one.parameters[:1], one.last[:1], strict=True)
            )

    def _read(self, clips: bool, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Gradients are clipped, or their norm is read."""
        tensors = next(iter((*args, *kwargs.values())))
        # A generator is the function's to consume.
        given = [tensors] if isinstance(tensors, Tensor) else [] if isinstance(tensors, Iterator) else list(tensors)
        ids = {id(one) for one in given} | {id(one.grad) for one in given if one.grad_fn is None and one.is_leaf}
        followed = [one for one in self._optimizers.values() if any(id(p.grad) in ids for p in one.parameters)]
        unscaled = any(one.unscaled for one in self._optimizers.values())
        if any(one.scaled for one in followed) or (not followed and self._new.scaled and not unscaled):
            self._add("gradients are clipped, or their norm is read, while they are scaled",
                      "scaler.unscale_(optimizer) before it, or scaler.clip_grad_norm_(optimizer, max_norm)")
        for one in followed if clips else ():
            one.clips[_caller()] = one.clips.get(_caller(), 0) + 1
        yield

    # --- optimizers, schedulers, regions

    def _of(self, optimizer: Optimizer) -> _Optimizer:
        if optimizer not in self._optimizers:
            some = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
            one = self._optimizers[optimizer] = copy.deepcopy(self._new)
            one.parameters = some[::-(-len(some) // _MOST_PARAMETERS) or 1]
        return self._optimizers[optimizer]

    def _optimizer_starts(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        one = self._of(optimizer)
        self._optimizer_ran = True
        closure = len(args) > 1 or kwargs.get("closure")
        if one.scaled and one.backwards and not self._in_scaler_step:
            self._add("the optimizer steps with scaled gradients",
                      "scaler.step(optimizer) in place of optimizer.step()")
        if not one.cleared and one.backwards and not closure:
            self._add("gradients of the step before are still there: zero_grad is missing",
                      "optimizer.zero_grad() after the step, or before backward")
        if one.zeroed and all(p.grad is None for p in one.parameters):
            self._add("zero_grad is called between backward and step: the step has no gradients",
                      "optimizer.zero_grad() before backward, or after the step", one.zeroed)
        if one.last and not (closure or one.backwards) and one.marks == one.current() != [(0, 0)] * len(one.marks):
            self._add("the optimizer steps twice with the same gradients",
                      "once: scaler.step(optimizer) where there is a scaler, and remove the other")
        if one.largest is not None and one.backwards:
            self._look_for_underflow(one, one.largest.tolist())
        for line, times in one.clips.items():
            if 1 < times == one.backwards.get(max(one.backwards, key=one.backwards.__getitem__, default=line)):
                self._add(f"gradients are clipped {times} times for one step, after each backward",
                          "clip once, after the last backward and before the step", line)
        most = max(one.backwards.values(), default=0)
        if most > 1 and not one.divided:
            line = max(one.backwards, key=one.backwards.__getitem__)
            self._add(f"gradients of {most} backward calls are summed, and the losses are not divided",
                      f"(loss / {most}).backward(), so that they are averaged", line)

    def _look_for_underflow(self, one: _Optimizer, largest: list[float]) -> None:
        """Gradients are 0, or next to it, because of float16: a loss scale would keep them.

        Many a gradient is 0 in float32 as well, of what is masked, dead or unused. So there must be more: a cast that
        made all of a gradient 0, in the next backward, or no gradient as large as float16's normal numbers.
        """
        if min(largest) >= _VANISHING:
            return
        casts = [one.tolist() for one in self._casts]
        if any(lost or (counts and 0 < max(largest) < _NORMAL) for counts, lost in casts):
            self._add("gradients underflow in float16, and the loss is not scaled",
                      "scaler = GradScaler(); scaler.scale(loss).backward(), scaler.step(optimizer), scaler.update(). "
                      "Or bfloat16 in the region", max(one.backwards, key=one.backwards.__getitem__))
        one.vanishes = True

    def _optimizer_ends(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._ended(optimizer)

    def _ended(self, optimizer: Optimizer) -> None:
        one = self._of(optimizer)
        one.last = [p.grad for p in one.parameters]
        one.cleared = not one.last
        one.scaled = one.divided = False
        one.largest = None
        one.backwards.clear()
        one.clips.clear()
        one.zeroed, one.marks = None, one.current()
        one.attempts += 1
        self._new = _Optimizer()
        self._dtypes.clear()
        self.report.iterations += 1

    def _scheduler(self, scheduler: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        one = self._optimizers.get(getattr(scheduler, "optimizer", None))  # type: ignore[arg-type]
        if one is not None and one.skipped and one.attempts == 1:
            self._add("the scheduler steps although the scaler skipped the step",
                      "step it only where the step was taken: scale = scaler.get_scale() before update(), and "
                      "scheduler.step() if scaler.get_scale() >= scale")
        if one is not None:
            one.attempts = 0
        yield

    def _region(self, region: Any) -> Iterator[None]:
        yield
        for device in {"cpu", current_device_type()}:
            if torch.is_autocast_enabled(device):
                self._dtypes.add(torch.get_autocast_dtype(device))


def _holds_numbers(gradient: Tensor) -> bool:
    """Whether a gradient is other than 0; of sparse ones and of subclasses it is not known."""
    return type(gradient) is Tensor and gradient.layout is torch.strided and bool(gradient.any())


def _largest(parameters: list[Tensor]) -> Tensor | None:
    """The largest magnitude in each gradient, on the device; sparse gradients and subclasses are left out."""
    gradients = [p.grad for p in parameters if type(p.grad) is Tensor and p.grad.layout is torch.strided]
    with torch.no_grad():
        largest = [one.abs().amax().float() for one in gradients if one.numel()]
        return torch.stack([one.to(largest[0].device) for one in largest]) if largest else None


def _note_casts(root: Tensor, notes: list[Tensor], hooks: ExitStack) -> None:
    """Have the first cast on each way back from a loss note, if it is one of float16, whether all became 0 in it.

    Where a loss does not depend on what it is computed from, as after a norm, gradients are nothing but the rounding of
    float32, a millionth of the loss and less. Nothing is lost with those.
    """
    rounding = root.detach().abs().sum().float() * 1e-5

    def note(made: Any, given: Any) -> None:
        before, after = given[0], made[0]
        if type(before) is type(after) is Tensor and torch.float16 in (before.dtype, after.dtype):
            counts = before.abs().sum(dtype=torch.float32) > rounding.to(before.device)
            notes.append(torch.stack([counts, counts & ~after.any()]))

    nodes, seen = [root.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().startswith("ToCopy"):
            hooks.callback(node.register_hook(note).remove)
        else:
            nodes += [following for following, _ in node.next_functions]


def _with_subclasses(cls: type) -> list[type]:
    return [cls, *(one for sub in cls.__subclasses__() for one in _with_subclasses(sub))]


def _caller() -> tuple[str, int]:
    return find_caller(2).line()


def _is_divided(root: Tensor, scaled: bool) -> bool:
    """Whether a loss is a quotient or a product: of several micro-batches, it may be its share."""
    node = root.grad_fn
    if scaled and node is not None:
        node = node.next_functions[0][0] if node.next_functions else None
    for _ in range(3):
        if node is None:
            return False
        name = node.name()
        if name.startswith(("Div", "Mul")):
            return True
        if not name.startswith(("ToCopy", "Alias", "Clone", "View", "Squeeze")) or not node.next_functions:
            return False
        node = node.next_functions[0][0]
    return False
