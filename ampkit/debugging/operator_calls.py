"""Observe every operator of a step in forward, backward and optimizer, with its caller: the base class of the tools.

It is a dispatch mode below autograd, so it sees operators after a region's casts. The region's own mode is not
affected. Compiled functions run eagerly meanwhile, since their operators could not be seen otherwise.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ampkit.containers import map_tensors
from ampkit.debugging.call_sites import Caller, ModuleCall, ModuleCalls, find_caller
from ampkit.debugging.loop import check_loop
from ampkit.debugging.operator_facts import OperatorFacts, facts_of, tensors_in
from ampkit.debugging.report import Operation, Report
from ampkit.debugging.torch_private import (
    FakeTensor,
    ObserverMode,
    OpOverload,
    current_node,
    is_opaque,
    next_sequence_number,
    node_sequence_number,
    storage_key,
    without_dispatch,
)
from ampkit.dispatch.weight_cache import invalidate_casts

R = TypeVar("R", bound=Report)

Phase = Literal["forward", "backward", "recompute", "optimizer", "scaler"]


@dataclass(slots=True)
class OperatorCall:
    """One call of an operator. Holds names and numbers, and no tensor beyond the call."""

    index: int  # in the order of execution, over all steps
    facts: OperatorFacts
    phase: Phase
    module: ModuleCall | None  # the innermost module that runs
    caller: Caller
    backward_number: int | None = None  # in backward: the node's sequence number, equal to its forward operator's
    numbers: tuple[float, ...] = ()  # Python floats among its arguments
    tensors: Sequence[Tensor] = ()  # tensors among its arguments, while it runs

    @property
    def starts_backward(self) -> bool:
        """Whether it makes the gradient of a loss, its argument, that backward starts with."""
        return self.facts.name == "aten::ones_like" and self.tensors[0].numel() == 1 and self.tensors[0].requires_grad


class Ran(NamedTuple):
    """An operator call that has just run, with its tensors."""

    call: OperatorCall
    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    before: dict[int, Tensor]  # copies of what it wrote in place, by identity of the tensor
    outputs: list[Tensor]  # the results that can be read
    ranges: Sequence[tuple[float, float]] = ()  # their smallest and largest values, unless these mean nothing yet

    def arguments(self) -> Any:
        """Its arguments as they were before it ran."""
        if not self.before:
            return self.args, self.kwargs
        return map_tensors((self.args, self.kwargs), lambda each: self.before.get(id(each), each))


class _Thread(threading.local):
    """The last autograd sequence number that was seen in a thread."""

    def __init__(self) -> None:
        self.number = next_sequence_number() - 1


class OperatorObserver(ObserverMode, Generic[R]):
    """Context in which `_observe` runs each operator of the thread and of its backward threads, except for views.

    It checks the loop too: the report has the loop's mistakes, and whether compiled functions ran. Subclasses override
    `_observe`, which must run the operator exactly once and return its result, and `_step_starts` and `_step_ended`.
    Operators inside of these methods are not observed.
    """

    def __init__(self, model: Module | None, report: R) -> None:
        super().__init__()
        if model is not None and not isinstance(model, Module):
            raise TypeError(f"model is {type(model).__name__}; expected a torch.nn.Module, or None for whatever runs")
        self.report = report
        self.modules = ModuleCalls(model)
        self.first_step = 0  # number of the first step that is observed; set it before entering
        self.begun = False  # operators are observed
        self.paused = False  # they are not, for a while: they belong to a tool
        self.scale: float | None = None  # the loss scale, where a scaler takes part
        self.on_state: Callable[[Any], object] = lambda owner: None  # called before an optimizer or a scaler changes
        self.step = 0  # steps that have ended
        self.count = 0  # operators seen
        self._optimizer: Any = None
        self._backward_seen = self._unscaled = False
        self._forward: dict[int, OperatorCall] = {}  # by sequence number, of this step and of the last one
        self._forward_before: dict[int, OperatorCall] = {}
        self._thread = _Thread()
        self._check = check_loop()
        self._open = ExitStack()

    def __enter__(self) -> R:  # type: ignore[override]
        with ExitStack() as stack:
            stack.enter_context(register_optimizer_step_pre_hook(self._optimizer_starts))
            stack.enter_context(register_optimizer_step_post_hook(self._optimizer_ends))
            self.report.loop = stack.enter_context(self._check).loop
            if self.first_step == 0:
                self._begin(stack)
            self._open = stack.pop_all()
        return self.report

    def __exit__(self, *error: Any) -> None:
        self._open.close()

    def _begin(self, stack: ExitStack) -> None:
        """Observe operators from now on; before, only optimizer steps are counted."""
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        self._note_compiled(stack)
        stack.enter_context(self.modules.followed())
        self._thread = _Thread()
        super().__enter__()
        stack.callback(super().__exit__, None, None, None)
        invalidate_casts()  # casts of an outer region are made again, so that they are observed
        self.begun = True

    def _note_compiled(self, stack: ExitStack) -> None:
        """Note calls of compiled functions: each of them gets its callback from the stance."""
        eval_frame: Any = sys.modules["torch._dynamo.eval_frame"]
        inner = getattr(eval_frame, "_callback_from_stance", None)
        if inner is None:
            return

        def callback_from_stance(callback: Any) -> Any:
            self.report.compiled |= callable(callback)
            return inner(callback)

        eval_frame._callback_from_stance = callback_from_stance
        stack.callback(setattr, eval_frame, "_callback_from_stance", inner)

    def _observe(self, call: OperatorCall, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator and return its result."""
        return func(*args, **kwargs)

    def _passed_over(self, facts: OperatorFacts, tensors: list[Tensor]) -> None:
        """Called before an operator with tensors whose values cannot be read, which is not observed."""

    def _step_starts(self, optimizer: Any) -> None:
        """Called before an optimizer steps."""

    def _step_ended(self, *, skipped: bool = False) -> None:
        """Called after an optimizer has stepped, or a scaler has skipped the step."""

    def _operation_fields(self, call: OperatorCall) -> dict[str, Any]:
        """A call as the fields of `report.Operation`, without those of its result.

        An operator of backward has the module and line of its forward operator. Where the user's code runs in backward,
        in a hook or in a custom function's `backward`, it has the line there.
        """
        module, (file, line), backward_of = call.module, call.caller.line(), ""
        forward = self._forward_of(call) if call.phase == "backward" else None
        if forward is not None:
            module, backward_of = forward.module, forward.facts.name
            if call.caller.outside or not line:
                file, line = forward.caller.line()
        return {
            "index": call.index,
            "op": call.facts.name,
            "phase": call.phase,
            "file": file,
            "line": line,
            "module": "" if module is None else module.name,
            "call": 0 if module is None else module.number,
            "backward_of": backward_of,
        }

    def _operation(self, call: OperatorCall, **result: Any) -> Operation:
        """A call for a report; `result` has the fields of its result."""
        return Operation(**self._operation_fields(call), **result)

    def _name_of(self, tensor: Tensor) -> str:
        """The name of a parameter, a buffer or a gradient; "" for other tensors."""
        key = storage_key(tensor)
        for root in self.modules.roots():
            for name, named in (*root.named_parameters(), *root.named_buffers()):
                if not is_opaque(named) and storage_key(named) == key:
                    return name
                if named.grad is not None and not is_opaque(named.grad) and storage_key(named.grad) == key:
                    return f"{name}.grad"
        return ""

    def _forward_of(self, call: OperatorCall) -> OperatorCall | None:
        """The forward operator of a backward operator; for a custom function, the first operator of its forward."""
        number: Any = call.backward_number
        return self._forward.get(number) or self._forward_before.get(number)

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if types and any(cls is not Tensor and cls is not Parameter for cls in types):
            if FakeTensor in types:
                return func(*args, **kwargs)
            return NotImplemented  # a tensor subclass dispatches the operators on its parts, which are observed
        if self.paused:
            return func(*args, **kwargs)
        facts = facts_of(func)
        if facts.composite:  # in inference mode no key above has decomposed it
            super().__enter__()  # so that the operators inside it are observed
            try:
                return func.decompose(*args, **kwargs)
            finally:
                super().__exit__(None, None, None)
        number = next_sequence_number() - 1
        moved = number != self._thread.number
        if facts.is_view and not moved:
            return func(*args, **kwargs)
        call = self._describe(facts, 3)
        if moved:
            self._thread.number = number
            self._forward[number] = call
        if facts.is_view:
            return func(*args, **kwargs)
        self.count += 1
        tensors = tensors_in((args, kwargs) if kwargs else args)
        if any(map(is_opaque, tensors)):
            self._passed_over(facts, tensors)
            return func(*args, **kwargs)
        call.numbers = tuple([argument for argument in (*args, *kwargs.values()) if type(argument) is float])
        call.tensors = tensors
        if call.phase == "scaler" and (self.scale is None or call.caller.scaling):
            self._note_scale()
        if self._was_skipped(call):
            self._step_ended(skipped=True)
            self._next_step()
        try:
            return self._observe(call, func, args, kwargs)
        finally:
            call.tensors = ()

    def _describe(self, facts: OperatorFacts, depth: int) -> OperatorCall:
        module, node = self.modules.current(), current_node()
        if node is None:
            caller = find_caller(depth)
            phase: Phase = "scaler" if caller.scaler else "forward"
            if self._optimizer is not None and not torch.is_grad_enabled():
                phase = "optimizer"  # with gradients enabled it runs a closure, as LBFGS does
            return OperatorCall(self.count, facts, phase, module, caller)
        # A recompute runs with gradients enabled; so does backward with create_graph.
        caller = find_caller(depth, recompute=torch.is_grad_enabled())
        phase = "recompute" if caller.recompute else "backward"
        call = OperatorCall(self.count, facts, phase, module, caller, node_sequence_number(node))
        forward = self._forward_of(call) if phase == "recompute" else None
        if forward is not None:
            call.module = module or forward.module  # a checkpointed function calls no module
            if caller.code is None:
                call.caller = forward.caller  # the stack leads to backward(), not to the caller of the checkpoint
        return call

    def _optimizer_starts(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.on_state(optimizer)
        if self.begun:
            with without_dispatch():  # operators of the tool are not operators of the step
                self._step_starts(optimizer)
        self._optimizer = optimizer

    def _optimizer_ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._optimizer = None
        if self.begun:
            with without_dispatch():
                self._step_ended()
        self._next_step()
        if not self.begun and self.step == self.first_step:
            self._begin(self._open)

    def _note_scale(self) -> None:
        scaler = self._check.scaler
        if scaler is not None and scaler.is_enabled():
            if self.scale is None:
                self.on_state(scaler)
            self.scale = scaler.get_scale()

    def _was_skipped(self, call: OperatorCall) -> bool:
        """Whether a scaler skipped the step before this call, which no hook of an optimizer tells."""
        if call.phase == "scaler":
            self._unscaled |= self._backward_seen and not call.caller.scaling
        elif call.phase == "backward":
            self._backward_seen = True
        return self._unscaled and call.phase == "forward" and call.module is not None

    def _next_step(self) -> None:
        """Begin the next step; forward operators of the step before last are dropped."""
        self.step += 1
        self._backward_seen = self._unscaled = False
        self.modules.new_step()
        self._forward_before, self._forward = self._forward, {}
