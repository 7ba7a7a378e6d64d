"""Float32 state that is rounded: it is overwritten with, or replaced by, its own values after a cast."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from ampkit.debugging.checks.check import Add, Check
from ampkit.debugging.finding import Cause
from ampkit.debugging.observe.call import Call, Phase
from ampkit.debugging.observe.observer import Observer
from ampkit.debugging.observe.operator_properties import OperatorProperties
from ampkit.debugging.observe.storage_map import StorageMap
from ampkit.debugging.torch_private import is_opaque, storage_key
from ampkit.dtypes import SIXTEEN_BIT, dtype_name
from ampkit.gradients.collect import parameters as parameters_of


class _Rounded(NamedTuple):
    """A cast to 16 bits, or a cast of it to a wider dtype."""

    source: int  # the storage of the tensor that was rounded
    dtype: str  # to which
    call: Call  # the last cast


class StateInPlace(Check):
    """Follows the casts of a tensor to 16 bits until one is copied back to it, or replaces it."""

    name = "state in place"

    def __init__(self, run: Observer, add: Add) -> None:
        super().__init__(run, add)
        self._rounded: StorageMap[_Rounded] = StorageMap()
        self._storages: dict[int, int] = {}  # of parameters in the last step, by identity

    def observes(self, op: OperatorProperties, phase: Phase) -> bool:
        return phase == "forward" and op.base in ("copy", "_to_copy")

    def operator_ran(self, call: Call) -> None:
        if not call.outputs:
            return
        if call.op.base == "copy":
            target, source = call.args[:2]
            known = self._rounded.get(source) if isinstance(source, Tensor) and not is_opaque(source) else None
            if known is not None and target.dtype not in SIXTEEN_BIT and known.source == storage_key(target):
                self._add(call, target, known.dtype, "are written back to it after a cast")
        else:
            self._note_cast(call, call.args[0], call.outputs[0])

    def _note_cast(self, call: Call, source: Tensor, output: Tensor) -> None:
        """Note the tensor from which a cast has its values."""
        if is_opaque(source) or (source.requires_grad and not source.is_leaf):
            return
        known = self._rounded.get(source)
        if known is not None:
            self._rounded.set(output, known._replace(call=call))
        elif output.dtype in SIXTEEN_BIT and source.is_floating_point():
            self._rounded.set(output, _Rounded(storage_key(source), dtype_name(output.dtype), call))

    def step_starts(self, optimizer: Optimizer, closure: bool) -> None:
        """Check for parameters that were replaced since the last step by their own values after a cast."""
        for parameter in (p for p in parameters_of(optimizer) if not is_opaque(p)):
            known, before = self._rounded.get(parameter), self._storages.get(id(parameter))
            if known is not None and parameter.dtype not in SIXTEEN_BIT and known.source == before:
                self._add(known.call, parameter, known.dtype, "replace it after a cast")
            self._storages[id(parameter)] = storage_key(parameter)

    def _add(self, call: Call, target: Tensor, rounded_to: str, how: str) -> None:
        owner, name = self.run.state_name(target)
        dtype = dtype_name(target.dtype)
        cause = Cause("rounded", f"{name} is {dtype}, and its own values {how}")
        fix = f"remove the cast: keep the values in {dtype}"
        self.found(call, "error", cause, f"{owner} is rounded to {rounded_to} in place", fix)
