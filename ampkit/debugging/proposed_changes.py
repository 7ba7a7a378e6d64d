"""Changes that may cure a step, and advice where none does.

A change has the code that a user writes for it, and a context that runs a step as if that code were there. The second
half of the file selects the changes for a cause, and the advice for the user's own code.
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
from ampkit.debugging.call_sites import ModuleCalls, find_caller
from ampkit.debugging.causes import advice_for
from ampkit.debugging.operator_facts import tensors_in
from ampkit.debugging.regions import code_of, inherits, policy_of, replaced_regions, wider
from ampkit.debugging.report import Finding, Operation, PrecisionReport, Suggestion
from ampkit.dtypes import SIXTEEN_BIT
from ampkit.policy.module_paths import named_paths
from ampkit.policy.policy import Policy
from ampkit.region.arguments import RegionSpec
from ampkit.region.autocast import autocast

Region = Literal["ampkit", "torch", "none"]  # the kind of region that the user's step runs in
_NOT_CAST = frozenset(
    {  # functions whose arguments `LineChange` does not cast
        "batch_norm",
        "backward",
        "__get__",
        "__set__",
        "__delete__",
        "__setitem__",
        "__iadd__",
        "__isub__",
        "__imul__",
        "__itruediv__",
    }
)


@dataclass(frozen=True)
class PolicyChange:
    """Modules that compute more precisely by a policy: in float32, or without its FP8 rules."""

    device: str
    model: Module
    modules: tuple[str, ...] = ()
    policy: Policy | None = None  # that the step's regions were given
    float8: bool = False  # the modules compute in FP8

    @property
    def code(self) -> str:
        """The code that a user writes."""
        return code_of(self.policy, self.device, self.modules, wider(self._default(), float8=self.float8))

    def around(self) -> AbstractContextManager[Any]:
        """A context in which the step runs as if the code were there."""

        def changed(spec: RegionSpec) -> RegionSpec:
            if spec.device_type != self.device or inherits(spec):
                return spec
            return spec._replace(policy=self._changed(policy_of(spec)))

        return replaced_regions(changed)

    def is_possible(self) -> bool:
        """Whether the step's policy has no rule of its own for one of the modules."""
        try:
            self._changed(self._default())
        except ValueError:
            return False
        return True

    def _default(self) -> Policy:
        return self.policy or Policy.default(self.device)

    def _changed(self, policy: Policy) -> Policy:
        return policy.for_modules(self.model, dict.fromkeys(self.modules, wider(policy, float8=self.float8)))

    def extended(self, left: Finding) -> PolicyChange | None:
        """This change with the module of a finding that is left, or the module around it; None if there is none."""
        path = left.origin.module if left.origin.module in _paths(self.model) else ""
        while path in self.modules:
            path = path.rpartition(".")[0]
        extended = replace(self, modules=(*self.modules, path))
        return extended if path and extended.is_possible() else None


