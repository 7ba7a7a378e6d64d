"""check_half: what converting a model to half precision does to its numbers, module by module.

A float32 copy runs on a sample. Each module's operators are run again in half on the inputs that they had; which
modules are worth keeping in float32 is found by trying.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from ampkit.containers import REAL_FLOATS, cast_tree, map_tensors
from ampkit.region.autocast import autocast
from ampkit.whole_model.boundary import device_type_of
from ampkit.whole_model.half import BATCH_NORMS, HalfPlan, Keep, half, kept_keys

__all__ = ["HalfError", "HalfReport", "check_half"]

_HELPS = 2 / 3      # of two modules that round alike, either one leaves 0.71 of the error


@dataclass
class HalfError:
    """The error of one module's own operators in half precision; the modules that it calls compute in float32.

    `error` is the relative L2 error of its outputs, inf or NaN where they are and float32's are not; None inside of a
    module that is kept, and where its forward could not be run a second time. `overflows` counts output elements that
    are inf or NaN where float32's are finite, `largest` is the largest finite float32 magnitude.
    """

    path: str
    kind: str
    error: float | None = None
    overflows: int = 0
    largest: float = 0.0

    def note(self, output: Any, expected: Any) -> HalfError:
        """Keep the worst of several calls; returns itself. Where float32 is not finite, nothing is compared."""
        pairs = [
            (a.double().reshape(-1), b.double().reshape(-1))
            for a, b in zip(_floats(output), _floats(expected), strict=False)
            if a.shape == b.shape and b.numel()
        ]
        if not pairs:
            return self
        got, wanted = torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs])
        good = torch.isfinite(wanted)
        broken = good & ~torch.isfinite(got)
        distance, size = (got - wanted)[good].norm(), wanted[good].norm()
        error = float(distance / size) if size > 0 else float(distance)
        if self.error is None or math.isnan(error) or error > self.error:
            self.error = error
        self.overflows = max(self.overflows, int(broken.sum()))
        return self

    def row(self, width: int) -> str:
        """A line of the report's table."""
        error = "" if self.error is None else f"{self.error:.2e}"
        return f"{self.path or '(the model)':<{width}}  {error:>9}  {self.largest:>9.3g}  {self.overflows:>9}"


@dataclass
class HalfReport:
    """What `check_half` found. `str()` is a table in the order in which modules returned.

    `output` compares the outputs of the whole model in half with float32's. `modules` ends with the model's own
    operators, under the path "". `unfit` names parameters whose values the dtype cannot hold: their modules were kept
    in float32 for this run. `too_large` names modules whose outputs it cannot carry. `keep` is what to add to
    `keep_fp32`: modules around those, the owners of `unfit`, and what cut the output's error by a third when it was
    tried; `kept_error` is the error that is left, None with nothing kept. For what is `too_large` with nothing around
    it, use bfloat16.
    """

    dtype: torch.dtype
    modules: list[HalfError]
    output: HalfError
    unfit: list[str] = field(default_factory=list)
    too_large: list[str] = field(default_factory=list)
    keep: list[str] = field(default_factory=list)
    kept_error: float | None = None

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        width = max(len(row.path or "(the model)") for row in self.modules)
        lines = [f"{name}: output error {self.output.error:.2e}, {self.output.overflows} overflows"]
        lines.append(f"{'module':<{width}}  {'own error':>9}  {'largest':>9}  overflows")
        lines += [row.row(width) for row in self.modules]
        if self.unfit:
            lines.append(f"parameters that {name} cannot hold: {', '.join(self.unfit)}")
        if self.too_large:
            lines.append(f"outputs that {name} cannot carry: {', '.join(self.too_large)}")
        then = "" if self.kept_error is None else f" (output error {self.output.error:.2e} -> {self.kept_error:.2e})"
        lines.append(f"worth keeping in float32: {', '.join(self.keep) or 'nothing'}{then}")
        return "\n".join(lines)


