"""Operators that use a cast of a parameter from before the parameter's last change."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from torch import Tensor

from ampkit.debugging.checks.check import Add, Check
from ampkit.debugging.finding import Cause, Place
from ampkit.debugging.observe.call import Call, Phase
from ampkit.debugging.observe.call_sites import Caller
from ampkit.debugging.observe.observer import Observer
from ampkit.debugging.observe.operator_properties import OperatorProperties
from ampkit.debugging.observe.storage_map import StorageMap
from ampkit.debugging.torch_private import is_opaque
from ampkit.dtypes import SIXTEEN_BIT


@dataclass(slots=True)
class _Weight:
    """A parameter that was cast."""

    tensor: weakref.ref[Tensor]
    written: int = -1  # index of the last call that wrote it after it was cast


@dataclass(slots=True)
class _Cast:
    """A cast of a parameter."""

    weight: _Weight
    index: int
    caller: Caller
    region: tuple[str, int] | None  # where the outermost open region was entered, which keeps its casts until it exits


class StaleCasts(Check):
    """Compares the order of casts, writes and uses of each parameter."""

    name = "stale casts"

    def __init__(self, run: Observer, add: Add) -> None:
        super().__init__(run, add)
        self._weights: StorageMap[_Weight] = StorageMap()
        self._casts: StorageMap[_Cast] = StorageMap()
        self._found: set[int] = set()

    def observes(self, op: OperatorProperties, phase: Phase) -> bool:
        return phase == "forward" or op.mutable or op.base == "_to_copy"

    def operator_ran(self, call: Call) -> None:
        outputs = call.outputs
        if call.op.mutable:
            for output in outputs:
                weight = self._weights.get(output)
                if weight is not None:
                    weight.written = call.index
                self._casts.discard(output)
        if call.op.name == "aten::_to_copy":
            source, output = call.tensors[0], outputs[0] if outputs else None
            if output is not None and output.dtype in SIXTEEN_BIT and source.is_leaf and source.requires_grad:
                weight = self._weights.get(source)
                if weight is None:
                    weight = _Weight(weakref.ref(source))
                    self._weights.set(source, weight)
                regions = self.run.loop.regions
                self._casts.set(output, _Cast(weight, call.index, call.caller, regions[0] if regions else None))
        elif call.phase == "forward":
            for tensor in call.tensors:
                if tensor.dtype in SIXTEEN_BIT and not is_opaque(tensor):
                    cast = self._casts.get(tensor)
                    if cast is not None and cast.weight.written > cast.index and id(cast) not in self._found:
                        self._found.add(id(cast))
                        self._add(call, cast)
                        return

    def _add(self, call: Call, cast: _Cast) -> None:
        place = self.run.place(call)
        weight = cast.weight.tensor()
        name = (weight is not None and self.run.name_of(weight)) or "a weight"
        if cast.region is None:
            cause = Cause("stale cast", "{} was cast at {}:{}, and was changed since".format(name, *cast.caller.line()))
            what, fix = "a 16-bit copy of a weight is used that is older than the weight", "cast after each update, "
            self.found(place, "note", cause, what, fix + "unless the old values are intended")
            return
        why = "the region keeps its casts of the weights until it exits, and the optimizer steps inside of it: "
        cause = Cause("stale cast", f"{why}{place.op} at {place.file}:{place.line} reads an old {name}")
        fix = "open the region in each step, around the forward only, or autocast(..., cache_enabled=False)"
        self.found(Place(*cast.region), "error", cause, "the forward uses weights from before the last update", fix)
