"""`check_loop`: finds calls of scaler, backward, clipping, optimizer and scheduler that are in the wrong order.

A few functions of torch are wrapped while the context is open: those of the scaler, `backward`, `zero_grad`, clipping,
and the `step` of schedulers. A wrapper calls a generator of `check_loop` that runs until its `yield` before the wrapped
function, and after it from there. The check computes nothing but a few flags, so it costs some Python calls per step.
"""

from __future__ import annotations

import copy
import functools
import math
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

from ampkit.debugging.call_sites import find_caller, script_line
from ampkit.debugging.report import Grade, LoopFinding, LoopReport
from ampkit.debugging.torch_private import without_dispatch
from ampkit.region.autocast import autocast
from ampkit.torch_private import current_device_type

# Loops of ampkit's own, which call the scaler in orders that are right for them.
_AMPKIT_LOOPS = tuple(str(Path(__file__).resolve().parents[1] / name) for name in ("half_precision", "amp"))
_MAX_PARAMETERS = 64  # the most parameters of an optimizer whose gradients are followed
_SMALLEST_NORMAL = torch.finfo(torch.float16).smallest_normal
_NEARLY_ZERO = 2.0**-21  # float16 has three bits or fewer for smaller numbers

_Line = tuple[str, int]  # file and line number


@dataclass
class _OptimizerState:
    """What is known of an optimizer and its gradients."""

    parameters: list[Tensor] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)  # of gradients: before a backward, after a step
    scaled: bool = False  # the gradients are, since the last backward that reached them
    backwards: dict[_Line, int] = field(default_factory=dict)  # calls by line, since the last step
    divided: bool = False  # the loss of some backward was a quotient or a product
    last_gradients: list[Tensor | None] = field(default_factory=list)  # those of the last step
    cleared: bool = True  # the gradients of the last step were cleared or replaced
    skipped: bool = False  # the scaler skipped the last step
    steps_since_scheduler: int = 0  # taken or skipped
    clips: dict[_Line, int] = field(default_factory=dict)  # calls by line, since the last step
    zeroed_at: _Line | None = None  # the line that cleared the gradients after backward and before the step
    scaler: Any = None  # the last scaler that unscaled the gradients or took the step
    unscaled: bool = False  # `unscale_` was called since the last `update`
    stepped_at: _Line | None = None  # the line of `scaler.step` since the last `update`
    largest: Tensor | None = None  # magnitude in each gradient, after an unscaled backward in float16
    underflows: bool = False  # after such a backward some gradient was 0 or nearly

    def gradient_versions(self) -> list[tuple[int, int]]:
        """The identity and version of each gradient, which change where one is written; (0, 0) without a gradient."""
        return [(0, 0) if p.grad is None else (id(p.grad), p.grad._version) for p in self.parameters]


