"""`collect_operator_stats`: where a step's time and bytes go, by operator, dtype and module."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import Module

from ampkit.debugging.causes import dtype_name
from ampkit.debugging.operator_calls import OperatorCall, OperatorObserver
from ampkit.debugging.operator_facts import tensors_in
from ampkit.debugging.storage_map import StorageMap
from ampkit.region.matrix_products import factors, matrix_products
from ampkit.region.recording import CastRecord, record_casts
from ampkit.torch_internals.operator_tracing import OpOverload, is_opaque, storage_key

__all__ = ["MatrixShape", "OperatorStat", "OperatorStats", "OperatorTimes", "collect_operator_stats"]

KIND, VERSION = "ampkit.debugging.operators", "1.0"
_LOW = (torch.float16, torch.bfloat16)
_ALIGNED = 8        # elements of 16 bits: what tensor cores take at once


@dataclass
class OperatorStat:
    """All calls of one operator with one dtype in one module and phase. Bytes are those of inputs and results."""

    op: str
    dtype: str
    module: str
    phase: str
    calls: int = 0
    nbytes: int = 0
    seconds: float = 0.0


@dataclass
class MatrixShape:
    """Matrix products of the forward in 16 bits with a dimension that is no multiple of 8; of convolutions the channels
    of a group count. `parameter` is the weight among the factors, "" without one."""

    op: str
    module: str
    parameter: str
    dtype: str
    sizes: dict[str, int]       # "rows", "inner", "columns"; or "in", "out"
    calls: int = 0
    seconds: float = 0.0

    @property
    def odd(self) -> dict[str, int]:
        """The dimensions to change."""
        return {name: size for name, size in self.sizes.items() if size % _ALIGNED}


@dataclass
class OperatorStats:
    """What `collect_operator_stats` counted; `str` is a table, the slowest first."""

    operators: list[OperatorStat] = field(default_factory=list)
    shapes: list[MatrixShape] = field(default_factory=list)
    rules: CastRecord = field(default_factory=CastRecord)     # what regions cast
    device_type: str = "cpu"

    @property
    def seconds(self) -> float:
        """In all operators."""
        return sum(one.seconds for one in self.operators)

    def by_operator(self) -> list[OperatorStat]:
        """Sums over modules and phases, which are "" then, for each operator and dtype; the slowest first."""
        sums = [
            OperatorStat(
                op, dtype, "", "", sum(one.calls for one in some), sum(one.nbytes for one in some),
                sum(one.seconds for one in some),
            )
            for (op, dtype), some in _groups(self.operators, "op", "dtype")
        ]
        return sorted(sums, key=lambda one: -one.seconds)

    def by_dtype(self) -> dict[str, float]:
        """The share of the time, by dtype."""
        whole = self.seconds or 1.0
        return {name: sum(one.seconds for one in some) / whole for name, some in _groups(self.operators, "dtype")}

    def casts(self) -> dict[str, int]:
        """Bytes that casts read and write, by module, the most first."""
        found = {
            module: sum(one.nbytes for one in some)
            for module, some in _groups([one for one in self.operators if one.op == "aten::_to_copy"], "module")
        }
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def __str__(self) -> str:
        return self.table()

    def table(self, rows: int = 12) -> str:
        """The slowest operators, over all modules; the modules that cast most; shapes to change."""
        whole = self.seconds or 1.0
        lines = [f"{'time':>6} {'calls':>6} {'MB':>9}  {'dtype':9} operator"]
        for one in self.by_operator()[:rows]:
            lines.append(
                f"{one.seconds / whole:6.1%} {one.calls:6d} {one.nbytes / 1e6:9.3f}  {one.dtype:9} {one.op}"
            )
        casts = list(self.casts().items())
        if casts:
            most = (f"{nbytes / 1e6:.3f} MB in {name or '(none)'}" for name, nbytes in casts[:3])
            lines.append(f"casts: {', '.join(most)}")
        for one in sorted(self.shapes, key=lambda shape: -shape.seconds)[:3]:
            odd = ", ".join(f"{name} is {size}" for name, size in one.odd.items())
            lines.append(
                f"no multiple of {_ALIGNED}: {odd}, in {one.op}, {one.module or '(none)'}"
                + (f", of {one.parameter}" if one.parameter else "") + f", {one.seconds / whole:.1%} of the time"
            )
        return "\n".join(lines)

    def to_json(self) -> str:
        """As JSON text."""
        return json.dumps({
            "kind": KIND, "version": VERSION, "operators": [asdict(one) for one in self.operators],
            "shapes": [asdict(one) for one in self.shapes], "casts": self.casts(),
        }, indent=1)


class OperatorTimes(OperatorObserver):
    """Times every operator; waits for the device after each where that is no CPU."""

    def __init__(self, model: Module | None = None, on_step: Callable[[], None] = lambda: None) -> None:
        super().__init__(model)
        self.stats = OperatorStats()
        self._operators: dict[tuple[str, ...], OperatorStat] = {}
        self._shapes: dict[tuple[Any, ...], MatrixShape] = {}
        self._weights: StorageMap[str] = StorageMap()
        self._on_step = on_step
        self._casts = record_casts()

    def __enter__(self) -> Self:
        super().__enter__()
        self.stats.rules = self._casts.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._casts.__exit__(*error)
        super().__exit__(*error)

    def step_ended(self, optimizer: Any) -> None:
        self._on_step()

    def observe(
        self, call: OperatorCall, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        start = time.perf_counter()
        result = func(*args, **kwargs)
        given, made = tensors_in((args, kwargs)), tensors_in(result)
        for device in {one.device for one in made if one.device.type not in ("cpu", "meta")}:
            torch.accelerator.synchronize(device)
            self.stats.device_type = device.type
        seconds = time.perf_counter() - start
        place = self.place(call)
        module = "" if place.module is None else str(place.module)
        floats = [one for one in (*made, *given) if one.is_floating_point()]
        dtype = dtype_name(floats[0].dtype) if floats else "other"
        key = (call.op, dtype, module, call.phase)
        stat = self._operators.get(key)
        if stat is None:
            stat = self._operators[key] = OperatorStat(*key)
            self.stats.operators.append(stat)
        stat.calls += 1
        stat.nbytes += sum(one.numel() * one.element_size() for one in (*given, *made) if not is_opaque(one))
        stat.seconds += seconds
        if call.op == "aten::_to_copy" and made and given:
            name = self._weight(given[0])
            if name:
                self._weights.set(made[0], name)
        elif call.phase == "forward" and floats and floats[0].dtype in _LOW:
            self._note_shapes(call.op, module, args, kwargs, dtype, seconds)
        return result

    def _note_shapes(
        self, op: str, module: str, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: str, seconds: float
    ) -> None:
        for product in matrix_products(op, args, kwargs):
            if not product.odd(_ALIGNED):
                continue
            given = (one for one in factors(op, args) if isinstance(one, Tensor))
            parameter = next(filter(None, map(self._weight, given)), "")
            key = (op, module, parameter, product.sizes)
            shape = self._shapes.get(key)
            if shape is None:
                shape = self._shapes[key] = MatrixShape(op, module, parameter, dtype, dict(product.sizes))
                self.stats.shapes.append(shape)
            shape.calls += 1
            shape.seconds += seconds

    def _weight(self, tensor: Tensor) -> str:
        """The parameter that a tensor is, or is a cast of."""
        if is_opaque(tensor):
            return ""
        found = self._weights.get(tensor)
        if found is None:
            for root in self.modules.roots():
                for name, one in root.named_parameters():
                    if storage_key(one) == storage_key(tensor):
                        found = name
            self._weights.set(tensor, found or "")
        return found or ""


class collect_operator_stats(OperatorTimes):
    """Context that counts calls, bytes and time of every operator, by dtype, module and phase::

        with debugging.collect_operator_stats(model) as stats:
            step()
        print(stats)

    `stats.casts()` has the bytes that casts move, by module; `stats.shapes` the matrix products in 16 bits whose
    dimensions are no multiples of 8, with the parameter to change. Times are of one operator at a time, measured from
    Python: compare them with each other. On an accelerator each operator is waited for.
    """

    def __enter__(self) -> OperatorStats:       # type: ignore[override]
        super().__enter__()
        return self.stats


def _groups(stats: Iterable[OperatorStat], *names: str) -> Iterable[tuple[Any, list[OperatorStat]]]:
    found: dict[Any, list[OperatorStat]] = defaultdict(list)
    for one in stats:
        values = tuple(getattr(one, name) for name in names)
        found[values if len(names) > 1 else values[0]].append(one)
    return found.items()