def check_half(
    model: Module,
    sample: Any,
    dtype: torch.dtype = torch.float16,
    keep_fp32: Keep | str = BATCH_NORMS,
    *,
    in_region: bool = False,
    trials: int = 100,
) -> HalfReport:
    """Run copies of a float32 model in float32 and in half on a sample, in eval mode, and compare every module.

    Args:
        model: stays as it is.
        sample: what to call it with: a tuple of positional arguments, a mapping of keyword arguments, or one argument.
        dtype, keep_fp32, in_region: as of `half`.
        trials: how many modules are tried in float32 at most, a forward each, to find what is worth keeping; 0: none.

    Returns:
        A `HalfReport`; print it, or call `half` with its `keep` added to `keep_fp32`.

    Raises:
        What `half` raises, apart from parameters that do not fit: they are reported. ValueError: negative `trials`.

    Reads the device. Runs each module twice more for itself and for each module that it is part of.

    >>> report = check_half(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.ones(1, 4))
    >>> report.output.overflows, report.keep
    (0, [])
    """
    if trials < 0:
        raise ValueError(f"trials is {trials}; expected how many forwards may be run to find what to keep, or 0")
    keep = kept_keys(keep_fp32)
    plan = HalfPlan(model, dtype, keep)
    unfit = list(plan.unfit)
    owners = list(dict.fromkeys(path for name in unfit if (path := name.rpartition(".")[0])))
    low = half(model, dtype, (*keep, *map(model.get_submodule, owners)), in_region=in_region).eval()
    inside = {path for module, path in plan.kept.items() if module not in plan.outermost}
    comparison = _Comparison(copy.deepcopy(model).eval(), low, dtype, sample, in_region, inside)
    rows, limit = comparison.rows, torch.finfo(dtype).max
    report = HalfReport(dtype, list(rows.values()), comparison.output(), unfit)
    overflowing = [path for path, row in rows.items() if row.overflows]
    report.too_large = [path for path in overflowing if rows[path].largest > limit]
    more = list(dict.fromkeys(path for inner in overflowing if (path := _enclosing(inner, rows, limit))))
    error = _keep_what_helps(comparison, more, trials)
    report.keep = list(dict.fromkeys([*more, *owners]))
    report.kept_error = error if more else None
    return report


def _enclosing(path: str, rows: Mapping[str, HalfError], limit: float) -> str:
    """The nearest module from here up that is called and returns what fits; "" where there is none.

    A module returns 16 bits even when it is kept, so what is too large for that has to stay inside of a kept one.
    """
    while path and (path not in rows or rows[path].largest > limit):
        path = path.rpartition(".")[0]
    return path


def _keep_what_helps(comparison: _Comparison, keep: list[str], trials: int) -> float:
    """Add to `keep` the modules that cut the output's error by a third or more; returns the error that is left.

    They are tried one by one in the order of their own errors, each beside those that are kept already.
    """
    error = _number(comparison.output(keep))
    candidates = [row for path, row in comparison.rows.items() if path and row.error and path not in keep]
    candidates.sort(key=_number, reverse=True)
    for row in candidates[:trials]:
        if error <= torch.finfo(comparison.dtype).eps:
            break
        left = _number(comparison.output((*keep, row.path)))
        if left < _HELPS * error:
            keep.append(row.path)
            error = left
    return error


