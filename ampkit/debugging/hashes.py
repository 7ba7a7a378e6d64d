"""Two runs side by side: the first operator whose result differs, to the bit."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from ampkit.debugging.causes import dtype_name
from ampkit.debugging.operator_calls import OperatorCall, OperatorObserver
from ampkit.debugging.operator_facts import tensors_in
from ampkit.debugging.source_lines import variable_of
from ampkit.debugging.storage_map import StorageMap
from ampkit.torch_internals.operator_tracing import OpOverload, is_opaque, storage_key

__all__ = ["HashDifference", "HashLog", "HashedCall", "compare_hashes", "record_hashes"]


KIND, VERSION = "ampkit.debugging.hashes", "1.0"


class HashedCall(NamedTuple):
    """The result of one operator call, or (`op` "") a tensor that was there before."""

    op: str
    phase: str
    module: str
    call: int
    occurrence: int     # of this operator in that call of the module, from 1
    where: str          # "model.py:67", or the tensor's name
    results: str        # dtypes and shapes
    hash: int

    @property
    def key(self) -> tuple[Any, ...]:
        """What it has in common with its counterpart in another run."""
        return self.op, self.phase, self.module, self.call, self.occurrence

    def __str__(self) -> str:
        name = self.op or "a tensor that was there before"
        inside = f", {self.module}" + (f" (call {self.call})" if self.call > 1 else "") if self.module else ""
        return f"{name} in {self.phase}{inside}, {self.where or 'no line'}: {self.results}"


@dataclass
class HashLog:
    """What `record_hashes` noted, in the order of execution."""

    calls: list[HashedCall] = field(default_factory=list)

    def __str__(self) -> str:
        return f"hashes of {len(self.calls)} results"

    def to_json(self) -> str:
        """As JSON text, which `from_json` reads."""
        return json.dumps({"kind": KIND, "version": VERSION, "calls": self.calls})

    @classmethod
    def from_json(cls, text: str) -> HashLog:
        """Raises `ValueError` for anything but what `to_json` of this version wrote."""
        try:
            found = json.loads(text)
            if found["kind"] != KIND or found["version"].partition(".")[0] != VERSION.partition(".")[0]:
                raise KeyError
            return cls([HashedCall(*call) for call in found["calls"]])
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"no log of hashes, version {VERSION}") from None


@dataclass(frozen=True)
class HashDifference:
    """How two logs differ; falsy if they do not. `first`: the first operator of both whose results differ."""

    first: tuple[HashedCall, HashedCall] | None
    only_in_a: tuple[HashedCall, ...]
    only_in_b: tuple[HashedCall, ...]
    compared: int

    def __bool__(self) -> bool:
        return bool(self.first or self.only_in_a or self.only_in_b)

    def __str__(self) -> str:
        lines = [f"{self.compared} results are the same to the bit"]
        if self.first is not None:
            lines[0] = f"the first difference, after {self.compared} results that are the same to the bit"
            lines += [f"  a: {self.first[0]}", f"  b: {self.first[1]}"]
        for name, calls in (("a", self.only_in_a), ("b", self.only_in_b)):
            if calls:
                lines.append(f"only in {name}: {len(calls)}, the first {calls[0]}")
        return "\n".join(lines)


class record_hashes(OperatorObserver):
    """Context that notes a hash of every operator's result, integer ones included; `compare_hashes` compares two::

        with debugging.record_hashes(model) as a:
            step()
        with debugging.record_hashes(model) as b:
            step()
        print(debugging.compare_hashes(a, b))

    Tensors that were there before are hashed when they are first read, so a difference in the data is not blamed on
    the operator that reads it. Every result is copied to the host: for one step, not for a run.
    """

    def __init__(self, model: Module | None = None, on_step: Callable[[], None] = lambda: None) -> None:
        super().__init__(model)
        self.log = HashLog()
        self._on_step = on_step
        self._known: StorageMap[bool] = StorageMap()
        self._occurrences: Counter[tuple[Any, ...]] = Counter()

    def __enter__(self) -> HashLog:     # type: ignore[override]
        super().__enter__()
        return self.log

    def observe(
        self, call: OperatorCall, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        for tensor in tensors_in((args, kwargs)):
            if not is_opaque(tensor) and not self._known.get(tensor):
                self._known.set(tensor, True)
                if not call.facts.overwrites and not call.facts.shape_only:
                    self._note(call, "", [tensor], self._name(tensor))
        result = func(*args, **kwargs)
        outputs = tensors_in(result)
        if call.facts.mutable:
            outputs = list({id(one): one for one in (*outputs, *call.facts.written(args, kwargs))}.values())
        outputs = [one for one in outputs if not is_opaque(one)]
        for tensor in outputs:
            self._known.set(tensor, True)
        if outputs and not call.facts.uninitialised and not call.facts.communicates:
            line = self.place(call).line
            self._note(call, call.op, outputs, str(line) if line is not None else "")
        return result

    def step_ended(self, optimizer: Any) -> None:
        self._on_step()

    def _note(self, call: OperatorCall, op: str, tensors: list[Tensor], where: str) -> None:
        module = self.place(call).module
        path, number = ("", 0) if module is None else (str(module), module.number)
        key = (call.step, op, call.phase, path, number)
        self._occurrences[key] += 1
        results = ", ".join(f"{dtype_name(one.dtype)}{list(one.shape)}" for one in tensors)
        self.log.calls.append(
            HashedCall(op, call.phase, path, number, self._occurrences[key], where, results, _hash(tensors))
        )

    def _name(self, tensor: Tensor) -> str:
        for root in self.modules.roots():
            for name, one in (*root.named_parameters(), *root.named_buffers()):
                if storage_key(one) == storage_key(tensor):
                    return name
        return variable_of(tensor)


def compare_hashes(a: HashLog, b: HashLog) -> HashDifference:
    """The first operator, in the order of `a`, whose result differs in `b`, and what only one of them has.

    Operators are matched by module, call and name, not by position: a cast more in one run shifts nothing.
    """
    for name, log in (("a", a), ("b", b)):
        if not isinstance(log, HashLog):
            raise TypeError(f"{name} is {type(log).__name__}; expected what `with record_hashes() as log` gives")
    theirs: dict[tuple[Any, ...], list[HashedCall]] = {}
    for call in b.calls:
        theirs.setdefault(call.key, []).append(call)
    compared, only_a = 0, []
    first = None
    for call in a.calls:
        matches = theirs.get(call.key)
        if not matches:
            only_a.append(call)
            continue
        other = matches.pop(0)
        if first is None:
            if call.hash == other.hash:
                compared += 1
            else:
                first = (call, other)
    only_b = tuple(call for matches in theirs.values() for call in matches)
    return HashDifference(first, tuple(only_a), only_b, compared)


def _hash(tensors: list[Tensor]) -> int:
    value = 0
    for tensor in tensors:
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
        value = zlib.crc32(repr((tensor.dtype, tuple(tensor.shape))).encode(), value)
        if plain.numel():
            value = zlib.crc32(plain.reshape(-1).view(torch.uint8).numpy().data, value)
    return value
