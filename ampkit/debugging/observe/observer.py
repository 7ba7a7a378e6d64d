"""Observes every operator and step of a run, and reports them to the checks, with the caller and the state of the step.

An `Observer` is a dispatch mode below autograd, so operators reach it after a region's casts. The region's own mode is
not affected. Compiled functions run eagerly, since their operators could not be observed otherwise.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from ampkit.debugging.finding import Losses, Place
from ampkit.debugging.observe.call import Call, Phase
from ampkit.debugging.observe.call_sites import Caller, ModuleCalls, find_caller
from ampkit.debugging.observe.operator_properties import (
    OperatorProperties,
    outputs_of,
    properties_of,
    readable,
    tensors_in,
)
from ampkit.debugging.observe.tape import Tape
from ampkit.debugging.observe.tensor_values import extremes
from ampkit.debugging.observe.training_loop import TrainingLoop
from ampkit.debugging.torch_private import (
    FakeTensor,
    current_node,
    is_opaque,
    next_sequence_number,
    node_sequence_number,
    storage_key,
    without_modes,
)
from ampkit.dispatch.weight_cache import invalidate_casts
from ampkit.dtypes import SIXTEEN_BIT, dtype_name
from ampkit.torch_private import ObserverMode, OpOverload, dispatch_modes, loaded, n_dispatch_modes

# After this many steps and operators, operators are observed in `_BURST` of each `_PERIOD` steps.
_FULL_STEPS, _FULL_OPERATORS = 32, 1 << 19
_BURST, _PERIOD = 16, 128
UNOBSERVED = _PERIOD - _BURST  # the most steps in a row without


class _Thread(threading.local):
    """The last autograd sequence number that was observed in a thread."""

    def __init__(self) -> None:
        self.number = next_sequence_number() - 1


class Observer(ObserverMode):
    """Context in which the operators of a thread and of its backward threads are observed, except for views.

    Operators inside the functions that it calls are not observed.

    Args:
        model: module whose submodules are named by their paths; None takes the outermost modules that run.
        needs_operators: False observes the calls of the loop only, and enters no dispatch mode.
        from_step: number of the first iteration whose operators are observed.
    """

    def __init__(self, model: Module | None, *, needs_operators: bool = True, from_step: int = 0) -> None:
        super().__init__()
        if model is not None and not isinstance(model, Module):
            raise TypeError(f"model is {type(model).__name__}; expected a torch.nn.Module, or None for whatever runs")
        self.modules = ModuleCalls(model)
        self.loop = TrainingLoop()
        self.loop.silently, self.loop.step_starts, self.loop.step_ended = self.silently, self._starts, self._ended
        self.loop.step_follows = self._schedule
        self.tape = Tape()  # of the step's operators, recorded for `operator_ran`
        self.first_step = from_step
        self.begun = False  # operators are observed
        self.unobserved = 0  # steps without, after the first with them
        self.missed: int | None = None  # the first of these whose loss is inf or NaN
        self.compiled = False  # compiled functions ran
        self.scale: float | None = None  # the loss scale, if a scaler takes part
        self.losses: Losses = {}
        self.low: dict[Any, Call] = {}  # a 16-bit call of each line and module
        self.last_loss = 0.0
        self.backwards = 0  # calls of backward in this step
        self.step = 0  # iterations that have ended
        self.count = 0  # operators observed
        self.computed = False  # an operator of this step counts as training, see `_run`
        self.operator_ran: list[Callable[[Call], None]] = []
        self.on_state: Callable[[Any], object] = lambda owner: None  # called before an optimizer or a scaler changes
        self.on_step_starts: Callable[[Any, bool], None] = lambda optimizer, closure: None
        self.on_step_ended: Callable[[Any], None] = lambda optimizer: None
        self.on_step_counted: Callable[[], None] = lambda: None  # the next step begins
        self.on_pause: Callable[[], None] = lambda: None  # operators are not observed from now on
        self._has_paused = False
        self.full_until: float = from_step + _FULL_STEPS  # the first step whose operators may be omitted
        self._skips = 0  # skips of the loop before the last step
        self._reports: dict[tuple[OperatorProperties, Phase], list[Callable[[Call], None]]] = {}  # of `operator_ran`
        self._needs_operators = needs_operators
        self._paused = False  # the operators belong to a check
        self._in_optimizer = self._backward_seen = self._unscaled = False
        self._skipped_steps = 0  # skipped steps of the loop that were processed
        self._forward: dict[int, Call] = {}  # by sequence number, of this step and of the last one
        self._forward_before: dict[int, Call] = {}
        self._thread = _Thread()
        self._open, self._observing = ExitStack(), ExitStack()

    def __enter__(self) -> Observer:
        with ExitStack() as stack:
            stack.enter_context(self.loop)
            stack.callback(lambda: self._observing.close())
            if self.first_step == 0:
                self._begin(stack)
            self._open = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.close()

    def _begin(self, stack: ExitStack) -> None:
        """Observe operators from now on; before, only steps are counted."""
        if not self._needs_operators:
            self.begun = True
            return
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        self._watch_compiled(stack)
        self._resume()

    def _resume(self) -> None:
        """Enter the dispatch mode."""
        self.begun, self._has_paused = True, False
        self._thread = _Thread()
        with ExitStack() as stack:
            stack.enter_context(self.modules.tracked())
            super().__enter__()
            stack.callback(super().__exit__, None, None, None)
            self._observing = stack.pop_all()
        invalidate_casts()  # cached casts are computed again, so that they are observed

    def _schedule(self) -> None:
        """Decide whether the operators of the next step are observed: in all of the first steps, then in some of them.

        The mode is exited only if it is the innermost one, and entered only if there is none.
        """
        if self.step < self.first_step or not self._needs_operators:
            return
        if not self.begun and not self._has_paused:
            self._begin(self._open)
        if self.loop.skips > self._skips or self.missed == self.step - 1:
            self.full_until = max(self.full_until, self.step + _BURST)
        self._skips = self.loop.skips
        observes = self.step < self.full_until or self.count < _FULL_OPERATORS or self.step % _PERIOD < _BURST
        if observes and not self.begun and not n_dispatch_modes():
            self._resume()
        elif not observes and self.begun and dispatch_modes() == [self] and current_node() is None:
            self._observing.close()
            self.begun, self._has_paused = False, True
            self.on_pause()

    def backward_starts(self, roots: list[Tensor], scaled: bool) -> None:
        """Note the loss of a step whose operators are not observed, and observe them again after inf or NaN."""
        self.computed |= self._has_paused
        for loss in [each for each in readable(roots) if each.numel() == 1 and self._has_paused][:1]:
            scaler = self.loop.scaler if scaled else None
            value = float(loss.detach()) / (1.0 if scaler is None else scaler.get_scale())
            known = (each for losses in self.losses.values() for each in losses.values())
            if not math.isfinite(value) and all(map(math.isfinite, known)):
                self.missed = self.step
            self._note_loss(value, find_caller(1))

    def _watch_compiled(self, stack: ExitStack) -> None:
        """Note calls of compiled functions: each gets its callback from the stance."""
        eval_frame: Any = sys.modules["torch._dynamo.eval_frame"]
        inner = loaded("_dynamo.eval_frame", "_callback_from_stance")

        def callback_from_stance(callback: Any) -> Any:
            self.compiled |= callable(callback)
            return inner(callback)

        eval_frame._callback_from_stance = callback_from_stance
        stack.callback(setattr, eval_frame, "_callback_from_stance", inner)

    @contextmanager
    def silently(self) -> Iterator[None]:
        """Return a context in which operators are not observed."""
        before, self._paused = self._paused, True
        try:
            with without_modes():
                yield
        finally:
            self._paused = before

    # --- places and names

    def place(self, call: Call, result: Tensor | None = None) -> Place:
        """Return the place of a call, with dtype and shape of a result."""
        module, (file, line), backward_of = call.module, call.caller.line(), ""
        forward = self.forward_with(call.backward_number) if call.phase == "backward" else None
        if forward is not None:
            module, backward_of = forward.module, forward.op.name
            if call.caller.outside or not line:
                file, line = forward.caller.line()
        return Place(
            file=file,
            line=line,
            op=call.op.name,
            module="" if module is None else module.name,
            phase=call.phase,
            backward_of=backward_of,
            call=0 if module is None else module.number,
            index=call.index,
            dtype="" if result is None else dtype_name(result.dtype),
            shape=() if result is None else tuple(result.shape),
        )

    def forward_with(self, number: int) -> Call | None:
        """Return the forward operator with an autograd sequence number; of a custom function, the first operator."""
        return self._forward.get(number) or self._forward_before.get(number)

    def name_of(self, tensor: Tensor) -> str:
        """Return the name of a parameter, a buffer or a gradient; "" for other tensors."""
        if is_opaque(tensor):
            return ""
        key = storage_key(tensor)
        for root in self.modules.roots():
            for name, named in (*root.named_parameters(), *root.named_buffers()):
                if not is_opaque(named) and storage_key(named) == key:
                    return name
                if named.grad is not None and not is_opaque(named.grad) and storage_key(named.grad) == key:
                    return f"{name}.grad"
        return ""

    def names_of(self, tensors: Collection[Tensor]) -> str:
        """Return the names of the first three parameters, or dtype and shape without a name, and how many follow."""
        names = [self.name_of(t) or f"{dtype_name(t.dtype)}{list(t.shape)}" for t in [*tensors][:3]]
        return ", ".join(names) + (f" and {len(tensors) - 3} more" if len(tensors) > 3 else "")

    def state_name(self, tensor: Tensor) -> tuple[str, str]:
        """Return the owner of a tensor and its name: the state of an optimizer, a parameter or buffer, or neither."""
        key = storage_key(tensor)
        for optimizer in self.loop.optimizers:
            for parameter, state in optimizer.state.items():
                for name, value in state.items() if isinstance(state, dict) else ():
                    if isinstance(value, Tensor) and not is_opaque(value) and storage_key(value) == key:
                        return "the optimizer's state", f"{name} of {self.name_of(parameter) or 'a parameter'}"
        return self.name_of(tensor) or "a tensor", "it"

    # --- operators

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if types and any(cls is not Tensor and cls is not Parameter for cls in types):
            if FakeTensor in types:
                return func(*args, **kwargs)
            return NotImplemented  # a tensor subclass dispatches the operators on its parts, which are observed
        if self._paused:
            return func(*args, **kwargs)
        op = properties_of(func)
        if op.composite:  # in inference mode no key above has decomposed it
            super().__enter__()  # so that the operators inside it are observed
            try:
                return func.decompose(*args, **kwargs)
            finally:
                super().__exit__(None, None, None)
        number = next_sequence_number() - 1
        moved = number != self._thread.number
        if op.is_view and not moved:
            return func(*args, **kwargs)
        call = self._describe(op)
        if moved:
            self._thread.number = number
            self._forward[number] = call
        if op.is_view:
            return func(*args, **kwargs)
        self.count += 1
        tensors = tensors_in((args, kwargs) if kwargs else args)
        if any(map(is_opaque, tensors)):
            return func(*args, **kwargs)
        call.args, call.kwargs, call.tensors = args, kwargs, tensors
        if call.phase == "scaler" and (self.scale is None or call.caller.scaling):
            self._note_scale()
        if self._was_skipped(call):
            self._step_ended(None)
        try:
            return self._run(call)
        finally:
            call.release()

    def _run(self, call: Call) -> Any:
        """Run an operator once, and report it."""
        op, args, kwargs = call.op, call.args, call.kwargs
        # After the last step a loop may print a loss or an average: operators outside of modules begin no new step.
        self.computed |= call.phase == "backward" or (
            call.phase == "forward" and (call.module is not None or self.step == 0)
        )
        if op.writes:
            call.written = op.written(args, kwargs)
            if not (op.overwrites or op.communicates):
                call.before = {id(tensor): tensor.clone() for tensor in call.written}
        call.result = result = op.func(*args, **kwargs)
        if self.operator_ran:
            self.tape.record(call)
        if call.starts_backward:
            self._note_loss(float(call.tensors[0].detach()) / (self.scale or 1.0), call.caller)
        call.outputs = readable(outputs_of(result, call.written))
        if not op.is_empty:
            call.ranges = [extremes(output) for output in call.outputs]
        for output in call.outputs:
            if output.dtype in SIXTEEN_BIT:
                self.low.setdefault((call.site, call.module and call.module.name), call)
        reports = self._reports.get((op, call.phase))
        if reports is None:
            reports = self._reports[op, call.phase] = [each for each in self.operator_ran if _observes(each, call)]
        for report in reports:
            report(call)
        return result

    def _describe(self, op: OperatorProperties) -> Call:
        module, node = self.modules.current(), current_node()
        if node is None:
            caller = find_caller(3)
            phase: Phase = "scaler" if caller.scaler else "forward"
            if self._in_optimizer and not torch.is_grad_enabled():
                phase = "optimizer"  # with gradients enabled it runs a closure, as LBFGS does
            return Call(self.count, op, phase, module, caller)
        # A recompute runs with gradients enabled; so does backward with create_graph.
        caller = find_caller(3, recompute=torch.is_grad_enabled())
        phase = "recompute" if caller.recompute else "backward"
        call = Call(self.count, op, phase, module, caller, node_sequence_number(node))
        if phase == "recompute" and (forward := self.forward_with(call.backward_number)) is not None:
            call.module = module or forward.module  # a checkpointed function calls no module
            if caller.code is None:
                call.caller = forward.caller  # the stack leads to backward(), not to the caller of the checkpoint
        return call

    def _note_loss(self, loss: float, caller: Caller) -> None:
        self.backwards += 1
        self.last_loss = loss if math.isfinite(loss) else self.last_loss
        self.losses.setdefault(caller.line(), {})[self.step] = loss

    # --- steps

    def _starts(self, optimizer: Any, closure: bool) -> None:
        self.on_state(optimizer)
        self.on_step_starts(optimizer, closure)
        self._in_optimizer = True

    def _ended(self, optimizer: Any) -> None:
        self._in_optimizer = False
        self.unobserved -= self.step * self._has_paused
        self._step_ended(optimizer)
        self.unobserved += self.step * self._has_paused

    def _note_scale(self) -> None:
        scaler = self.loop.scaler
        if scaler is not None and scaler.is_enabled():
            if self.scale is None:
                self.on_state(scaler)
            self.scale = scaler.get_scale()

    def _was_skipped(self, call: Call) -> bool:
        """Return whether a scaler skipped the step before this call, which no hook of an optimizer shows."""
        if call.phase == "scaler":
            self._unscaled |= self._backward_seen and not call.caller.scaling
        elif call.phase == "backward":
            self._backward_seen = True
        return self._unscaled and call.phase == "forward" and call.module is not None

    def _step_ended(self, optimizer: Any) -> None:
        """End a step of an optimizer, or one that a scaler skipped, and begin the next.

        Forward operators of the step before last are dropped.
        """
        with self.silently():
            self.on_step_ended(optimizer)
        if optimizer is None and self._skipped_steps == self.loop.n_skipped_steps:
            self.loop.iterations.step_ended(None)  # a loop of ampkit's own skipped it
        self._skipped_steps = self.loop.n_skipped_steps
        self.step = self.loop.iterations.number
        self.scale, self.backwards, self.computed = None, 0, False
        self._backward_seen = self._unscaled = False
        self.modules.new_step()
        self._forward_before, self._forward = self._forward, {}
        self.tape.clear()
        self.on_step_counted()


def _observes(report: Any, call: Call) -> bool:
    """Return whether a check observes such calls; a function that is not of a check observes all of them."""
    observes = getattr(getattr(report, "__self__", None), "observes", None)
    return observes is None or observes(call.op, call.phase)
