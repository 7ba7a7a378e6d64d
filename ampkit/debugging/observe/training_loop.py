"""Reports the calls of a training loop to the checks: backward, scaler, optimizers, clipping, schedulers, regions.

A few functions of torch are wrapped while the context is open. A listener has a generator for each kind of call that it
observes, one of `EVENTS`: it runs until its `yield` before the call, and from there after it. Nothing is computed but
Python calls.
"""

from __future__ import annotations

import functools
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ampkit.debugging.finding import Place
from ampkit.debugging.observe.call_sites import find_caller, script_line
from ampkit.region.autocast import autocast
from ampkit.torch_private import current_device_type

EVENTS = (
    "scale",
    "unscale",
    "scaler_step",
    "scaler_clip",
    "update",
    "backward",
    "zero_grad",
    "clip",
    "read_norm",
    "scheduler_step",
)
# Loops of ampkit's own, which call the scaler in orders that are right for them.
_AMPKIT_LOOPS = tuple(str(Path(__file__).resolve().parents[2] / name) for name in ("half_precision", "amp"))


class Iterations:
    """Numbers the iterations of a loop, in each of which several optimizers may step once."""

    def __init__(self) -> None:
        self._steps = 0
        self._last: dict[int, int] = {}  # by optimizer: the number of its last step
        self._ended = Fraction(0)

    @property
    def number(self) -> int:
        """How many have ended."""
        return int(self._ended)

    def step_ended(self, optimizer: Any) -> None:
        """Count a step. One that an optimizer takes for the first time belongs to the iteration of the others."""
        active = {key: last for key, last in self._last.items() if self._steps - last <= len(self._last)}
        is_first = id(optimizer) not in active
        alone = not active
        self._steps += 1
        self._last = {**active, id(optimizer): self._steps}
        if alone or not is_first:
            self._ended += Fraction(1, len(self._last))


