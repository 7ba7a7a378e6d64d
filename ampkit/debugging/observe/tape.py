"""A tape of the operator calls of a step, from which each call can be computed again.

The tape stores the position of each argument in its storage instead of the tensor. Most operands of a call still exist
when a problem is found (parameters, the batch, tensors saved for backward); the others are computed again from those.
Only small results, results of random numbers and overwritten values are saved, up to a number of bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ampkit.debugging.observe.call import Call
from ampkit.debugging.observe.operator_properties import floats_in, item_of, tensors_in
from ampkit.debugging.torch_private import StorageWeakRef, is_opaque, negative_view, revived, storage_key

_SMALL = 4096  # bytes of a storage that is always saved
_BUDGET = 1 << 26  # bytes that are saved in all
_MAX_ALIASED = 1 << 24  # bytes of the tensors of calls whose storages are not noted yet
_MAX_CALLS = 8192  # maximum number of calls on the tape; then the earlier half is dropped


class Values:
    """The contents of a storage between two writes, as real numbers."""

    __slots__ = ("copy", "count", "device", "dtype", "producer", "storage", "weak")

    def __init__(self, tensor: Tensor, storage: torch.UntypedStorage, producer: Recorded | None) -> None:
        self.weak: StorageWeakRef | None = StorageWeakRef(storage)  # None once it is overwritten
        self.producer = producer
        self.dtype = dtype = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
        self.count = storage.nbytes() // dtype.itemsize
        self.device = tensor.device
        self.storage: torch.UntypedStorage | None = None  # if it is saved
        self.copy: Tensor | None = None  # from before it was overwritten

    def flat(self) -> Tensor | None:
        """Return the elements in one dimension, for reading only; None if they are freed."""
        if self.weak is None:
            return self.copy
        storage = self.storage or revived(self.weak)
        if storage is None:
            return None
        return torch.empty(0, dtype=self.dtype, device=self.device).set_(storage, 0, (self.count,), (1,))


class View(NamedTuple):
    """The position of a tensor in a storage."""

    values: Values
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool

    def of(self, flat: Tensor) -> Tensor:
        """Return the tensor, given all elements of the storage, which may have another precision."""
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
    """A call on the tape: its arguments with a `View` instead of each tensor, and its writes and results."""

    __slots__ = ("args", "call", "kwargs", "results", "writes")

    def __init__(self, call: Call, args: Any, kwargs: Any) -> None:
        self.call, self.args, self.kwargs = call, args, kwargs
        self.writes: list[tuple[View, View]] = []  # of each tensor that it writes: before and after
        self.results: list[View | None] = []  # None for an argument, and for a tensor that cannot be read

    @property
    def scalars(self) -> list[float]:
        """The Python floats among its arguments."""
        return floats_in(self.args, self.kwargs)

    @property
    def outputs(self) -> list[View]:
        """The tensors that it wrote and returned."""
        return [*(after for _, after in self.writes), *(view for view in self.results if view is not None)]

    def operands(self) -> list[View]:
        """Return the tensors among its arguments."""
        return list(_views((self.args, self.kwargs)))

    def item(self, view: View) -> Recorded:
        """Return the call for one of the tensors of an operator on lists; the call itself for other operators."""
        lists = [value for value in self.args if isinstance(value, list)]
        if not lists or not self.call.op.on_lists:
            return self
        count = len(lists[0])
        index = next(i for i, output in enumerate(self.outputs) if output.values is view.values) % count
        item = Recorded(self.call, *item_of((self.args, self.kwargs), index, count))
        item.writes, item.results = self.writes[index::count], self.results[index::count]
        return item


class _Entry(NamedTuple):
    """A call that has run, with aliases of its tensors."""

    call: Call
    args: Any
    kwargs: dict[str, Any]
    before: list[Tensor | None]  # copies of the tensors that it wrote
    results: list[Tensor]


class Tape:
    """The calls of a step. Their tensors exist until they exceed a number of bytes; then only storages are noted."""

    def __init__(self) -> None:
        self.calls: list[Recorded] = []
        self._entries: list[_Entry] = []  # the later calls, which are not in `calls` yet
        self._entry_bytes = 0
        self._saved: deque[tuple[Values, int]] = deque()
        self._bytes = 0
        self._values: dict[int, Values] = {}  # by storage, the latest; a weak reference prevents the reuse of a key

    def clear(self) -> None:
        """Drop all calls: a step has ended."""
        self._drop(len(self.calls))
        self._entries.clear()
        self._values.clear()
        self._saved.clear()
        self._bytes = self._entry_bytes = 0

    def _drop(self, count: int) -> None:
        """Drop the earliest calls, and the references from later ones to them."""
        for recorded in self.calls[:count]:
            for view in recorded.outputs:
                view.values.producer = None
            recorded.args, recorded.kwargs, recorded.writes, recorded.results = (), {}, [], []
        del self.calls[:count]

    def record(self, call: Call) -> None:
        """Record a call that has run."""
        results = tensors_in(call.result)
        kwargs = {key: _aliased(value) for key, value in call.kwargs.items()} if call.kwargs else {}
        before = [call.before.get(id(tensor)) for tensor in call.written]
        aliases = [tensor.detach() for tensor in results]
        self._entries.append(_Entry(call, [_aliased(value) for value in call.args], kwargs, before, aliases))
        for tensor in (*before, *results):
            if tensor is not None and not is_opaque(tensor):
                self._entry_bytes += tensor.nbytes
        if self._entry_bytes > _MAX_ALIASED or len(self._entries) > _MAX_CALLS // 2:
            self._note(_SMALL)
            if len(self.calls) > _MAX_CALLS:
                self._drop(_MAX_CALLS // 2)

    def last(self) -> Recorded:
        """Return the last call, which leads to the earlier ones."""
        self._note(_BUDGET)
        return self.calls[-1]

    def _note(self, limit: int) -> None:
        """Note the storages of the calls in `_entries`, and save the ones of up to `limit` bytes."""
        for call, args, kwargs, copies, results in self._entries:
            op = call.op
            recorded = Recorded(
                call, tuple(map(self._recorded, args)), {key: self._recorded(kwargs[key]) for key in kwargs}
            )
            most = _BUDGET if op.random or op.communicates or op.opaque_state else limit
            written = {
                storage_key(tensor): (tensor, copy)
                for tensor, copy in zip(op.written(args, kwargs), copies, strict=True)
            }
            for tensor, copy in written.values():
                before = self._view(tensor)
                self._save_copy(before, copy)
                recorded.writes.append((before, self._view(tensor, recorded, most)))
            for tensor in results:
                is_new = not (is_opaque(tensor) or (written and storage_key(tensor) in written))
                recorded.results.append(self._view(tensor, recorded, most) if is_new else None)
            if op.uninitialized:
                for view in recorded.outputs:
                    view.values.producer = None  # the writer may not be observed
            self.calls.append(recorded)
        self._entries.clear()
        self._entry_bytes = 0

    def _recorded(self, value: Any) -> Any:
        """Return an argument with a view instead of each tensor."""
        if type(value) is Tensor:
            return self._view(value)
        return [self._recorded(item) for item in value] if type(value) is list else value

    def _view(self, tensor: Tensor, producer: Recorded | None = None, limit: int = _SMALL) -> View:
        """Return the view of a tensor; with `producer`, of new values, which are saved if they have `limit` bytes."""
        storage = tensor.untyped_storage()
        values = self._values.get(storage._cdata) if producer is None else None
        if values is None:
            values = self._values[storage._cdata] = Values(tensor, storage, producer)
            size = values.count * values.dtype.itemsize
            if size <= limit:
                values.storage = storage
                self._count(values, size)
        offset, conj, neg = int(tensor.storage_offset()), tensor.is_conj(), tensor.is_neg()
        return View(values, tensor.dtype, tensor.size(), tensor.stride(), offset, conj, neg)

    def _save_copy(self, view: View, copy: Tensor | None) -> None:
        """Save the values of a storage that was overwritten, as far as its copy covers the storage."""
        values = view.values
        values.weak = values.storage = None
        if copy is None or copy.is_complex() or view.offset or view.stride != copy.stride():
            return
        if copy.numel() == values.count == copy.untyped_storage().nbytes() // copy.itemsize:
            values.copy = copy.detach().as_strided((values.count,), (1,))
            self._count(values, copy.nbytes)

    def _count(self, values: Values, size: int) -> None:
        """Count saved bytes, and drop the earliest saved values beyond the budget."""
        self._saved.append((values, size))
        self._bytes += size
        while self._bytes > _BUDGET:
            dropped, size = self._saved.popleft()
            dropped.storage = dropped.copy = None
            self._bytes -= size


def _aliased(value: Any) -> Any:
    """Return an argument with an alias of each tensor, whose references do not keep autograd from reusing memory."""
    cls = type(value)
    if cls is Tensor or cls is Parameter:
        return value.detach()
    if cls is list or cls is tuple:
        return [_aliased(item) for item in value]
    return value


def _views(value: Any) -> Iterator[View]:
    if isinstance(value, View):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _views(item)
    elif isinstance(value, dict):
        yield from _views(list(value.values()))
