"""Which values came with the data: the batch of a loader with its row and column, and outliers that overflow."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from ampkit.debugging.finding import Cause
from ampkit.debugging.observe.call import Call
from ampkit.debugging.observe.call_sites import find_caller
from ampkit.debugging.observe.observer import Observer
from ampkit.debugging.observe.operator_properties import tensors_in
from ampkit.debugging.observe.storage_map import StorageMap
from ampkit.debugging.observe.tensor_values import nonfinite_elements
from ampkit.debugging.torch_private import LoaderIterator, is_opaque

LARGE_NUMBER = 1e4
_OUTLIER = 1e6  # times the median: values of data that no precision suits


class Data:
    """Notes where each batch of a DataLoader is read. `nonfinite` calls it for values that may have come with it."""

    def __init__(self, run: Observer) -> None:
        self._run = run
        self._loaded: StorageMap[tuple[str, int, int]] = StorageMap()  # line of the loop, number of the batch
        self._batches = 0

    def opened(self, stack: ExitStack) -> None:
        """Observe loaders from now on."""
        cls: Any = LoaderIterator
        inner = cls.__next__

        def observed(iterator: Any) -> Any:
            batch = inner(iterator)
            line = find_caller(2).line()
            self._batches += 1
            for tensor in tensors_in(batch):
                if not is_opaque(tensor):
                    self._loaded.set(tensor, (*line, self._batches - 1))
            return batch

        cls.__next__ = observed
        stack.callback(setattr, cls, "__next__", inner)

    def cause(self, tensor: Tensor, values: str) -> Cause:
        """Return the cause of inf or NaN in a tensor that was there before the step and is not a parameter."""
        loaded = self._loaded.get(tensor)
        where = "with the data" if loaded is None else "in batch {2} of the loader at {0}:{1}".format(*loaded)
        return Cause("arrived", f"it arrived {where}: {values} in {nonfinite_elements(tensor)}")

    def blamed(self, call: Call, kind: str) -> str:
        """Return the reason why the data overflows in a call; "" if it does not."""
        computed = not torch.is_grad_enabled() or any(each.requires_grad for each in call.tensors)
        computed |= any(abs(number) > LARGE_NUMBER for number in call.scalars)  # the code's own number overflows
        if kind == "overflow" and call.phase == "forward" and not computed:
            return "no parameter took part in it: it arrived with the data"
        if kind not in ("overflow", "intermediate", "undefined", "from inf", "rounded"):
            return ""
        given = [each for ref in self._run.modules.inputs if (each := ref()) is not None and not is_opaque(each)]
        text = next((text for each in given if each.is_floating_point() and (text := _outlier(each))), "")
        return text and f"{text}: it arrived with the data"


def _outlier(tensor: Tensor) -> str:
    """Return the rows of an input that have values a million times larger than its median, in words; "" without any."""
    values = tensor.detach().abs().double()
    values = torch.where(torch.isfinite(values), values, 0.0)
    some = values[values > 0]
    if not some.numel():
        return ""
    median, largest = float(some.median()), float(some.max())
    if largest < 1e4 or largest < _OUTLIER * median:
        return ""
    text = f"the input has {largest:.3g}, and {median:.3g} in the median"
    if values.ndim > 1:
        rows = (values.reshape(values.shape[0], -1).amax(1) > _OUTLIER * median).nonzero().flatten().tolist()
        text += f", in row {', '.join(map(str, rows[:3]))} of {values.shape[0]}"
    return text