class check_loop:
    """Context that watches a training loop for mistakes that raise no error.

    It finds the following, each with its line and the change:

    - gradients that are clipped, or whose norm is read, while they are scaled;
    - an optimizer that steps with scaled gradients, or past the scaler with gradients that are inf or NaN;
    - `update` that is missing or called twice, `unscale_` that is called twice;
    - gradients that are unscaled although the loss was not scaled;
    - a call that raises an exception which is suppressed;
    - `backward` inside an autocast region;
    - a scaler with bfloat16, or float16 without a scaler where gradients underflow;
    - gradients that are never zeroed, or that are zeroed between backward and step;
    - accumulation over micro-batches whose losses are not divided, or with clipping after each of them;
    - a second step with the same gradients;
    - a scheduler that steps although the scaler skipped the step.

    All but the last show in two iterations. Open the context before the loop. Code that imported a function of torch
    earlier is watched too, except for `torch.nn.utils.clip_grad_value_`.

    Synchronizes with the device once per step where gradients may be zero, and once in float16 without a scaler; each
    time it reads a few numbers. Where an optimizer steps past the scaler, it reads a flag of each gradient.

    Entering returns a `LoopReport`, which is truthy if something was found, and prints as text.

    Example::

        with debugging.check_loop() as report:
            train(model, loader)
        print(report)
    """

    def __init__(self) -> None:
        self.report = LoopReport()
        self.scaler: torch.amp.GradScaler | None = None  # the last one that was called
        self._optimizers: dict[Optimizer, _OptimizerState] = {}
        self._unseen = _OptimizerState()  # of every optimizer that has not been called yet
        self._updated: set[Any] = set()  # scalers that were updated since the last backward of a scaled loss
        self._loss_is_scaled = False  # by a call of `scale` that no backward has followed yet
        self.dtypes: set[torch.dtype] = set()  # of the regions that were entered since the last step
        self._casts: list[Tensor] = []  # two flags for each float16 cast of the last backward, see `_note_casts`
        self.regions: list[_Line] = []  # where the open regions were entered, innermost last
        self.on_backward: Callable[[list[Any], Any, bool], None] = lambda *arguments: (
            None
        )  # called before each backward
        self._raised: tuple[str, str, _Line] | None = None  # the last call that raised: its name, the error, the line
        self.skips = 0  # steps that a scaler skipped
        self._scaled = False  # `scale` was called since the last update
        self._called_from: dict[_Line, _Line] = {}  # by the line of a call: the line of the script that led to it
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
            for owner, name in (
                (clip, "_get_total_norm"),
                (clip, "_clip_grads_with_norm_"),
                (torch.nn.utils, "get_total_norm"),
                (torch.nn.utils, "clip_grads_with_norm_"),
                (torch.nn.utils, "clip_grad_value_"),
            ):
                if hasattr(owner, name):
                    self._wrap(stack, owner, name, functools.partial(self._clip_or_norm, "clip" in name))
            for cls in _with_subclasses(LRScheduler):
                if "step" in vars(cls):
                    self._wrap(stack, cls, "step", self._scheduler)
            for cls in (torch.autocast, autocast):
                self._wrap(stack, cls, "__enter__", self._region)
                self._wrap(stack, cls, "__exit__", self._region_left)
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

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that were called."""
        return list(self._optimizers)

    def _caller(self) -> _Line:
        """The line of the user's code that calls a wrapped function."""
        line = find_caller(2).line()
        self._called_from[line] = script_line(2)
        return line

    def _wrap(self, stack: ExitStack, owner: Any, name: str, watch: Callable[..., Any]) -> None:
        """Have `watch`, a generator, run until its `yield` before a function, and from there after it."""
        inner = vars(owner)[name]

        @functools.wraps(inner)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if args and isinstance(args[0], torch.amp.GradScaler):
                self.scaler = args[0]
            if self._depth or sys._getframe(1).f_code.co_filename.startswith(_AMPKIT_LOOPS):
                return inner(*args, **kwargs)  # called by another wrapped function, or by a loop of ampkit's own
            self._note_suppressed()
            self._depth += 1
            try:
                around: Iterator[None] = watch(*args, **kwargs)
                next(around)
                result = inner(*args, **kwargs)
                next(around, None)
                return result
            except Exception as error:
                self._raised = name, f"{type(error).__name__}: {str(error).partition(chr(10))[0][:100]}", self._caller()
                raise
            finally:
                self._depth -= 1

        setattr(owner, name, wrapped)
        stack.callback(setattr, owner, name, inner)

    def _note_suppressed(self) -> None:
        """Add a finding if the loop goes on after one of its calls raised an error."""
        if self._raised is not None:
            name, error, line = self._raised
            self._raised = None
            self._add(
                f"{name} raises an exception that is suppressed: {error}",
                f"do not suppress exceptions around {name}, whose work is left out: correct the call",
                line,
            )

    def _add(self, what: str, change: str, at: _Line | None = None, *, grade: Grade = "wrong") -> None:
        file, line = at or self._caller()
        now = self.report.iterations
        for finding in self.report.loop:
            if (finding.what, finding.file, finding.line) == (what, file, line):
                finding.last = now
                return
        called_from = self._called_from.get((file, line), ("", 0))
        if called_from[0] == file:
            called_from = ("", 0)
        self.report.loop.append(LoopFinding(what, file, line, change, now, now, grade, called_from))

    # --- the scaler

    def _scale(self, scaler: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        self._scaled = True
        if scaler.is_enabled():
            self._loss_is_scaled = True
            if self.dtypes == {torch.bfloat16}:
                self._add(
                    "a loss is scaled for bfloat16, which has float32's range: scaling has no use there, and "
                    "skips steps",
                    "scaler = GradScaler(enabled=False), or float16 in the region",
                    grade="note",
                )
        yield

    def _unscale(self, scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Iterator[None]:
        state = self._state_of(optimizer)
        if state.unscaled and scaler.is_enabled() and not kwargs.get("allow_repeat"):
            self._add(
                "unscale_ is called twice without an update",
                "call scaler.update() also where the step is left out"
                if state.scaled
                else "call scaler.unscale_(optimizer) once, before clipping",
            )
        self._check_scaled(scaler, state)
        state.scaler, state.unscaled = scaler, True
        yield
        state.scaled = False

    def _check_scaled(self, scaler: Any, state: _OptimizerState) -> None:
        """Add a finding if gradients are about to be unscaled although no loss was scaled."""
        if scaler.is_enabled() and state.backwards and not (self._scaled or state.scaled or state.unscaled):
            self._add(
                "gradients are divided by the loss scale, and the loss was not scaled",
                "scaler.scale(loss).backward()",
                _most_frequent(state.backwards),
            )

    def _step(self, scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Iterator[None]:
        state = self._state_of(optimizer)
        if state.stepped_at and scaler.is_enabled():
            self._add(
                "update is not called after step: the scale never changes, and a second step is refused",
                "scaler.update() after scaler.step(optimizer)",
                state.stepped_at,
            )
        self._check_scaled(scaler, state)
        self._check_gradients(state, closure=bool(args) or "closure" in kwargs)
        state.scaler, state.stepped_at, state.scaled = scaler, self._caller(), False
        self._in_scaler_step, self._optimizer_ran = True, False
        try:
            yield
        finally:
            self._in_scaler_step = False
        state.skipped = not self._optimizer_ran
        self.skips += state.skipped
        if state.skipped:
            self._step_ended(optimizer)

    def _update(self, scaler: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        if scaler in self._updated and scaler.is_enabled() and not args and not kwargs:
            self._add(
                "update is called twice for one backward", "call scaler.update() once, after the last scaler.step"
            )
        self._updated.add(scaler)
        self._scaled = False
        for state in self._states():
            if state.scaler is scaler:
                state.stepped_at, state.unscaled = None, False
        yield

    # --- gradients

    def _backward(self, tensors: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        scaled, self._loss_is_scaled = self._loss_is_scaled, False
        roots = [tensors] if isinstance(tensors, Tensor) else tensors if isinstance(tensors, (list, tuple)) else ()
        loss = next((root for root in roots if isinstance(root, Tensor)), None)
        if loss is not None and torch.is_autocast_enabled(loss.device.type):
            self._add(
                "backward runs inside the autocast region, which casts its operators again",
                "leave the region first: loss.backward() outside of `with autocast`",
                grade="note",
            )
        if scaled:
            self._updated.clear()
        for state in self._states():
            self._check_cleared(state)
            state.versions = state.gradient_versions()
        retained = kwargs.get("retain_graph", args[1] if len(args) > 1 else None)
        divided = retained or (loss is not None and _is_divided(loss, scaled))
        unscaled_float16 = not scaled and torch.float16 in self.dtypes
        self.on_backward(list(roots), args[0] if args else kwargs.get("grad_tensors"), scaled)
        with ExitStack() as hooks:
            if unscaled_float16 and loss is not None and any(s.underflows for s in self._states()):
                self._casts.clear()
                _note_casts(loss, self._casts, hooks)
            yield
        line = self._caller()
        for state in (*self._states(), self._unseen):
            if state is self._unseen or state.versions != state.gradient_versions():
                state.scaled, state.zeroed_at = scaled, None
                state.largest = _largest(state.parameters) if unscaled_float16 else None
                state.divided |= bool(divided)
                state.backwards[line] = state.backwards.get(line, 0) + 1

    def _zero_grad(self, owner: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        if isinstance(owner, Optimizer):
            self._state_of(owner)  # has a state of its own from its first backward on
        yield
        self._unseen.backwards.clear()
        for state in self._states():
            self._check_cleared(state)
            if state.backwards and all(p.grad is None for p in state.parameters):
                state.backwards.clear()
                state.zeroed_at = self._caller()

    def _check_gradients(self, state: _OptimizerState, *, closure: bool) -> None:
        """Add a finding if a step is about to use gradients of the step before too, or none of the last backward.

        A scaler that skips the step does not call the optimizer.
        """
        if not state.cleared and state.backwards and not closure:
            self._add(
                "gradients of the step before are still there: zero_grad is missing",
                "optimizer.zero_grad() after the step, or before backward",
            )
        if state.zeroed_at and all(p.grad is None for p in state.parameters):
            self._add(
                "zero_grad is called between backward and step: the step has no gradients",
                "optimizer.zero_grad() before backward, or after the step",
                state.zeroed_at,
            )

    def _check_cleared(self, state: _OptimizerState) -> None:
        """Note whether the gradients of the last step were cleared: the first is None, another tensor, or zero."""
        if not state.cleared and state.last_gradients:
            gradient, last = state.parameters[0].grad, state.last_gradients[0]
            state.cleared = gradient is None or gradient is not last or not _has_nonzero(gradient)

    def _clip_or_norm(self, clips: bool, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Gradients are clipped, or their norm is read."""
        argument = next(iter((*args, *kwargs.values())))
        if isinstance(argument, Tensor):
            tensors = [argument]
        else:  # only the function may consume a generator
            tensors = [] if isinstance(argument, Iterator) else list(argument)
        ids = {id(t) for t in tensors} | {id(t.grad) for t in tensors if t.grad_fn is None and t.is_leaf}
        followed = [s for s in self._states() if any(id(p.grad) in ids for p in s.parameters)]
        unscaled = any(state.unscaled for state in self._states())
        if any(state.scaled for state in followed) or (not followed and self._unseen.scaled and not unscaled):
            self._add(
                "gradients are clipped, or their norm is read, while they are scaled",
                "scaler.unscale_(optimizer) before it, or scaler.clip_grad_norm_(optimizer, max_norm)",
            )
        if clips and followed:
            line = self._caller()
            for state in followed:
                state.clips[line] = state.clips.get(line, 0) + 1
        yield

    # --- optimizers, schedulers, regions

    def _states(self) -> list[_OptimizerState]:
        """What is known of each optimizer, once where several objects are one optimizer."""
        return list({id(state): state for state in self._optimizers.values()}.values())

    def _state_of(self, optimizer: Optimizer) -> _OptimizerState:
        if optimizer not in self._optimizers:
            parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
            parameters = parameters[:: max(1, math.ceil(len(parameters) / _MAX_PARAMETERS))]
            ids = [*map(id, parameters)]
            # Fabric and accelerate wrap optimizers: what is called on one object is called on the other.
            state = next((each for each in self._states() if ids and [*map(id, each.parameters)] == ids), None)
            if state is None:
                state = copy.deepcopy(self._unseen)
                state.parameters = parameters
            self._optimizers[optimizer] = state
        return self._optimizers[optimizer]

    def _optimizer_starts(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        state = self._state_of(optimizer)
        self._optimizer_ran = True
        closure = len(args) > 1 or kwargs.get("closure")
        if state.scaled and state.backwards and not self._in_scaler_step:
            self._add(
                "the optimizer steps with scaled gradients", "scaler.step(optimizer) in place of optimizer.step()"
            )
        past_scaler = state.unscaled and state.scaler.is_enabled() and not self._in_scaler_step
        if past_scaler and not _is_finite(optimizer):
            self._add(
                "the optimizer steps although unscale_ found inf or NaN in the gradients",
                "scaler.step(optimizer) in place of optimizer.step(): it skips such steps",
            )
        if not self._in_scaler_step:
            self._check_gradients(state, closure=bool(closure))
        if state.last_gradients and not closure and not state.backwards:
            versions = state.gradient_versions()
            if versions == state.versions and any(version != (0, 0) for version in versions):
                self._add(
                    "the optimizer steps twice with the same gradients",
                    "step once: scaler.step(optimizer) where there is a scaler, and remove the other step",
                )
        if state.largest is not None and state.backwards:
            self._check_underflow(state, state.largest.tolist())
        most = max(state.backwards.values(), default=0)
        for line, times in state.clips.items():
            if times > 1 and times == most:
                self._add(
                    f"gradients are clipped {times} times for one step, after each backward",
                    "clip once, after the last backward and before the step",
                    line,
                    grade="note",
                )
        if most > 1 and not state.divided:
            self._add(
                f"gradients of {most} backward calls are summed, and the losses are not divided",
                f"(loss / {most}).backward(), so that they are averaged",
                _most_frequent(state.backwards),
                grade="note",
            )

    def _check_underflow(self, state: _OptimizerState, largest: list[float]) -> None:
        """Add a finding where gradients are 0, or nearly, because of float16: a loss scale would keep them.

        A gradient can be 0 in float32 as well: of masked values, dead units or unused parameters. So it is a finding
        only with a cast in the next backward that made all of a gradient 0, or where the largest of all gradients is
        below float16's normal numbers.
        """
        if min(largest) >= _NEARLY_ZERO:
            return
        casts = [flags.tolist() for flags in self._casts]
        if any(lost or (counts and 0 < max(largest) < _SMALLEST_NORMAL) for counts, lost in casts):
            self._add(
                "gradients underflow in float16, and the loss is not scaled",
                "scaler = GradScaler(); scaler.scale(loss).backward(), scaler.step(optimizer), scaler.update(). "
                "Or bfloat16 in the region",
                _most_frequent(state.backwards),
            )
        state.underflows = True

    def _optimizer_ends(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._step_ended(optimizer)

    def _step_ended(self, optimizer: Optimizer) -> None:
        state = self._state_of(optimizer)
        state.last_gradients = [p.grad for p in state.parameters]
        state.cleared = not state.last_gradients
        state.scaled = state.divided = False
        state.largest = None
        state.backwards.clear()
        state.clips.clear()
        state.zeroed_at, state.versions = None, state.gradient_versions()
        state.steps_since_scheduler += 1
        self._unseen = _OptimizerState()
        self.dtypes.clear()
        self.report.iterations += 1

    def _scheduler(self, scheduler: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        state = self._optimizers.get(getattr(scheduler, "optimizer", None))  # type: ignore[arg-type]
        if state is not None:
            if state.skipped and state.steps_since_scheduler == 1:
                self._add(
                    "the scheduler steps although the scaler skipped the step",
                    "step it only where the step was taken: scale = scaler.get_scale() before update(), and "
                    "scheduler.step() if scaler.get_scale() >= scale",
                    grade="note",
                )
            state.steps_since_scheduler = 0
        yield

    def _region(self, region: Any) -> Iterator[None]:
        line = find_caller(1).line()
        yield
        self.regions.append(line)
        for device in {"cpu", current_device_type()}:
            if torch.is_autocast_enabled(device):
                self.dtypes.add(torch.get_autocast_dtype(device))

    def _region_left(self, region: Any, *error: Any) -> Iterator[None]:
        yield
        del self.regions[-1:]


def _has_nonzero(gradient: Tensor) -> bool:
    """Whether a gradient has an element other than 0; False for sparse ones and subclasses, where it is unknown."""
    return type(gradient) is Tensor and gradient.layout is torch.strided and bool(gradient.any())


def _is_finite(optimizer: Optimizer) -> bool:
    """Whether all gradients that an optimizer is about to use are finite, as far as they can be read."""
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
    with without_dispatch():
        return all(bool(g.isfinite().all()) for g in gradients if type(g) is Tensor and g.layout is torch.strided)


def _largest(parameters: list[Tensor]) -> Tensor | None:
    """The largest magnitude in each gradient, on the device; sparse gradients and subclasses are left out."""
    gradients = [p.grad for p in parameters if type(p.grad) is Tensor and p.grad.layout is torch.strided]
    with torch.no_grad():
        largest = [gradient.abs().amax().float() for gradient in gradients if gradient.numel()]
        return torch.stack([magnitude.to(largest[0].device) for magnitude in largest]) if largest else None


def _note_casts(loss: Tensor, notes: list[Tensor], hooks: ExitStack) -> None:
    """Have the first cast on each path back from a loss append two flags to `notes`, if float16 takes part in it.

    The flags: the gradient is more than rounding; and it is, but all of it is 0 after the cast. Where a loss does not
    depend on its inputs, as behind a norm, gradients are rounding of float32, a millionth of the loss or less. Losing
    those is no underflow.
    """
    rounding = loss.detach().abs().sum().float() * 1e-5

    def note(grad_inputs: Any, grad_outputs: Any) -> None:
        before, after = grad_outputs[0], grad_inputs[0]
        if type(before) is type(after) is Tensor and torch.float16 in (before.dtype, after.dtype):
            counts = before.abs().sum(dtype=torch.float32) > rounding.to(before.device)
            notes.append(torch.stack([counts, counts & ~after.any()]))

    nodes, seen = [loss.grad_fn], set()
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
    return [cls, *(each for subclass in cls.__subclasses__() for each in _with_subclasses(subclass))]


def _most_frequent(calls: dict[_Line, int]) -> _Line:
    return max(calls, key=calls.__getitem__)


def _is_divided(loss: Tensor, scaled: bool) -> bool:
    """Whether a loss is a quotient or a product: of several micro-batches, it may be its share."""
    node = loss.grad_fn
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
