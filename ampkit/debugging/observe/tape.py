"""A tape of the operator calls of a step, from which any of them can be computed again.

It keeps how each argument lies in its storage, and not the tensors: most operands of a call are still there when a
fault is found (parameters, the batch, what backward saved), and the others are computed again from those. Only small
results, results of random numbers and what is written over are kept, up to a number of bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ampkit.debugging.observe.call import Call
from ampkit.debugging.observe.operator_properties import item_of, tensors_in
from ampkit.debugging.torch_private import (
    StorageWeakRef,
    is_opaque,
    negative_view,
    revived,
    storage_key,
)

_SMALL = 4096  # bytes of a storage that is always kept
_BUDGET = 1 << 26  # bytes that are kept in all
_MAX_CALLS = 8192  # the most calls on the tape; then the earlier half is dropped


class Values:
    """What a storage contains between two writes, as real numbers."""

    __slots__ = ("copy", "count", "device", "dtype", "kept", "maker", "overwritten", "weak")

    def __init__(self, tensor: Tensor, storage: torch.UntypedStorage, maker: Recorded | None) -> None:
        self.weak = StorageWeakRef(storage)
        self.maker = maker
        self.dtype = dtype = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
        self.count = storage.nbytes() // dtype.itemsize
        self.device = tensor.device
        self.kept: torch.UntypedStorage | None = None
        self.copy: Tensor | None = None  # from before it was written over
        self.overwritten = False

    def flat(self) -> Tensor | None:
        """The elements in one dimension, for reading only; None if they are gone."""
        if self.overwritten:
            return self.copy
        storage = revived(self.weak) if self.kept is None else self.kept
        if storage is None:
            return None
        return torch.empty(0, dtype=self.dtype, device=self.device).set_(storage, 0, (self.count,), (1,))


class View(NamedTuple):
    """How a tensor lies in a storage."""

    values: Values
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conj: bool = False
    is_neg: bool = False

    def of(self, flat: Tensor) -> Tensor:
        """The tensor, given all elements of the storage, which may have another precision."""
        if self.dtype.is_complex:
            flat = torch.view_as_complex(flat.view(-1, 2))
        tensor = flat.as_strided(self.size, self.stride, self.offset)
        tensor = tensor.conj() if self.is_conj else tensor
        return negative_view(tensor) if self.is_neg else tensor

    @property
    def is_float(self) -> bool:
        """Whether its numbers are rounded."""
        return self.dtype.is_floating_point or self.dtype.is_complex


class Recorded:
    """One call on the tape: its arguments with a `View` in place of each tensor, and what it wrote and returned."""

    __slots__ = ("args", "call", "kwargs", "results", "writes")

    def __init__(self, call: Call, args: Any, kwargs: Any) -> None:
        self.call, self.args, self.kwargs = call, args, kwargs
        self.writes: list[tuple[View, View]] = []  # of each tensor that it writes: before and after
        self.results: list[View | None] = []  # None for an argument, or what cannot be read

    @property
    def outputs(self) -> list[View]:
        """What it wrote and returned."""
        return [*(after for _, after in self.writes), *(view for view in self.results if view is not None)]

    def operands(self) -> list[View]:
        """The tensors among its arguments."""
        return list(_views((self.args, self.kwargs)))

    def item(self, view: View) -> Recorded:
        """The call for one of the tensors of an operator on lists; the call itself for other operators."""
        lists = [value for value in self.args if isinstance(value, list)]
        if not lists or not self.call.op.on_lists:
            return self
        count = len(lists[0])
        outputs = self.outputs
        index = next(i for i, output in enumerate(outputs) if output.values is view.values) % count
        item = Recorded(self.call, *item_of((self.args, self.kwargs), index, count))
        item.writes = self.writes[index::count]
        item.results = self.results[index::count]
        return item


class Tape:
    """The calls of a step.

    Args:
        budget: the most bytes of tensors that it keeps.
    """

    def __init__(self, budget: int = _BUDGET) -> None:
        self._budget = budget
        self._kept: deque[tuple[Values, int]] = deque()
        self._bytes = 0
        self._calls: dict[int, Recorded] = {}  # by index
        self._values: dict[int, Values] = {}  # by storage, the latest; a weak reference keeps a key from being reused

    def get(self, index: int) -> Recorded | None:
        """The call with an index, if it is on the tape."""
        return self._calls.get(index)

    def clear(self) -> None:
        """Drop all calls: a step has ended."""
        for recorded in self._calls.values():
            _cut(recorded)
        self._calls.clear()
        self._values.clear()
        self._kept.clear()
        self._bytes = 0

    def ran(self, call: Call) -> None:
        """Note a call that has run."""
        args, kwargs, result, before = call.args, call.kwargs, call.result, call.before
        op = call.op
        recorded = Recorded(call, tuple([self._noted(value) for value in args]), kwargs)
        if kwargs:
            recorded.kwargs = {key: self._noted(value) for key, value in kwargs.items()}
        limit = self._budget if op.random or op.communicates or op.opaque_state else _SMALL
        written: list[Tensor] = []
        if op.mutable or op.undeclared_writes:
            written = [*op.written(args, kwargs), *op.buffers(args, kwargs)]
            for tensor in {storage_key(tensor): tensor for tensor in written}.values():
                old = self._view(tensor)
                self._keep_copy(old, before.get(id(tensor)))
                recorded.writes.append((old, self._new(tensor, recorded, limit)))
        arguments = {storage_key(tensor) for tensor in written}
        results = (result,) if isinstance(result, Tensor) else tensors_in(result)
        for tensor in results:
            is_new = not (is_opaque(tensor) or (arguments and storage_key(tensor) in arguments))
            recorded.results.append(self._new(tensor, recorded, limit) if is_new else None)
        if op.uninitialized:
            for view in recorded.outputs:
                view.values.maker = None  # what writes there may not be seen
        self._calls[call.index] = recorded
        if len(self._calls) > _MAX_CALLS:
            for index in list(self._calls)[: _MAX_CALLS // 2]:
                _cut(self._calls.pop(index))

    def _noted(self, value: Any) -> Any:
        """An argument with a view in place of each tensor."""
        cls = type(value)
        if cls is Tensor or cls is Parameter:
            return self._view(value)
        if cls is list or cls is tuple:
            return [self._noted(item) for item in value]
        return value

    def _view(self, tensor: Tensor) -> View:
        storage = tensor.untyped_storage()
        values = self._values.get(storage._cdata)
        if values is None:
            values = self._add(tensor, storage, None, _SMALL)
        return _view(tensor, values)

    def _new(self, tensor: Tensor, recorded: Recorded, limit: int) -> View:
        """The view of a tensor that a call has written."""
        return _view(tensor, self._add(tensor, tensor.untyped_storage(), recorded, limit))

    def _add(self, tensor: Tensor, storage: torch.UntypedStorage, maker: Recorded | None, limit: int) -> Values:
        """The new values of a storage, which is kept if it has at most `limit` bytes."""
        values = self._values[storage._cdata] = Values(tensor, storage, maker)
        size = values.count * values.dtype.itemsize
        if size <= limit:
            values.kept = storage
            self._count(values, size)
        return values

    def _keep_copy(self, view: View, copy: Tensor | None) -> None:
        """Keep the values of a storage that was written over, if its maker cannot compute them again."""
        values = view.values
        values.overwritten, values.kept = True, None
        if copy is None or copy.is_complex() or view.offset or view.stride != copy.stride():
            return
        if copy.numel() == values.count == copy.untyped_storage().nbytes() // copy.itemsize:
            values.copy = copy.detach().as_strided((values.count,), (1,))
            self._count(values, copy.nbytes)

    def _count(self, values: Values, size: int) -> None:
        """Count bytes that are kept, and drop the earliest ones beyond the budget."""
        self._kept.append((values, size))
        self._bytes += size
        while self._bytes > self._budget:
            dropped, size = self._kept.popleft()
            dropped.kept = dropped.copy = None
            self._bytes -= size


def _view(tensor: Tensor, values: Values) -> View:
    conj, neg = (tensor.is_conj(), tensor.is_neg()) if tensor.is_complex() else (False, tensor.is_neg())
    return View(values, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()), conj, neg)


def _views(value: Any) -> Iterator[View]:
    if isinstance(value, View):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _views(item)
    elif isinstance(value, dict):
        yield from _views(list(value.values()))


def _cut(recorded: Recorded) -> None:
    """Drop the arguments of a call, which lead to earlier ones."""
    for view in recorded.outputs:
        view.values.maker = None
    recorded.args, recorded.kwargs, recorded.writes, recorded.results = (), {}, [], []