class _Comparison:
    """A float32 model, its 16-bit copy and a sample. `rows` by path, in the order in which modules returned.

    Modules `inside` of those that are kept compute in float32 on float32 inputs: they have no error.
    """

    def __init__(
        self, reference: Module, low: Module, dtype: torch.dtype, sample: Any, in_region: bool, inside: set[str]
    ) -> None:
        self.reference, self.low, self.dtype, self.in_region, self.inside = reference, low, dtype, in_region, inside
        self.rows: dict[str, HalfError] = {}
        self._args, self._kwargs = (), {}
        if isinstance(sample, Mapping):
            self._kwargs = dict(sample)
        else:
            self._args = tuple(sample) if isinstance(sample, tuple | list) else (sample,)
        self._open: list[_Open] = []
        self._repeating = False
        with contextlib.ExitStack() as hooks:
            for path, module in reference.named_modules():
                for handle in (
                    module.register_forward_pre_hook(self._before(path), with_kwargs=True, prepend=True),
                    module.register_forward_hook(self._after, with_kwargs=True),
                ):
                    hooks.callback(handle.remove)
            self._expected = self._call(reference)

    def output(self, keep: Sequence[str] = ()) -> HalfError:
        """The outputs of the 16-bit model with the modules `keep` in float32."""
        with _substituted({self.low.get_submodule(path): self._rounded(path) for path in keep}):
            return HalfError("", type(self.reference).__name__).note(self._call(self.low), self._expected)

    def _call(self, model: Module) -> Any:
        args, kwargs = copy.deepcopy((self._args, self._kwargs))      # forward may write to it
        with torch.no_grad():
            return model(*args, **kwargs)

    def _before(self, path: str) -> Callable[..., None]:
        def opened(module: Module, args: Any, kwargs: Any) -> None:
            if not self._repeating:
                self._open.append(_Open(path, _copied((args, kwargs)), []))

        return opened

    def _after(self, module: Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._repeating:
            return
        opened = self._open.pop()
        if self._open:
            self._open[-1].called.append(opened.path)
        row = self.rows.setdefault(opened.path, HalfError(opened.path, type(module).__name__))
        row.largest = max(row.largest, _largest(output))
        if opened.path in self.inside:
            return
        self._repeating = True
        try:
            row.note(*self._repeated(opened))
        except Exception:       # whatever a forward asks of its surroundings that is not there a second time
            pass
        finally:
            self._repeating = False

    def _repeated(self, opened: _Open) -> tuple[Any, Any]:
        """What a module returns in 16 bits and in float32 for the same rounded inputs, around the same rounded calls.

        The modules that it calls compute in float32 both times, and what they return is rounded: what is left is what
        its own operators do.
        """
        low, reference = self.low.get_submodule(opened.path), self.reference.get_submodule(opened.path)
        inputs = cast_tree(opened.inputs, self.dtype)
        args, kwargs = _copied(inputs)      # forward may write to it
        with _substituted({self.low.get_submodule(path): self._rounded(path) for path in opened.called}):
            with self._region() if opened.path else contextlib.nullcontext():
                got = low(*args, **kwargs)
        args, kwargs = cast_tree(inputs, torch.float32)
        rounded = {self.reference.get_submodule(path): self._rounded(path, torch.float32) for path in opened.called}
        with _substituted(rounded):
            return got, reference(*args, **kwargs)

    def _region(self) -> autocast:
        return autocast(device_type_of(self.reference), self.dtype, enabled=self.in_region)

    def _rounded(self, path: str, then: torch.dtype | None = None) -> Callable[..., Any]:
        """A forward that computes a module in float32 and rounds what it returns, as `half` has it for kept ones."""
        forward = self.reference.get_submodule(path).forward

        def rounded(*args: Any, **kwargs: Any) -> Any:
            with autocast(device_type_of(self.reference), enabled=False):
                output = forward(*cast_tree(args, torch.float32), **cast_tree(kwargs, torch.float32))
            return cast_tree(cast_tree(output, self.dtype), then or self.dtype)

        return rounded


class _Open(NamedTuple):
    """A module that is running: its inputs, and the paths of the modules that it called."""

    path: str
    inputs: Any
    called: list[str]


def _copied(inputs: Any) -> Any:
    """A copy of a call's inputs, of tensors alone where others cannot be copied."""
    try:
        return copy.deepcopy(inputs)
    except Exception:
        return map_tensors(inputs, Tensor.clone)


@contextlib.contextmanager
def _substituted(forwards: Mapping[Module, Callable[..., Any]]) -> Iterator[None]:
    """Give modules other forwards."""
    before = {module: vars(module).get("forward") for module in forwards}
    for module, forward in forwards.items():
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for module, forward in before.items():
            if forward is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = forward


def _number(row: HalfError) -> float:
    """An error to sort by: inf for NaN."""
    return math.inf if row.error is None or math.isnan(row.error) else row.error


def _largest(output: Any) -> float:
    """The largest finite magnitude."""
    return max((float(t[t.isfinite()].abs().max()) for t in _floats(output) if t.isfinite().any()), default=0.0)


def _floats(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(value, lambda tensor: found.append(tensor) or tensor)
    return [tensor for tensor in found if tensor.dtype in REAL_FLOATS]
