"""What the regions of a step did, call by call: which operators followed a rule, who set it, what was cast, where.

While a record is being taken, regions are given a mode that notes what it does; at other times nothing is asked and
nothing costs. A record holds names, dtypes and numbers, and of tensors a few sums for each operand in FP8.
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
from torch.nn import Module

from ampkit.engine import casting
from ampkit.engine.autocast_mode import AutocastMode
from ampkit.engine.float8_products import Product, why_not
from ampkit.engine.registration import GENERAL_HANDLERS
from ampkit.engine.thread_state import thread
from ampkit.engine.weight_cache import RegionCache, WeightCache
from ampkit.policy.float8_recipes import RECIPES
from ampkit.policy.module_paths import path_of
from ampkit.policy.op_table import Rule
from ampkit.policy.policy import Policy
from ampkit.region.cast_record import CastRecord, RecordedCall
from ampkit.torch_internals.dispatcher import Exclude
from ampkit.torch_internals.dynamo import TracingContext, has_compiled
from ampkit.torch_internals.float8_matmul import is_eager
from ampkit.torch_internals.modules import CALL
from ampkit.torch_internals.operator_tracing import is_opaque
from ampkit.torch_internals.operators import OpOverload
from ampkit.torch_internals.tensors import is_capturing
from ampkit.torch_internals.transforms import functorch_level
from ampkit.user_code import is_library, warn_user

__all__ = ["CastRecord", "RecordedCall", "record_casts"]

_MOST_ELEMENTS = 1 << 14         # elements that are looked at: sorting all of an activation would take long
_LARGEST_INTEGER = 1 << 24      # up to which float32 has every integer; beyond are the constants of masks


class record_casts(contextlib.ContextDecorator):
    """Note what every region entered in here does, in all threads: forward, recomputation, and casts in backward.

    Shows why an operator was cast, and what casting costs in a step::

        with record_casts() as record:
            with autocast("cuda"):
                loss = model(x).mean()
            loss.backward()
        print(record)

    Operators that no rule names do not appear, for a region never sees them, nor do regions that were open before. What
    `torch.compile` traces is left out, unless its backend runs operators one by one ("eager"): record the function
    before it is compiled. FakeTensors are recorded like others, those of a GPU that is not there too. A record inside a
    record takes the regions for itself.

    Warns where a cast made distinct integers equal, as bfloat16 does to positions above 256 that are kept as floats:
    such a tensor belongs into float32. The first 16,384 elements of each tensor without a gradient are looked at, on
    the device; the answers are read when the record ends, which syncs.

    Args:
        check_integers: False leaves that check out. Then a record never syncs.
    """

    def __init__(self, *, check_integers: bool = True) -> None:
        self.check_integers = check_integers

    def __enter__(self) -> CastRecord:
        self.taken = CastRecord()
        self.taken.integers = [] if self.check_integers else None
        records.append(self.taken)
        return self.taken

    def __exit__(self, *exc: Any) -> None:
        records[:] = [record for record in records if record is not self.taken]     # not always the last: threads
        if not self.taken.calls:
            self.taken.compiled = self.taken.compiled or has_compiled()
        self.taken.merged = [] if any(exc) else [call for call, merges in self.taken.integers or () if merges]
        if self.taken.merged:
            warn_user(
                "; ".join(self.taken.merged_lines()) + ". Compute there in float32, by a rule for the module, in an "
                "amp.float_function or in `with autocast(enabled=False)`; record_casts(check_integers=False) does not "
                "look",
                ("torch.", "contextlib"),
            )


records: list[CastRecord] = []      # that are being taken; regions note in the one begun last


def new_mode(policies: tuple[tuple[str, Policy], ...], cache: WeightCache | RegionCache | None) -> AutocastMode:
    """A mode for these policies and this cache, which takes notes if a record is being taken."""
    for record in records[-1:]:     # threads: it may be empty by now
        return _RecordingMode(policies, cache, record)
    return AutocastMode(policies, cache)


class _RecordingMode(AutocastMode):
    """A mode that notes each call it prepares."""

    def __init__(
        self, policies: tuple[tuple[str, Policy], ...], cache: WeightCache | RegionCache | None, record: CastRecord
    ) -> None:
        super().__init__(policies, cache)
        self.handlers = GENERAL_HANDLERS
        self.record = record
        if cache is not None:
            self.lookup = functools.partial(_look_up, cache)

    def prepare(self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        thread.reused = []
        call = super().prepare(op, args, kwargs)
        if call is not None:
            if TracingContext.try_get() is None:
                noted = self._noted(op, args, kwargs, call)
                self.record.calls.append(noted)
                if isinstance(call[0], Product):
                    call[0].notes = functools.partial(self.record.float8_notes.note, noted.module or noted.line)
            else:
                self.record.compiled = True
        thread.reused = []
        return call

    def _noted(self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], call: Any) -> RecordedCall:
        run, got = call[0], (*call[1], *call[2].values())
        before, after = list(casting.tensors((*args, *kwargs.values()))), list(casting.tensors(got))
        cast = [(old, new) for old, new in zip(before, after, strict=True) if old is not new]
        made = [(old, new) for old, new in cast if not any(new is kept for kept in thread.reused)]
        policy = next(
            policy
            for device, policy in self.policies
            if op in policy.rules()
            and torch.is_autocast_enabled(device)
            and (len(self.policies) == 1 or any(tensor.device.type == device for tensor in before))
        )
        _, rule, layer, why = policy.explain(op)
        asked = tuple(value for value in got if rule is Rule.FLOAT32_DTYPE_ARG and isinstance(value, torch.dtype))
        float8 = ""
        if isinstance(run, Product):
            float8, asked = rule.name, (run.recipe.x.dtype, run.recipe.w.dtype)
        elif rule in RECIPES:
            float8 = why_not(op, args, kwargs, policy.device_type)
        module, line = _call_site(sys._getframe(1))
        noted = RecordedCall(
            op.name(), rule, layer, why, module, line, _dtypes(before), asked or _dtypes(after),
            len(made), len(cast) - len(made), sum(_nbytes(old) + _nbytes(new) for old, new in made),
            tuple(() if tensor.is_nested else tuple(map(int, tensor.shape)) for tensor in before), float8,
        )
        if self.record.integers is not None:
            with Exclude(self.excluded_keys):
                answers = [merges_integers(old, new.dtype) for old, new in made]
            self.record.integers += [(noted, merges) for merges in answers if merges is not None]
        return noted


def _look_up(cache: WeightCache | RegionCache, leaf: Tensor, dtype: torch.dtype) -> Tensor:
    """`cache.cast`, noted if it was there. No method of the mode: the casts of a recompute would wait for the gc."""
    hits = cache.hits
    cast = cache.cast(leaf, dtype)
    if cache.hits > hits:
        thread.reused.append(cast)
    return cast


def _call_site(frame: FrameType | None) -> tuple[str, str]:
    """The path of the module that runs, and the line of the user's code that called the operator."""
    modules: list[Module] = []
    line = ""
    while frame is not None:
        code = frame.f_code
        if code is CALL:
            modules.append(frame.f_locals["self"])
        elif not line and not is_library(code.co_filename):
            line = f"{Path(code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    if not modules:
        return "", line
    return path_of(modules[-1], modules[0]) or type(modules[0]).__name__, line


def _nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements, those that a sparse one does not store too."""
    return tensor.numel() * tensor.element_size()


def _dtypes(tensors: Sequence[Tensor]) -> tuple[torch.dtype, ...]:
    return tuple(tensor.dtype for tensor in tensors)


def merges_integers(exact: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Whether a tensor holds integers alone, of which a cast makes distinct ones equal: a 0-d bool. Never syncs.

    None where that is not looked at: tensors with a gradient or not of float32, traced, sparse or captured ones.
    """
    if (
        exact.dtype is not torch.float32 or dtype.itemsize != 2 or exact.requires_grad or not is_eager(exact)
        or is_opaque(exact) or functorch_level() is not None or is_capturing()
    ):
        return None
    values = exact.detach().flatten()[:_MOST_ELEMENTS].sort().values      # rounding keeps the order
    cast = values.to(dtype)
    integers = ((values == values.round()) & (values.abs() <= _LARGEST_INTEGER)).all()
    return integers & ((values[1:] != values[:-1]) & (cast[1:] == cast[:-1])).any()
