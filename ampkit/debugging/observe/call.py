"""One call of an operator, for the checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from ampkit.containers import map_tensors
from ampkit.debugging.observe.call_sites import Caller, ModuleCall
from ampkit.debugging.observe.operator_properties import OperatorProperties, floats_in

Phase = Literal["forward", "backward", "recompute", "optimizer", "scaler"]


@dataclass(slots=True)
class Call:
    """One call of an operator. Its arguments and results exist while it runs and the checks read it."""

    index: int  # in the order of execution, over all steps
    op: OperatorProperties
    phase: Phase
    module: ModuleCall | None  # the innermost module that runs
    caller: Caller
    backward_number: int = -1  # in backward: the node's sequence number, equal to its forward operator's
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    tensors: Sequence[Tensor] = ()  # all among its arguments
    written: Sequence[Tensor] = ()  # of these, the ones that it writes
    before: dict[int, Tensor] = field(default_factory=dict)  # copies of the tensors that it writes, by identity
    result: Any = None
    outputs: Sequence[Tensor] = ()  # the results that can be read
    ranges: Sequence[tuple[float, float]] = ()  # smallest and largest value of each output; () if memory is not written

    @property
    def scalars(self) -> list[float]:
        """The Python floats among its arguments."""
        return floats_in(self.args, self.kwargs)

    @property
    def site(self) -> tuple[int, int]:
        """The code object and the instruction that call it."""
        return id(self.caller.code), self.caller.instruction

    @property
    def starts_backward(self) -> bool:
        """Whether it makes the gradient of a loss, its argument, that backward starts with."""
        return self.op.name == "aten::ones_like" and self.tensors[0].numel() == 1 and self.tensors[0].requires_grad

    def arguments(self) -> Any:
        """Return its arguments as they were before it ran."""
        if not self.before:
            return self.args, self.kwargs
        return map_tensors((self.args, self.kwargs), lambda each: self.before.get(id(each), each))

    def release(self) -> None:
        """Drop all tensors."""
        self.args, self.kwargs, self.before = (), {}, {}
        self.tensors = self.written = self.outputs = ()
        self.result = None