class LineChange(TorchFunctionMode):
    """Lines of the user's code that compute in float32, and do not cast to 16 bits; with a region or without."""

    def __init__(self, device: str, region: Region, lines: tuple[Lines, ...]) -> None:
        super().__init__()
        self.device = device
        self.region: Region = region
        self.lines = lines

    @property
    def code(self) -> str:
        """The code that a user writes."""
        where = " and ".join(map(str, self.lines))
        if self.region == "none":
            return f"compute {where} in float32: .float() on its tensors, and no cast to 16 bits there"
        name = "autocast" if self.region == "ampkit" else "torch.autocast"
        return f'with {name}("{self.device}", enabled=False): around {where}, with .float() on its tensors'

    def around(self) -> AbstractContextManager[Any]:
        """A context in which the step runs as if the code were there."""
        return self

    def extended(self, left: Finding) -> LineChange | None:
        """This change with a line of a finding that is left, or the line's function; None if there is none."""
        candidates: list[Lines] = []
        for operation in (left.made, left.origin):
            line = None if operation is None else line_of(operation)
            if line is not None:
                candidates.append(line)
        for line in reversed(list(candidates)):
            function = function_around(line)
            if function is not None:
                candidates.append(function)
        added = next((new for new in candidates if not any(old.covers(new) for old in self.lines)), None)
        if added is None:
            return None
        return LineChange(self.device, self.region, (*(old for old in self.lines if not added.covers(old)), added))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        file, line = find_caller(1).line()
        if not any(lines.covers(Lines(file, line, line)) for lines in self.lines):
            return self._call(func, args, kwargs)
        name = getattr(func, "__name__", "")
        if name in _NOT_CAST or (name.endswith("_") and not name.endswith("__")):
            return self._call(func, args, kwargs)  # an operator in place must not write to a copy
        if func in (Tensor.half, Tensor.bfloat16):
            func = Tensor.float
        args, kwargs = _widened(args), _widened(kwargs)
        region: AbstractContextManager[Any] = nullcontext()
        if torch.is_autocast_enabled(self.device):
            region = (autocast if self.region == "ampkit" else torch.autocast)(self.device, enabled=False)
        with region:
            return func(*args, **kwargs)

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function outside of the lines; if it refuses float32 beside 16 bits, again with float32 cast back."""
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            dtypes = {tensor.dtype for tensor in tensors_in((args, kwargs))}
            low = next((dtype for dtype in SIXTEEN_BIT if dtype in dtypes), None)
            if low is None or torch.float32 not in dtypes:
                raise

            def lowered(tensor: Tensor) -> Tensor:
                return tensor.to(low) if tensor.dtype is torch.float32 else tensor

            return func(*map_tensors(args, lowered), **map_tensors(kwargs, lowered))


def _widened(value: Any) -> Any:
    """Arguments with 16-bit tensors, and 16-bit dtypes, in float32."""

    def widened_dtype(leaf: Any) -> Any:
        return torch.float32 if isinstance(leaf, torch.dtype) and leaf in SIXTEEN_BIT else leaf

    return map_tensors(value, lambda tensor: tensor.float() if tensor.dtype in SIXTEEN_BIT else tensor, widened_dtype)


Change = PolicyChange | LineChange


def _paths(model: Module) -> set[str]:
    return {path for path, _ in named_paths(model) if path}


class Lines(NamedTuple):
    """Lines of a file, from `first` to `last` inclusive."""

    file: str
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.file}:{self.first}" + (f"-{self.last}" if self.last > self.first else "")

    def covers(self, other: Lines) -> bool:
        """Whether all of some lines are among these."""
        return self.file == other.file and self.first <= other.first and other.last <= self.last


def line_of(operation: Operation) -> Lines | None:
    """The line that calls an operation; None if it is not known."""
    return Lines(operation.file, operation.line, operation.line) if operation.line else None


def function_around(lines: Lines) -> Lines | None:
    """The body of the innermost function around some lines; None if there is none, or the file cannot be read."""
    try:
        tree = ast.parse(Path(lines.file).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return None
    bodies = [
        Lines(lines.file, node.body[0].lineno, node.end_lineno or node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return min((body for body in bodies if body.covers(lines)), key=lambda body: body.last - body.first, default=None)


# --- the changes and the advice for a cause


def suggestion(
    changes: Iterable[Change], advice: Suggestion, attempt: Callable[[Change], tuple[Change, bool, str]] | None = None
) -> Suggestion:
    """The first change that helps, or advice.

    `attempt` tries a change, which it may extend, and returns the change, whether it helps, and the evidence. Without
    `attempt` the first change is advice.
    """
    tried = []
    for change in changes:
        if attempt is None:
            return Suggestion(change.code, evidence="not tried: find_nonfinite(step, model) tries it")
        change, helps, evidence = attempt(change)
        if helps:
            return Suggestion(change.code, "change", True, f"verified: {evidence}", tuple(tried))
        tried.append(f"{change.code} ({evidence})")
    return replace(advice, tried=tuple(tried))


def changes_for(
    finding: Finding, region: Region, model: Module | None, policy: Policy | None = None
) -> Iterator[Change]:
    """Changes that may cure a finding, the likeliest first; none where float16 and bfloat16 did not cause it.

    `policy` is the one that the step's regions were given, if any.
    """
    origin, makers, cause = finding.origin, finding.makers, finding.cause
    if cause.kind in ("arrived", "received", "constant", "uninitialized") or origin.phase == "optimizer":
        return
    if cause.is_exact:
        return  # float64 has no finite value either
    texts = [maker.dtype for maker in makers] or [origin.dtype, *finding.inputs]
    if not any("float16" in text for text in texts):  # bfloat16 too
        return
    lines = [line for each in makers or (origin,) if (line := line_of(each)) is not None]
    path = makers[0].module if makers else origin.module
    yield from _changes(path, lines[0] if lines else None, finding.device, region, model, policy)
    if len(set(lines)) > 1:
        yield LineChange(finding.device, region, tuple(dict.fromkeys(lines)))


def _changes(
    path: str, line: Lines | None, device: str, region: Region, model: Module | None, policy: Policy | None = None
) -> Iterator[Change]:
    if region == "ampkit" and model is not None and path in _paths(model):
        change = PolicyChange(device, model, (path,), policy)
        if change.is_possible():
            yield change
    if line is not None:
        yield LineChange(device, region, (line,))


# By kind of cause: what helps, and the evidence.
_ADVICE = {
    "received": ("see the report of the rank that sent it", "what this rank sent is finite"),
    "constant": (
        "for a mask write a finite number, such as -1e4, or leave the element out of the sum; else do not "
        "write inf or NaN where nothing masks it out",
        "the code asks for it",
    ),
    "uninitialized": ("write to the memory before it is read", "no operator writes to it"),
    "unknown": ("look at its inputs", "the operator could not be run again to see why"),
}


def advice(finding: Finding) -> Suggestion:
    """The advice for a finding that no change cures."""
    origin, cause = finding.origin, finding.cause
    if cause.kind == "arrived":
        name = repr(finding.parameter) if finding.parameter else "the data"
        return Suggestion(f"look at what wrote {name} before this step", evidence="it is broken before it is used")
    if cause.kind == "constant" and "nan" in cause.text:
        code = (
            "do not write NaN where nothing masks it out; if it marks missing data, filter these rows before the model"
        )
        return Suggestion(code, evidence="the code asks for it")
    if cause.kind in _ADVICE:
        code, evidence = _ADVICE[cause.kind]
        return Suggestion(code, evidence=evidence)
    if cause.is_of_data:
        code = "look at these rows of the data: filter or normalize them, or keep them in float32 if they are right"
        return Suggestion(code, evidence="the value does not fit the dtype")
    if cause.kind == "overflow" and origin.op == "aten::_to_copy":
        return Suggestion(
            "keep it in float32, or clamp it before the cast: x.clamp(-m, m) with m = "
            f"torch.finfo(torch.{origin.dtype}).max",
            evidence="the value does not fit the dtype",
        )
    if origin.phase == "optimizer" and cause.kind in ("rounded", "overflow"):
        return Suggestion(
            "eps=1e-4 in the optimizer, or float32 masters: ampkit.FP16Optimizer(optimizer)", evidence="not verified"
        )
    why, general_advice = advice_for(origin.op, origin.backward_of)
    if (
        origin.phase == "backward"
        and cause.kind == "overflow"
        and cause.value
        and cause.limit
        and not (finding.scale or why)
    ):
        divisor = 2.0 ** math.ceil(math.log2(cause.value / cause.limit))
        return Suggestion(
            f"(loss / {divisor:g}).backward()    # makes gradients {divisor:g} times smaller", evidence="not verified"
        )
    if cause.kind == "rounded" and " is " in cause.text:
        return Suggestion(
            "write a number that the dtype can represent: in float16 at least 6e-8, and at most 1 - 5e-4",
            evidence="not verified",
        )
    if cause.kind == "overflow" and not finding.inputs:
        return Suggestion("make these numbers in float32", evidence=f"beyond {origin.dtype}")
    if cause.kind == "overflow" and cause.value is not None and not why:
        fits = cause.value <= torch.finfo(torch.float32).max and origin.dtype in ("float16", "bfloat16")
        code = "make its inputs smaller before this line: normalize, divide or clamp them"
        if fits:
            code = "keep the result in float32 until it is small again, or make the inputs of this line smaller"
        return Suggestion(code, evidence=f"beyond {origin.dtype}")
    evidence = {"overflow": f"beyond {origin.dtype}", "rounded": "another value in float64"}.get(
        cause.kind, "float64 has no finite value for these inputs either"
    )
    if cause.kind == "from inf" and finding.made is not None and "softmax" not in origin.op:
        if "has -inf" in cause.text:
            return Suggestion("write torch.finfo(dtype).min in place of -inf", evidence=evidence)
        made = f"{finding.made.file}:{finding.made.line}"
        return Suggestion(f"do not let inf into the input: check or filter what {made} writes", evidence=evidence)
    return Suggestion(general_advice, evidence=evidence)


def changes_for_precision(report: PrecisionReport, modules: ModuleCalls, model: Module) -> Iterator[Change]:
    """Changes that may reduce the error of a step: for a module that computes in FP8, its policy without FP8."""
    origin = report.error_origin()
    if origin is None or report.underflows or report.lost_updates:
        return
    device = next((p.device.type for p in model.parameters()), "cpu")
    float8 = any(call.dtype.startswith("float8") for call in report.operators if call.module == origin.module)
    change = PolicyChange(device, model, (origin.module,), modules.policy, float8=True)
    if float8 and origin.module in _paths(model) and change.is_possible():
        yield change
    yield from _changes(origin.module, line_of(origin), device, modules.region, model, modules.policy)


def advice_on_precision(report: PrecisionReport) -> Suggestion:
    """The advice for a step where no change was tried, or none helped."""
    if report.underflows:
        return Suggestion("scale the loss: scaler = ampkit.GradScaler()", evidence="float16's smallest number is 6e-08")
    if report.lost_updates:
        lost = report.lost_updates[0]
        code = f"keep the tensor that {lost.file}:{lost.line} updates in float32, and cast a copy of it to {lost.dtype}"
        if lost.by_optimizer:
            code = "keep float32 masters: ampkit.FP16Optimizer(optimizer), or the model in float32 and a region"
        return Suggestion(code, evidence="the update is less than half a unit in the last place")
    if report.accumulates:
        return Suggestion("accumulate gradients in float32, beside the parameters", evidence="not verified")
    return Suggestion("keep more of the model in float32", evidence="not verified")
