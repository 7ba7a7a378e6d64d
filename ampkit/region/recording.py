"""`record_casts`: notes each operator call that followed a rule: its rule and who set it, its casts, module and line.

While a record is being taken, new regions get a mode that notes its calls; otherwise recording costs nothing. A record
holds names, dtypes and numbers, and for FP8 operands a few sums on the device, but no tensors of the user's.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from ampkit.engine import casting
from ampkit.engine.autocast_mode import AutocastMode
from ampkit.engine.float8_products import Product, why_not
from ampkit.engine.registration import GENERAL_HANDLERS
from ampkit.engine.thread_state import thread
from ampkit.engine.weight_cache import RegionCache, WeightCache
from ampkit.policy.float8_recipes import RECIPES
from ampkit.policy.module_paths import path_of
from ampkit.policy.op_table import Rule
from ampkit.policy.policy import Explanation, Policy
from ampkit.region.cast_record import CastRecord, RecordedCall
from ampkit.torch_internals.dynamo import TracingContext, has_compiled
from ampkit.torch_internals.modules import CALL
from ampkit.torch_internals.operators import OpOverload
from ampkit.user_code import is_library

__all__ = ["CastRecord", "RecordedCall", "record_casts"]


class record_casts(contextlib.ContextDecorator):
    """Record what every region entered inside casts, in all threads: in forward, recomputation and backward.

    The record shows why an operator was cast, and what casting costs in a step::

        with record_casts() as record:
            with autocast("cuda"):
                loss = model(x).mean()
            loss.backward()
        print(record)

    Operators without a rule do not appear, because a region does not see them; nor do regions that were open before.
    Code under `torch.compile` is left out, unless its backend runs operators one by one ("eager"): record the function
    before it is compiled. FakeTensors are recorded like others, also for a GPU that the machine does not have. Inside
    another record, only the inner one records. Recording never synchronizes.
    """

    def __enter__(self) -> CastRecord:
        self.record = CastRecord()
        records.append(self.record)
        return self.record

    def __exit__(self, *exc: Any) -> None:
        records[:] = [record for record in records if record is not self.record]  # another thread's may be last
        if not self.record.calls:
            self.record.compiled = self.record.compiled or has_compiled()


records: list[CastRecord] = []  # those being taken; regions write to the last


def new_mode(policies: tuple[tuple[str, Policy], ...], cache: WeightCache | RegionCache | None) -> AutocastMode:
    """A mode for these policies and this cache, which notes its calls if a record is being taken."""
    open_records = records[-1:]  # a copy: another thread may end the record meanwhile
    return _RecordingMode(policies, cache, open_records[0]) if open_records else AutocastMode(policies, cache)


class _RecordingMode(AutocastMode):
    """A mode that notes each call in a record."""

    def __init__(
        self, policies: tuple[tuple[str, Policy], ...], cache: WeightCache | RegionCache | None, record: CastRecord
    ) -> None:
        super().__init__(policies, cache)
        self.handlers = GENERAL_HANDLERS
        self.record = record
        self.explanations: dict[tuple[str, str], Explanation] = {}  # by device type and operator
        if cache is not None:
            self.lookup = functools.partial(_cached_cast, cache)

    def prepare(self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        thread.reused = []
        call = super().prepare(op, args, kwargs)
        if call is not None:
            if TracingContext.try_get() is None:
                recorded = self._recorded(op, args, kwargs, call)
                self.record.calls.append(recorded)
                if isinstance(call[0], Product):
                    place = recorded.module or recorded.line
                    call[0].notes = functools.partial(self.record.float8_notes.note, place)
            else:
                self.record.compiled = True
        thread.reused = []
        return call

    def _recorded(self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], call: Any) -> RecordedCall:
        """What to record of a call: `args` and `kwargs` as they were given, `call` as it will run."""
        run, new_args = call[0], (*call[1], *call[2].values())
        given, used = list(casting.tensors((*args, *kwargs.values()))), list(casting.tensors(new_args))
        cast = [(old, new) for old, new in zip(given, used, strict=True) if old is not new]
        reused = {id(each) for each in thread.reused}
        made = [(old, new) for old, new in cast if id(new) not in reused]
        policy = self.policy or next(
            policy
            for (device, policy), (_, table) in zip(self.policies, self.tables, strict=True)
            if op in table and torch.is_autocast_enabled(device) and any(each.device.type == device for each in given)
        )
        key = policy.device_type, op.name()
        explanation = self.explanations.get(key)
        if explanation is None:
            explanation = self.explanations[key] = policy.explain(op)
        _, rule, layer, why = explanation
        operands = _dtypes(given)
        computed_in = _dtypes(used) if cast else operands
        if rule is Rule.FLOAT32_DTYPE_ARG:
            computed_in = tuple(arg for arg in new_args if isinstance(arg, torch.dtype)) or computed_in
        float8 = ""
        if isinstance(run, Product):
            float8, recipe = rule.name, run.recipe
            computed_in = tuple(run.dtype if each is None else each.dtype for each in (recipe.x, recipe.w))
        elif rule in RECIPES:
            float8 = why_not(op, args, kwargs, policy.device_type)
        module, line = _call_site(sys._getframe(1))
        return RecordedCall(
            op.name(),
            rule,
            layer,
            why,
            module,
            line,
            operands,
            computed_in,
            len(made),
            len(cast) - len(made),
            sum([_nbytes(old) + _nbytes(new) for old, new in made]),
            tuple([() if tensor.is_nested else tuple(map(int, tensor.shape)) for tensor in given]),
            float8,
        )


def _cached_cast(cache: WeightCache | RegionCache, leaf: Tensor, dtype: torch.dtype) -> Tensor:
    """`cache.cast`, noted in `thread.reused` if the cache had it.

    Not a method of the mode: in a cycle with the mode, the casts of a recompute would live until garbage collection.
    """
    hits = cache.counts.hits
    cast = cache.cast(leaf, dtype)
    if cache.counts.hits > hits:
        thread.reused.append(cast)
    return cast


def _call_site(frame: FrameType | None) -> tuple[str, str]:
    """The path of the module that runs, and the line of user code that called the operator."""
    innermost = outermost = None  # frames of modules
    line = ""
    while frame is not None:
        code = frame.f_code
        if code is CALL:
            outermost = frame
            innermost = innermost or frame
        elif not line and not is_library(code.co_filename):
            line = f"{_file_name(code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    if innermost is None or outermost is None:
        return "", line
    module = innermost.f_locals["self"]
    return path_of(outermost.f_locals["self"], module) or type(module).__name__, line


@functools.cache
def _file_name(path: str) -> str:
    return Path(path).name


def _nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements, also of those that a sparse tensor does not store."""
    return tensor.numel() * tensor.element_size()


def _dtypes(tensors: Sequence[Tensor]) -> tuple[torch.dtype, ...]:
    return tuple([tensor.dtype for tensor in tensors])
