"""Changes to a step that can be tried: each knows the code that a user writes, and runs a step as if it were there.

Which of them a cause asks for, and what helps in the user's own code where none does.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from ampkit.containers import map_tensors
from ampkit.debugging.call_sites import find_caller
from ampkit.debugging.causes import advice_for
from ampkit.debugging.operator_facts import tensors_in
from ampkit.debugging.report import Finding, Operation, PrecisionReport, Suggestion
from ampkit.dtypes import SIXTEEN_BIT
from ampkit.policy.module_paths import named_paths
from ampkit.policy.policy import Policy
from ampkit.region.autocast import autocast

Region = Literal["ampkit", "torch", "none"]     # what the user's step computes in
_AS_THEY_ARE = frozenset({
    "batch_norm", "backward", "__get__", "__set__", "__delete__", "__setitem__", "__iadd__", "__isub__", "__imul__",
    "__itruediv__",
})


@dataclass(frozen=True)
class PolicyChange:
    """Modules to keep in float32. A step whose region has a policy of its own takes no notice."""

    device: str
    model: Module
    modules: tuple[str, ...] = ()

    @property
    def code(self) -> str:
        """What a user writes for it."""
        rules = ", ".join(f'"{path}": torch.float32' for path in self.modules)
        return f'policy = Policy.default("{self.device}").for_modules(model, {{{rules}}})'

    def around(self) -> AbstractContextManager[Any]:
        """A context in which the step runs as if the code were there."""
        policy = Policy.default(self.device).for_modules(self.model, dict.fromkeys(self.modules, torch.float32))
        return autocast(self.device, enabled=False, policy=policy)

    def extended(self, left: Finding) -> PolicyChange | None:
        """With the module of what is not finite with it, or the one around that; None if nothing is left."""
        path = left.origin.module if left.origin.module in _paths(self.model) else ""
        while path in self.modules:
            path = path.rpartition(".")[0]
        return replace(self, modules=(*self.modules, path)) if path else None


class LineChange(TorchFunctionMode):
    """Lines of the user's code computed in float32, casts to 16 bits included: what any step can do."""

    def __init__(self, device: str, region: Region, lines: tuple[Lines, ...]) -> None:
        super().__init__()
        self.device = device
        self.region: Region = region
        self.lines = lines

    @property
    def code(self) -> str:
        """What a user writes for it."""
        where = " and ".join(map(str, self.lines))
        if self.region == "none":
            return f"compute {where} in float32: .float() on its tensors, and no cast to 16 bits there"
        name = "autocast" if self.region == "ampkit" else "torch.autocast"
        return f'with {name}("{self.device}", enabled=False): around {where}, with .float() on its tensors'

    def around(self) -> AbstractContextManager[Any]:
        """A context in which the step runs as if the code were there."""
        return self

    def extended(self, left: Finding) -> LineChange | None:
        """With a line of what is not finite with it, else with its function; None if nothing is left."""
        new = [place for one in (left.made, left.origin) if one is not None and (place := line_of(one))]
        new += [whole for place in new[::-1] if (whole := function_around(place)) is not None]
        more = next((place for place in new if not any(one.covers(place) for one in self.lines)), None)
        if more is None:
            return None
        return LineChange(self.device, self.region, (*(one for one in self.lines if not more.covers(one)), more))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        file, line = find_caller(1).line()
        if not any(one.covers(Lines(file, line, line)) for one in self.lines):
            return self._called(func, args, kwargs)
        name = getattr(func, "__name__", "")
        if name in _AS_THEY_ARE or (name.endswith("_") and not name.endswith("__")):
            return self._called(func, args, kwargs)     # what they write is not to be a copy
        if func in (Tensor.half, Tensor.bfloat16):
            func = Tensor.float
        args, kwargs = _widened(args), _widened(kwargs)
        around: AbstractContextManager[Any] = nullcontext()
        if torch.is_autocast_enabled(self.device):
            around = (autocast if self.region == "ampkit" else torch.autocast)(self.device, enabled=False)
        with around:
            return func(*args, **kwargs)

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A call elsewhere; where it refuses a float32 tensor beside 16 bits, with that cast back."""
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            dtypes = {one.dtype for one in tensors_in((args, kwargs))}
            low = next((dtype for dtype in SIXTEEN_BIT if dtype in dtypes), None)
            if low is None or torch.float32 not in dtypes:
                raise

            def lowered(one: Tensor) -> Tensor:
                return one.to(low) if one.dtype is torch.float32 else one

            return func(*map_tensors(args, lowered), **map_tensors(kwargs, lowered))


def _widened(value: Any) -> Any:
    """Arguments in float32, dtypes among them too."""
    def other(leaf: Any) -> Any:
        return torch.float32 if isinstance(leaf, torch.dtype) and leaf in SIXTEEN_BIT else leaf

    return map_tensors(value, lambda one: one.float() if one.dtype in SIXTEEN_BIT else one, other)


Change = PolicyChange | LineChange


def _paths(model: Module) -> set[str]:
    return {path for path, _ in named_paths(model) if path}


class Lines(NamedTuple):
    """Lines of a file, both ends included."""

    file: str
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.file}:{self.first}" + (f"-{self.last}" if self.last > self.first else "")

    def covers(self, other: Lines) -> bool:
        return self.file == other.file and self.first <= other.first and other.last <= self.last


def line_of(operation: Operation) -> Lines | None:
    """Where an operation is called."""
    return Lines(operation.file, operation.line, operation.line) if operation.line else None


def function_around(place: Lines) -> Lines | None:
    """The body of the innermost function around a line."""
    try:
        tree = ast.parse(Path(place.file).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return None
    found = [
        Lines(place.file, node.body[0].lineno, node.end_lineno or node.lineno) for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return min((one for one in found if one.covers(place)), key=lambda one: one.last - one.first, default=None)


# --- which of them, for a cause


def suggestion(
    changes: Iterable[Change], advice: Suggestion, attempt: Callable[[Change], tuple[Change, bool, str]] | None = None
) -> Suggestion:
    """The first change that helps, or advice.

    `attempt` tries a change, to which it may add, and returns it, whether it helps, and how one sees that. Without it
    the first change is suggested as one that is not verified.
    """
    tried = []
    for change in changes:
        if attempt is None:
            return Suggestion(change.code, "change", evidence="not verified: find_nonfinite(step, model) tries it")
        change, helps, evidence = attempt(change)
        if helps:
            return Suggestion(change.code, "change", True, f"verified: {evidence}", tuple(tried))
        tried.append(f"{change.code} ({evidence})")
    return replace(advice, tried=tuple(tried))


def changes_for(finding: Finding, region: Region, model: Module | None) -> Iterator[Change]:
    """What may help, the likeliest first."""
    origin, cause = finding.origin, finding.cause
    places = (origin, finding.made) if finding.made is not None else (origin,)
    if cause.kind in ("arrived", "received", "constant", "uninitialised") or origin.phase == "optimizer" or not any(
        low in text for low in ("float16", "bfloat16") for text in (*(one.dtype for one in places), *finding.inputs)
    ):
        return
    line = (finding.made and line_of(finding.made)) or line_of(origin)
    yield from _changes(origin.module, line, finding.device, region, model)


def _changes(path: str, line: Lines | None, device: str, region: Region, model: Module | None) -> Iterator[Change]:
    if region == "ampkit" and model is not None and path in _paths(model):
        yield PolicyChange(device, model, (path,))
    if line is not None:
        yield LineChange(device, region, (line,))


# By kind of cause: what helps, and why nothing was tried.
_ADVICE = {
    "received": ("see the report of the rank that sent it", "what this rank sent is finite"),
    "constant": ("where it is a mask, write a finite number, as -1e4, or leave it out of the sum; else do not write "
                 "inf or NaN where nothing masks it out", "the code asks for it"),
    "uninitialised": ("write to the memory before it is read", "nothing fills it in"),
    "unknown": ("look at its inputs", "the operator could not be run again to see why"),
}


def advice(finding: Finding) -> Suggestion:
    """What helps where no change does, as far as it is known."""
    origin, cause = finding.origin, finding.cause
    if cause.kind == "arrived":
        what = f"{finding.parameter!r}" if finding.parameter else "the data"
        return Suggestion(f"look at what wrote {what} before this step", evidence="it is broken before it is used")
    if cause.kind in _ADVICE:
        code, evidence = _ADVICE[cause.kind]
        return Suggestion(code, evidence=evidence)
    if cause.kind == "overflow" and origin.op == "aten::_to_copy":
        return Suggestion("keep it in float32, or clamp it before the cast: x.clamp(-m, m) with m = "
                          f"torch.finfo(torch.{origin.dtype}).max", evidence="the value does not fit the dtype")
    if origin.phase == "optimizer" and cause.kind in ("rounded", "overflow"):
        return Suggestion("eps=1e-4 in the optimizer, or float32 masters: ampkit.FP16Optimizer(optimizer)",
                          evidence="not verified")
    why, what = advice_for(origin.op, origin.backward_of)
    if origin.phase == "backward" and cause.kind == "overflow" and cause.value and cause.limit and not (
        finding.scale or why
    ):
        divisor = 2.0 ** math.ceil(math.log2(cause.value / cause.limit))
        return Suggestion(f"(loss / {divisor:g}).backward()    # gradients are {divisor:g} times smaller then",
                          evidence="not verified")
    if cause.kind == "rounded" and " is " in cause.text:
        return Suggestion("write a number that the dtype holds: in float16 6e-8 or more, and at most 1 - 5e-4",
                          evidence="not verified")
    if cause.kind == "overflow" and not finding.inputs:
        return Suggestion("make these numbers in float32", evidence=f"beyond {origin.dtype}")
    evidence = {"overflow": f"beyond {origin.dtype}", "rounded": "another value in float64"}.get(
        cause.kind, "float64 has no finite value for these inputs either")
    if cause.kind == "from inf" and finding.made is not None and "softmax" not in origin.op:
        return Suggestion("write torch.finfo(dtype).min in place of -inf", evidence=evidence)
    return Suggestion(what, evidence=evidence)


def changes_for_precision(report: PrecisionReport, region: Region, model: Module) -> Iterator[Change]:
    """What may bring a step nearer to its reference."""
    one = report.error_origin()
    if one is not None and not report.underflows and not report.lost_updates:
        device = next((p.device.type for p in model.parameters()), "cpu")
        yield from _changes(one.module, line_of(one), device, region, model)


def advice_on_precision(report: PrecisionReport) -> Suggestion:
    """What helps where no change was tried, or none helped."""
    one = report.error_origin()
    if report.underflows:
        return Suggestion("scale the loss: scaler = ampkit.GradScaler()", evidence="float16 ends at 6e-08")
    if report.lost_updates:
        lost = report.lost_updates[0]
        what = f"keep what {lost.file}:{lost.line} updates in float32, and cast a copy of it to {lost.dtype}"
        masters = "keep float32 masters: ampkit.FP16Optimizer(optimizer), or the model in float32 and a region"
        return Suggestion(masters if lost.by_optimizer else what,
                          evidence="the update is less than half a unit in the last place")
    if one is not None and one.op == "aten::add_.Tensor" and one.phase == "backward" and not one.backward_of:
        return Suggestion("accumulate gradients in float32, beside the parameters", evidence="not verified")
    return Suggestion("keep more of the model in float32", evidence="not verified")

