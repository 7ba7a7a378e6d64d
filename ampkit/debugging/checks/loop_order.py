"""Calls of scaler, backward, clipping, optimizer and scheduler in the wrong order, which raise no error.

`_FINDINGS` lists the problems. Most appear in two iterations. The check computes a few flags: it synchronizes with the
device once per step if gradients may be zero, and once in float16 without a scaler.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampkit.debugging.checks.check import Add, Check, is_plain, largest, sample
from ampkit.debugging.finding import Cause, Grade, Place
from ampkit.debugging.observe.autograd_graph import leaves_from
from ampkit.debugging.observe.observer import Observer
from ampkit.debugging.observe.training_loop import calling_place, scales_losses
from ampkit.debugging.torch_private import node_sequence_number
from ampkit.dtypes import SIXTEEN_BIT, dtype_name
from ampkit.gradients.collect import parameters as parameters_of

_MIN_UNUSED = 10  # backward passes without a step
_ELEMENTS = 1024  # of a parameter that are compared
_MAX_PARAMETERS = 64  # the most parameters of an optimizer whose gradients are tracked
_SMALLEST_NORMAL = torch.finfo(torch.float16).smallest_normal
_LOSSES = frozenset(  # that a region computes in float32
    f"{name}{ending}"
    for name in ("nll_loss", "nll_loss2d", "mse_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits")
    for ending in ("", "_forward")
) | {"smooth_l1_loss", "huber_loss", "kl_div", "soft_margin_loss"}
_NEARLY_ZERO = 2.0**-21  # float16 has three bits or fewer for smaller numbers
# By kind: the symptom, and a fix.
_FINDINGS = {
    "suppressed": (
        "{name} raises an exception that is suppressed: {error}",
        "do not suppress exceptions around {name}, whose work is not done: correct the call",
    ),
    "bfloat16 scaled": (
        "a loss is scaled for bfloat16, which has float32's range: scaling has no use there, and skips steps",
        "scaler = ampkit.GradGuard(), which only skips steps, or float16 in the region",
    ),
    "not scaled": (
        "gradients are divided by the loss scale, and the loss was not scaled",
        "scaler.scale(loss).backward()",
    ),
    "unscaled twice": ("unscale_ is called twice without an update", "{fix}"),
    "no update": (
        "update is not called after step: the scale never changes, and a second step is refused",
        "scaler.update() after scaler.step(optimizer)",
    ),
    "updated twice": (
        "update is called twice for one backward",
        "call scaler.update() once, after the last scaler.step",
    ),
    "backward in region": (
        "backward runs inside the autocast region, which casts its operators again",
        "leave the region first: loss.backward() outside of `with autocast`",
    ),
    "rounded": (
        "the loss is computed in {dtype}, outside of the region",
        "leave the region after the loss, or compute the loss of output.float()",
    ),
    "not zeroed": (
        "gradients of the step before are still there: zero_grad is missing",
        "optimizer.zero_grad() after the step, or before backward",
    ),
    "zeroed before step": (
        "zero_grad is called between backward and step: the step has no gradients",
        "optimizer.zero_grad() before backward, or after the step",
    ),
    "zeroed often": (
        "zero_grad is called before each of the {times} backward calls of a step: it uses the last gradients only",
        "optimizer.zero_grad() once, before the first backward or after the step",
    ),
    "no step": (
        "the optimizer never steps: {times} backward passes compute gradients of its parameters",
        "optimizer.step() after backward",
    ),
    "clipped while scaled": (
        "gradients are clipped, or their norm is read, while they are scaled",
        "scaler.unscale_(optimizer) before it, or scaler.clip_grad_norm_(optimizer, max_norm)",
    ),
    "clipped often": (
        "gradients are clipped {times} times for one step, after each backward",
        "clip once, after the last backward and before the step",
    ),
    "step while scaled": (
        "the optimizer steps with scaled gradients",
        "scaler.step(optimizer) instead of optimizer.step()",
    ),
    "step past scaler": (
        "the optimizer steps although unscale_ found inf or NaN in the gradients",
        "scaler.step(optimizer) instead of optimizer.step(): it skips such steps",
    ),
    "step twice": (
        "the optimizer steps twice with the same gradients",
        "step once: scaler.step(optimizer) if there is a scaler, and remove the other step",
    ),
    "not divided": (
        "gradients of {times} backward calls are summed, and the losses are not divided",
        "(loss / {times}).backward(), so that they are averaged",
    ),
    "underflow": (
        "gradients underflow in float16, and the loss is not scaled",
        "scaler = GradScaler(); scaler.scale(loss).backward(), scaler.step(optimizer), scaler.update(). "
        "Or bfloat16 in the region",
    ),
    "scheduler after skip": (
        "the scheduler steps although the scaler skipped the step",
        "step it only if the step was executed: scale = scaler.get_scale() before update(), and "
        "scheduler.step() if scaler.get_scale() >= scale",
    ),
}
_NOTES = ("bfloat16 scaled", "backward in region", "rounded", "clipped often", "not divided", "scheduler after skip")


@dataclass
class _OptimizerState:
    """The calls of the loop for an optimizer and its gradients."""

    parameters: list[Tensor] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)  # of gradients: before a backward, after a step
    scaled: bool = False  # the gradients are scaled, since the last backward that reached them
    backwards: dict[Place, int] = field(default_factory=dict)  # calls by line, since the last step
    divided: bool = False  # the loss of some backward was a quotient or a product
    last_gradients: list[Tensor | None] = field(default_factory=list)  # gradients of the last step
    cleared: bool = True  # the gradients of the last step were cleared or replaced
    has_stepped: bool = False
    skipped: bool = False  # the scaler skipped the last step
    steps_since_scheduler: int = 0  # executed or skipped
    clips: dict[Place, int] = field(default_factory=dict)  # calls by line, since the last step
    zeroed_at: Place | None = None  # the line that cleared the gradients after backward and before the step
    dropped: dict[Place, int] = field(default_factory=dict)  # calls of backward whose gradients were cleared, as above
    is_used: bool = False  # another optimizer has stepped since the last backward, which may have been for it
    dropped_at: Place | None = None  # the line that cleared them
    weights: Tensor | None = None  # elements of the first parameter then
    drops: int = 0  # steps in a row whose last backward is on such a line
    scaler: Any = None  # the last scaler that unscaled the gradients or executed the step
    unscaled: bool = False  # `unscale_` was called since the last `update`
    stepped_at: Place | None = None  # the line of `scaler.step` since the last `update`
    largest: Tensor | None = None  # magnitude in each gradient, after an unscaled backward in float16
    underflows: bool = False  # after an unscaled backward in float16 some gradient was nearly 0

    def gradient_versions(self) -> list[tuple[int, int]]:
        """Return the identity and version of each gradient, which change if it is written; (0, 0) without one."""
        return [(0, 0) if p.grad is None else (id(p.grad), p.grad._version) for p in self.parameters]


class LoopOrder(Check):
    """Tracks scaling, clearing and clipping of each optimizer's gradients. Needs no dispatch mode."""

    name = "loop order"
    needs_operators = False

    def __init__(self, run: Observer, add: Add) -> None:
        super().__init__(run, add)
        self._loop = run.loop
        self._optimizers: dict[Optimizer, _OptimizerState] = {}
        self._unknown = _OptimizerState()  # of each optimizer that has not been called yet
        self._updated: set[Any] = set()  # scalers that were updated since the last backward of a scaled loss
        self._casts: list[Tensor] = []  # two flags for each float16 cast of the last backward, see `_note_casts`
        self._raised: tuple[str, str, Place] | None = None  # the last call that raised: its name, the error, the line
        self._scaled = False  # `scale` was called since the last update
        self._loss: Tensor | None = None  # the first root of the last backward

    def call_starts(self) -> None:
        """Add a finding if the loop continues after one of its calls raised an error."""
        if self._raised is not None:
            name, error, place = self._raised
            self._raised = None
            self._add("suppressed", place, name=name, error=error)

    def call_raised(self, name: str, error: Exception) -> None:
        """Note a call that raised an error, which the loop may suppress."""
        text = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:100]}"
        self._raised = name, text, calling_place()

    def _add(self, kind: str, at: Place | None = None, *, why: str = "", **values: Any) -> None:
        """Add a finding of `_FINDINGS`, with these values in its text."""
        what, fix = (text.format(**values) for text in _FINDINGS[kind])
        grade: Grade = "note" if kind in _NOTES else "error"
        self.found(at or calling_place(), grade, Cause(kind, why), what, fix, step=self._loop.iterations.number)

    # --- the scaler

    def scale(self, scaler: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        self._scaled = True
        if scales_losses(scaler) and self._loop.dtypes == {torch.bfloat16}:
            self._add("bfloat16 scaled")
        yield

    def unscale(self, scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Iterator[None]:
        state = self._state_of(optimizer)
        if state.unscaled and scaler.is_enabled() and not kwargs.get("allow_repeat"):
            fix = "call scaler.unscale_(optimizer) once, before clipping"
            self._add("unscaled twice", fix="call scaler.update() also if the step is omitted" if state.scaled else fix)
        self._check_scaled(scaler, state)
        state.scaler, state.unscaled = scaler, True
        yield
        state.scaled = False

    def _check_scaled(self, scaler: Any, state: _OptimizerState) -> None:
        """Add a finding if gradients are about to be unscaled although no loss was scaled."""
        if scales_losses(scaler) and state.backwards and not (self._scaled or state.scaled or state.unscaled):
            self._add("not scaled", _most_frequent(state.backwards))

    def scaler_step(self, scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Iterator[None]:
        state = self._state_of(optimizer)
        if state.stepped_at and scaler.is_enabled():
            self._add("no update", state.stepped_at)
        self._check_scaled(scaler, state)
        self._check_gradients(state, closure=bool(args) or "closure" in kwargs)
        state.scaler, state.stepped_at, state.scaled = scaler, calling_place(), False
        yield
        state.skipped = self._loop.step_is_skipped
        if state.skipped:
            self.step_ended(optimizer)

    def update(self, scaler: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        if scaler in self._updated and scales_losses(scaler) and not args and not kwargs:
            self._add("updated twice")
        self._updated.add(scaler)
        self._scaled = False
        for state in self._states():
            if state.scaler is scaler:
                state.stepped_at, state.unscaled = None, False
        yield

    # --- gradients

    def backward(self, tensors: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        scaled, loss = self._loop.loss_is_scaled, self._loss
        if loss is not None and torch.is_autocast_enabled(loss.device.type):
            self._add("backward in region")
        if scaled:
            self._updated.clear()
        for state in self._states():
            self._check_cleared(state)
            state.versions = state.gradient_versions()
        retained = kwargs.get("retain_graph", args[1] if len(args) > 1 else None)
        divided = retained or (loss is not None and _is_divided(loss, scaled))
        unscaled_float16 = not scaled and torch.float16 in self._loop.dtypes
        with ExitStack() as hooks:
            if unscaled_float16 and loss is not None and any(s.underflows for s in self._states()):
                self._casts.clear()
                _note_casts(loss, self._casts, hooks)
            yield
        place = calling_place()
        for state in (*self._states(), self._unknown):
            if state is self._unknown or state.versions != state.gradient_versions():
                state.scaled, state.zeroed_at, state.is_used = scaled, None, False
                state.largest = largest(p.grad for p in state.parameters) if unscaled_float16 else None
                state.divided |= bool(divided)
                state.backwards[place] = state.backwards.get(place, 0) + 1
                state.versions = state.gradient_versions()
                if place in state.dropped and loss is not None and not self._reaches_only_parameters(loss):
                    state.dropped.clear()  # its gradients are used: of an input, as in adversarial training

    def _reaches_only_parameters(self, loss: Tensor) -> bool:
        held = {id(p) for optimizer in self._optimizers for p in parameters_of(optimizer)}
        return held.issuperset(map(id, leaves_from([loss.grad_fn])))

    def zero_grad(self, owner: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        for optimizer in [owner] if isinstance(owner, Optimizer) else [*self._loop.made]:
            self._state_of(optimizer)  # has a state of its own from its first backward on
        yield
        self._unknown.backwards.clear()
        for state in self._states():
            self._check_cleared(state)
            if state.backwards and all(p.grad is None for p in state.parameters):
                for place, times in state.backwards.items() if not state.is_used else ():
                    state.dropped[place] = state.dropped.get(place, 0) + times
                state.backwards.clear()
                state.zeroed_at = state.dropped_at = calling_place()
                first = state.parameters[0] if state.parameters else None
                state.weights = sample(first, _ELEMENTS).clone() if is_plain(first) else None

    def _check_gradients(self, state: _OptimizerState, *, closure: bool) -> None:
        """Add a finding if a step is about to use gradients of the last step as well, or none of the last backward.

        A scaler that skips the step does not call the optimizer.
        """
        if not state.cleared and state.backwards and not closure:
            self._add("not zeroed")
        if state.zeroed_at and all(p.grad is None for p in state.parameters):
            self._add("zeroed before step", state.zeroed_at)

    def _check_cleared(self, state: _OptimizerState) -> None:
        """Note whether the gradients of the last step were cleared: the first is None, another tensor, or zero."""
        if not state.cleared and state.last_gradients:
            gradient, last = state.parameters[0].grad, state.last_gradients[0]
            state.cleared = gradient is not last or not (is_plain(gradient) and bool(gradient.any()))

    def read_norm(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        self._check_unscaled(*args, **kwargs)
        yield

    def clip(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        place = calling_place()
        for state in self._check_unscaled(*args, **kwargs):
            state.clips[place] = state.clips.get(place, 0) + 1
        yield

    def _check_unscaled(self, *args: Any, **kwargs: Any) -> list[_OptimizerState]:
        """Check gradients that are clipped, or whose norm is read. Return the states of their optimizers."""
        argument = next(iter((*args, *kwargs.values())))
        tensors = [argument] if isinstance(argument, Tensor) else list(argument)
        ids = {id(t) for t in tensors} | {id(t.grad) for t in tensors if t.grad_fn is None and t.is_leaf}
        states = [s for s in self._states() if any(id(p.grad) in ids for p in s.parameters)]
        unscaled = any(state.unscaled for state in self._states())
        if any(state.scaled for state in states) or (not states and self._unknown.scaled and not unscaled):
            self._add("clipped while scaled")
        return states

    def backward_starts(self, roots: Sequence[Tensor], scaled: bool) -> None:
        """Check for a 16-bit loss, unlike in a region."""
        self._loss = next(iter(roots), None)
        for root in roots:
            node: Any = root.grad_fn
            while node is not None and node.name().startswith(("Mul", "ToCopy")):  # by the scale
                node = node.next_functions[0][0]
            forward = None if node is None else self.run.forward_with(node_sequence_number(node))
            dtype = None if node is None else node._input_metadata[0].dtype
            if forward is None or dtype not in SIXTEEN_BIT or not self._loop.dtypes:
                continue
            if forward.op.base in _LOSSES:
                why = "inside of it the region computes a loss in float32"
                self._add("rounded", self.run.place(forward), why=why, dtype=dtype_name(dtype))

    # --- optimizers, schedulers

    def _states(self) -> list[_OptimizerState]:
        """Return the state of each optimizer, once if several objects are one optimizer."""
        return list({id(state): state for state in self._optimizers.values()}.values())

    def _state_of(self, optimizer: Optimizer) -> _OptimizerState:
        if optimizer not in self._optimizers:
            parameters = [p for p in parameters_of(optimizer) if p.requires_grad]
            parameters = parameters[:: max(1, math.ceil(len(parameters) / _MAX_PARAMETERS))]
            ids = [*map(id, parameters)]
            # Fabric and accelerate wrap optimizers: a call on one object is a call on the other.
            state = next((each for each in self._states() if ids and [*map(id, each.parameters)] == ids), None)
            if state is None:
                state = copy.deepcopy(self._unknown)
                state.parameters = parameters
            self._optimizers[optimizer] = state
        return self._optimizers[optimizer]

    def step_starts(self, optimizer: Optimizer, closure: bool) -> None:
        state = self._state_of(optimizer)
        in_scaler_step = self._loop.in_scaler_step
        if state.scaled and state.backwards and not in_scaler_step:
            self._add("step while scaled")
        if state.unscaled and state.scaler.is_enabled() and not in_scaler_step:
            magnitudes = largest(p.grad for p in parameters_of(optimizer))
            if magnitudes is not None and not bool(magnitudes.isfinite().all()):
                self._add("step past scaler")
        if not in_scaler_step:
            self._check_gradients(state, closure=closure)
        if state.last_gradients and not closure and not state.backwards:
            versions = state.gradient_versions()
            if versions == state.versions and any(version != (0, 0) for version in versions):
                self._add("step twice")
        if state.largest is not None and state.backwards:
            self._check_underflow(state, state.largest.tolist())
        self._check_dropped(state, closure=closure)
        most = max(state.backwards.values(), default=0)
        for place, times in state.clips.items():
            if times > 1 and times == most:
                self._add("clipped often", place, times=times)
        if most > 1 and not state.divided:
            self._add("not divided", _most_frequent(state.backwards), times=most)

    def _check_dropped(self, state: _OptimizerState, *, closure: bool) -> None:
        """Add a finding if two steps in a row use the last of several gradients, and nothing has used the others.

        A program that uses them writes to the parameters (as sharpness-aware training), or makes the gradients of the
        step (as an average of clipped ones).
        """
        dropped = [times for place, times in state.dropped.items() if place in state.backwards]
        versions = zip(state.versions, state.gradient_versions(), strict=False)
        is_used = closure or state.weights is None or any(last[0] != now[0] for last, now in versions)
        if dropped and not is_used and state.weights is not None:
            is_used = not torch.equal(state.weights, sample(state.parameters[0], _ELEMENTS))
        state.drops = state.drops + 1 if dropped and not is_used else 0
        if state.drops >= 2:
            self._add("zeroed often", state.dropped_at, times=max(dropped) + 1)

    def ended(self) -> None:
        for optimizer, state in self._optimizers.items() if not self._loop.n_skipped_steps else ():
            times = sum(state.dropped.values()) + sum(state.backwards.values())
            if times >= _MIN_UNUSED and state.dropped and not state.has_stepped:
                self._add("no step", self.place_of(optimizer), times=times)

    def _check_underflow(self, state: _OptimizerState, largest: Sequence[float]) -> None:
        """Add a finding if gradients are nearly 0 because of float16: a loss scale would preserve them.

        A gradient can be 0 in float32 as well: of masked values, dead units or unused parameters. So it is a finding
        only if a cast in the next backward makes all of a gradient 0, or if the largest of all gradients is below
        float16's normal numbers.
        """
        if min(largest) >= _NEARLY_ZERO:
            return
        casts = [flags.tolist() for flags in self._casts]
        if any(zero or (counts and 0 < max(largest) < _SMALLEST_NORMAL) for counts, zero in casts):
            self._add("underflow", _most_frequent(state.backwards))
        state.underflows = True

    def step_ended(self, optimizer: Optimizer | None, *, complete: bool = True) -> None:
        if optimizer is None:
            return
        state = self._state_of(optimizer)
        state.last_gradients = [p.grad for p in state.parameters]
        state.cleared = not state.last_gradients
        state.scaled = state.divided = False
        state.largest = None
        state.backwards.clear()
        state.clips.clear()
        state.dropped.clear()
        state.has_stepped = True
        for other in self._states():
            other.is_used |= other is not state
        state.zeroed_at, state.versions = None, state.gradient_versions()
        state.steps_since_scheduler += 1
        self._unknown = _OptimizerState()

    def scheduler_step(self, scheduler: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        state = self._optimizers.get(getattr(scheduler, "optimizer", None))  # type: ignore[arg-type]
        if state is not None:
            if state.skipped and state.steps_since_scheduler == 1:
                self._add("scheduler after skip")
            state.steps_since_scheduler = 0
        yield


def _note_casts(loss: Tensor, notes: list[Tensor], hooks: ExitStack) -> None:
    """Have the first cast on each path back from a loss append two flags to `notes`, if float16 takes part in it.

    The flags: the gradient is more than rounding; it is, and all of it is 0 after the cast. If a loss does not depend
    on its inputs, such as after a norm, gradients are rounding errors of float32, a millionth of the loss or less. If
    these become 0, it is not an underflow.
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


def _most_frequent(calls: dict[Place, int]) -> Place:
    return max(calls, key=calls.__getitem__)


def _is_divided(loss: Tensor, scaled: bool) -> bool:
    """Return whether a loss is a quotient or a product: it may be the share of one micro-batch."""
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
