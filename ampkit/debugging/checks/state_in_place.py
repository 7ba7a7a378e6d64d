"""Float32 state that is rounded in place: a tensor that is overwritten with its own values after a cast."""

from __future__ import annotations

from torch import Tensor

from ampkit.debugging.checks.check import Add, Check
from ampkit.debugging.finding import Cause, Finding, Fix
from ampkit.debugging.observe.call import Call
from ampkit.debugging.observe.observer import Observer
from ampkit.debugging.observe.storage_map import StorageMap
from ampkit.debugging.torch_private import is_opaque, storage_key
from ampkit.dtypes import SIXTEEN_BIT, dtype_name


class StateInPlace(Check):
    """Follows the casts of a tensor to 16 bits until one of them is copied back to it."""

    name = "state in place"

    def __init__(self, run: Observer, add: Add) -> None:
        super().__init__(run, add)
        self._rounded: StorageMap[tuple[int, str]] = StorageMap()  # by cast: the storage of its source, the dtype

    def operator_ran(self, call: Call) -> None:
        if call.phase != "forward" or not call.outputs:
            return
        if call.op.base == "copy":
            self._check(call, call.args[0], call.args[1])
        elif call.op.base == "_to_copy":
            self._note_cast(call.args[0], call.outputs[0])

    def _note_cast(self, source: Tensor, output: Tensor) -> None:
        """Note the tensor from which a cast has its values."""
        if is_opaque(source) or (source.requires_grad and not source.is_leaf):
            return
        known = self._rounded.get(source)
        if known is not None:
            self._rounded.set(output, known)
        elif output.dtype in SIXTEEN_BIT and source.is_floating_point():
            self._rounded.set(output, (storage_key(source), dtype_name(output.dtype)))

    def _check(self, call: Call, target: Tensor, source: object) -> None:
        if target.dtype in SIXTEEN_BIT or not isinstance(source, Tensor) or is_opaque(source):
            return
        known = self._rounded.get(source)
        if known is None or is_opaque(target) or known[0] != storage_key(target):
            return
        owner, name = self.run.state_name(target)
        dtype = dtype_name(target.dtype)
        self.add(
            Finding(
                grade="error",
                check=self.name,
                cause=Cause("rounded", f"{name} is {dtype}, and its own values are written back to it after a cast"),
                what=f"{owner} is rounded to {known[1]} in place",
                place=self.run.place(call),
                fix=Fix(f"remove the cast: keep the values in {dtype}"),
                step=self.run.step,
            )
        )
