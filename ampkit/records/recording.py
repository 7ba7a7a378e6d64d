"""`record_casts`: notes each operator call that followed a rule: its rule and who set it, its casts, module and line.

While a record is being made, the modes of new regions have an observer, `_note`; otherwise recording costs nothing. A
record holds names, dtypes and numbers, but no tensors of the user's.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from ampkit.dispatch import casting
from ampkit.dispatch.mode import AutocastMode, Call, observers
from ampkit.matmul.float8 import Product, why_not
from ampkit.matmul.float8_recipes import RECIPES
from ampkit.policy.module_paths import path_of
from ampkit.policy.policy import Explanation, Policy, register_changes
from ampkit.policy.rules import Rule
from ampkit.records.cast_record import CastRecord, RecordedCall
from ampkit.torch_private import MODULE_CALL, OpOverload, TracingContext, loaded
from ampkit.user_code import is_library

__all__ = ["record_casts"]

_FEW = 10  # autograd nodes of an RMS norm that is written out
_SUMS = frozenset({"Add", "Sub", "Cat"})
_VIEWS = frozenset({"Alias", "Transpose", "UnsafeView", "View"})


class record_casts(contextlib.ContextDecorator):
    """Record the casts of every region that is entered inside, in all threads: in forward, recomputation and backward.

    The record shows why an operator was cast, and the cost of casts in a step::

        with record_casts() as record:
            with autocast("cuda"):
                loss = model(x).mean()
            loss.backward()
        print(record)

    Operators without a rule do not appear, because regions do not handle them. Regions that were open before do not
    appear.
    Code under `torch.compile` is omitted, unless its backend runs operators one by one ("eager"): record the function
    before it is compiled. FakeTensors are recorded like others, even for a GPU that the machine does not have. Inside
    another record, only the inner one records. Entering returns the `CastRecord`. Recording never synchronizes.

    The record lists float32 results of 16-bit activations that the next operator casts back to 16 bits, with their
    bytes: norms in float32, or adapters whose weights are float32. These are found through autograd's graph, so only
    if the activations require gradients.
    """

    def __enter__(self) -> CastRecord:
        self.record = CastRecord()
        self.observer = functools.partial(_note, self.record)
        observers.append(self.observer)
        return self.record

    def __exit__(self, *exc: Any) -> None:
        # Another thread's observer may be the last. A partial equals only itself.
        observers[:] = [observer for observer in observers if observer is not self.observer]
        if not self.record.calls:
            self.record.compiled = self.record.compiled or _has_compiled()


def _note(
    record: CastRecord,
    mode: AutocastMode,
    op: OpOverload,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    call: Call,
    reused: list[Any],
) -> None:
    """Note a call in a record, as a mode's observer."""
    if TracingContext.try_get() is not None:
        record.compiled = True
        return
    recorded = _recorded(mode, op, args, kwargs, call, reused)
    record.calls.append(recorded)
    if isinstance(call[0], Product):
        call[0].notes = functools.partial(record.float8_notes.note, recorded.module or recorded.line)


def _recorded(
    mode: AutocastMode, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], call: Call, reused: list[Any]
) -> RecordedCall:
    """Return the record of a call: `args` and `kwargs` as they were given, `call` as it will run."""
    run, new_args = call[0], (*call[1], *call[2].values())
    given, used = list(casting.tensors((*args, *kwargs.values()))), list(casting.tensors(new_args))
    cast = [(old, new) for old, new in zip(given, used, strict=True) if old is not new]
    made = [(old, new) for old, new in cast if not any(new is each for each in reused)]
    policy = next(
        policy
        for (device_type, policy), (_, table) in zip(mode.policies, mode.tables, strict=True)
        if len(mode.policies) == 1
        or (op in table and torch.is_autocast_enabled(device_type) and any(t.device.type == device_type for t in given))
    )
    _, rule, layer, why = _explain(policy, op, register_changes())
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
    undone = [(producer, old) for old, new in made if new.dtype.itemsize == 2 and (producer := _upcast_by(old))]
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
        ", ".join(sorted({producer for producer, _ in undone})),
        sum([_nbytes(old) for _, old in undone]),
    )


def _upcast_by(tensor: Tensor) -> str:
    """Return the name of the autograd node that computed a float32 tensor from 16-bit activations; "" if none did.

    Between the 16-bit tensors and the result are only a few float32 operators, such as in a norm.
    """
    pending = [tensor.grad_fn] if tensor.dtype is torch.float32 and tensor.grad_fn is not None else []
    names: dict[Any, str] = {}
    while pending:
        node = pending.pop(0)
        names[node] = type(node).__name__.partition("Backward")[0]
        inputs = [(source, index) for source, index in node.next_functions if source is not None]
        activations = [each for each in inputs if type(each[0]).__name__ != "AccumulateGrad"] or inputs
        # A term without a history may be float32, as in a residual stream that begins with frozen embeddings.
        is_uncertain = names[node] in _SUMS and len(inputs) < len(node.next_functions)
        is_uncertain = is_uncertain and math.prod(node._input_metadata[0].shape) == tensor.numel()
        if not activations or is_uncertain or len(names) > _FEW:
            return ""  # of a float32 leaf, perhaps of one, or of a longer computation
        pending += [
            source
            for source, index in activations
            if source not in names and source._input_metadata[index].dtype.itemsize != 2
        ]
    return next((name for name in names.values() if name not in _VIEWS), "")


@functools.lru_cache(maxsize=1024)
def _explain(policy: Policy, op: OpOverload, changes: int) -> Explanation:
    return policy.explain(op)


def _call_site(frame: FrameType | None) -> tuple[str, str]:
    """Return the path of the module that runs, and the line of user code that called the operator."""
    innermost = outermost = None  # frames of modules
    line = ""
    while frame is not None:
        code = frame.f_code
        if code is MODULE_CALL:
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
    """Return the bytes of a tensor's elements, including elements that a sparse tensor does not store."""
    return tensor.numel() * tensor.element_size()


def _dtypes(tensors: Sequence[Tensor]) -> tuple[torch.dtype, ...]:
    return tuple([tensor.dtype for tensor in tensors])


def _has_compiled() -> bool:
    """Return whether Dynamo has compiled any code in this process."""
    return bool(loaded("_dynamo.convert_frame", "output_codes.seen"))