class TrainingLoop:
    """Context that delivers calls to `listeners`, each with generators for some of `EVENTS`.

    A listener may also have `call_starts`, before each of these calls, and `call_raised`.
    """

    def __init__(self) -> None:
        self.listeners: list[Any] = []
        self.silently: Callable[[], AbstractContextManager[Any]] = nullcontext  # a context in which listeners run
        self.backward_starts: Callable[[list[Tensor], bool], None] = lambda roots, scaled: None
        self.step_starts: Callable[[Optimizer, bool], None] = lambda optimizer, closure: None
        self.step_ended: Callable[[Optimizer], None] = lambda optimizer: None
        self.step_follows: Callable[[], None] = lambda: None  # not in `silently`
        self.iterations = Iterations()
        self.scaler: torch.amp.GradScaler | None = None  # the last one that was called
        self.optimizers: list[Optimizer] = []  # that have stepped or cleared gradients
        self.made: weakref.WeakKeyDictionary[Optimizer, tuple[float, Place]] = weakref.WeakKeyDictionary()
        self.dtypes: set[torch.dtype] = set()  # of the regions that were entered since the last step
        self.regions: list[tuple[str, int]] = []  # where the open regions were entered, innermost last
        self.loss_is_scaled = False  # by a call of `scale` that no backward has followed yet
        self.in_scaler_step = False
        self.step_is_skipped = False  # by the scaler, in its last `step`
        self.n_skipped_steps = 0  # calls of the scaler's `step` that did not call the optimizer
        self.skips = 0  # iterations in which a scaler skipped a step
        self.skipped: set[int] = set()  # their numbers
        self.last_skip = 0
        self._skipped_since_update = False
        self._depth = 0
        self._open = ExitStack()

    def __enter__(self) -> TrainingLoop:
        with ExitStack() as stack:
            for cls in _with_subclasses(torch.amp.GradScaler):
                for name, event in (
                    ("scale", "scale"),
                    ("unscale_", "unscale"),
                    ("step", "scaler_step"),
                    ("update", "update"),
                    ("clip_grad_norm_", "scaler_clip"),
                    ("clip_grad_value_", "scaler_clip"),
                ):
                    if name in vars(cls):
                        self._wrap(stack, cls, name, event)
            self._wrap(stack, torch.autograd, "backward", "backward")
            self._wrap(stack, Optimizer, "zero_grad", "zero_grad")
            self._wrap(stack, Module, "zero_grad", "zero_grad")
            clip = torch.nn.utils.clip_grad
            for owner, name in (
                (clip, "_get_total_norm"),
                (clip, "_clip_grads_with_norm_"),
                (torch.nn.utils, "get_total_norm"),
                (torch.nn.utils, "clip_grads_with_norm_"),
                (torch.nn.utils, "clip_grad_value_"),
            ):
                if hasattr(owner, name):
                    self._wrap(stack, owner, name, "clip" if "clip" in name else "read_norm")
            for cls in _with_subclasses(LRScheduler):
                if "step" in vars(cls):
                    self._wrap(stack, cls, "step", "scheduler_step")
            for cls in (torch.autocast, autocast):
                self._wrap(stack, cls, "__enter__", "_region_enters")
                self._wrap(stack, cls, "__exit__", "_region_exits")
            self._note_made(stack)
            stack.enter_context(register_optimizer_step_pre_hook(self._optimizer_starts))
            stack.enter_context(register_optimizer_step_post_hook(self._optimizer_ended))
            self._open = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.close()

    def _wrap(self, stack: ExitStack, owner: Any, name: str, event: str) -> None:
        """Deliver an event around a function."""
        inner = vars(owner)[name]

        @functools.wraps(inner)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if args and isinstance(args[0], torch.amp.GradScaler):
                self.scaler = args[0]
            if self._depth or sys._getframe(1).f_code.co_filename.startswith(_AMPKIT_LOOPS):
                return inner(*args, **kwargs)  # called by another wrapped function, or by a loop of ampkit's own
            if event in ("clip", "read_norm"):  # an iterator can be listed once only
                args = tuple(list(each) if isinstance(each, Iterator) else each for each in args)
                kwargs = {key: list(each) if isinstance(each, Iterator) else each for key, each in kwargs.items()}
            depth = self._depth
            self._depth += event != "scaler_clip"  # which may call `unscale_`
            around: list[Iterator[None]] = []
            try:
                with self.silently():
                    for each in self.listeners:
                        if hasattr(each, "call_starts"):
                            each.call_starts()
                    around = [getattr(each, event)(*args, **kwargs) for each in self._observing(event)]
                    for generator in around:
                        next(generator, None)
                result = inner(*args, **kwargs)
                if around:
                    with self.silently():
                        for generator in around:
                            next(generator, None)
                return result
            except Exception as error:
                for each in self.listeners:
                    if hasattr(each, "call_raised"):
                        each.call_raised(name, error)
                raise
            finally:
                for generator in around:
                    generator.close()  # type: ignore[attr-defined]
                self._depth = depth

        setattr(owner, name, wrapped)
        stack.callback(setattr, owner, name, inner)

    def _note_made(self, stack: ExitStack) -> None:
        """Note when and where optimizers are made."""
        inner: Any = Optimizer.__init__

        @functools.wraps(inner)
        def made(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            inner(optimizer, *args, **kwargs)
            self.made[optimizer] = time.perf_counter(), calling_place()

        Optimizer.__init__ = made  # type: ignore[method-assign]
        stack.callback(setattr, Optimizer, "__init__", inner)

    def _observing(self, event: str) -> list[Any]:
        """Return the listeners of an event, after this object, whose attributes they read."""
        return [each for each in (self, *self.listeners) if hasattr(each, event)]

    # --- the loop's own record, which the checks read

    def scale(self, scaler: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        self.loss_is_scaled |= scales_losses(scaler)
        yield

    def scaler_step(self, scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Iterator[None]:
        self._note(optimizer)
        self.in_scaler_step, self.step_is_skipped = True, True
        try:
            yield
        finally:
            self.in_scaler_step = False
        if self.step_is_skipped:
            self._skipped_since_update = True
            self.n_skipped_steps += 1
            self.skipped.add(self.iterations.number)
            self.iterations.step_ended(optimizer)
            self.dtypes.clear()

    def update(self, scaler: Any, new_scale: Any = None, *args: Any, **kwargs: Any) -> Iterator[None]:
        before = scaler.get_scale()
        yield
        # An optimizer that skips on the device is called for each step: there the scale shows it.
        if self._skipped_since_update or (new_scale is None and scaler.get_scale() < before):
            self.skips += 1
            self.last_skip = max(0, self.iterations.number - 1)
        self._skipped_since_update = False

    def backward(self, tensors: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        roots = [tensors] if isinstance(tensors, Tensor) else tensors if isinstance(tensors, (list, tuple)) else ()
        self.backward_starts([root for root in roots if isinstance(root, Tensor)], self.loss_is_scaled)
        try:
            yield
        finally:
            self.loss_is_scaled = False

    def zero_grad(self, owner: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        if isinstance(owner, Optimizer):
            self._note(owner)
        yield

    def _note(self, optimizer: Optimizer) -> None:
        if not any(each is optimizer for each in self.optimizers):
            self.optimizers.append(optimizer)

    def _optimizer_starts(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._note(optimizer)
        self.step_is_skipped = False
        with self.silently():
            self.step_starts(optimizer, bool(len(args) > 1 or kwargs.get("closure")))

    def _optimizer_ended(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.iterations.step_ended(optimizer)
        with self.silently():
            self.step_ended(optimizer)
        self.step_follows()
        self.dtypes.clear()

    def _region_enters(self, region: Any) -> Iterator[None]:
        line = find_caller(1).line()
        yield
        self.regions.append(line)
        for device in {"cpu", current_device_type()}:
            if torch.is_autocast_enabled(device):
                self.dtypes.add(torch.get_autocast_dtype(device))

    def _region_exits(self, region: Any, *error: Any) -> Iterator[None]:
        yield
        del self.regions[-1:]


def calling_place() -> Place:
    """Return the line of the user's code that calls a function of torch or ampkit, and the script's line above it."""
    file, line = find_caller(1).line()
    script = script_line(1)
    return Place(file=file, line=line, called_from=("", 0) if script[0] == file else script)


def scales_losses(scaler: Any) -> bool:
    """Return whether a scaler multiplies losses, as a disabled one and a `GradGuard` do not."""
    return scaler.is_enabled() and getattr(getattr(scaler, "loss_scale", None), "scales_losses", True)


def _with_subclasses(cls: type) -> list[type]:
    return [cls, *(each for subclass in cls.__subclasses__() for each in _with_subclasses(subclass))]
