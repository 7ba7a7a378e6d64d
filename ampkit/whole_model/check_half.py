"""check_half: what converting a model to half precision does to its numbers, module by module.

A float32 copy and a 16-bit copy run on the same sample; which modules are worth keeping in float32 is found by trying.
"""

from __future__ import annotations

import contextlib
import copy
import functools
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
    """The error of one module in half precision.

    `error` is the relative L2 error of its outputs, inf or NaN where they are and float32's are not. `own_error` is the
    part that the module itself adds: its float32 reference gets the inputs that it had, and the outputs of the modules
    that it called, so that only its own operators differ. None where its forward could not be run a second time.
    `overflows` counts output elements that are inf or NaN where float32's are finite, `own_overflows` those of them
    that the module has made itself. `underflow` is the share of nonzero outputs that became 0, `largest` the largest
    finite float32 magnitude.
    """

    path: str
    kind: str
    error: float = 0.0
    own_error: float | None = None
    overflows: int = 0
    own_overflows: int = 0
    underflow: float = 0.0
    largest: float = 0.0

    def note(self, output: Any, expected: Any) -> float:
        """Keep the worst of several calls; returns `error`. Where float32 is not finite itself, nothing is compared."""
        pairs = [
            (a.double().reshape(-1), b.double().reshape(-1))
            for a, b in zip(_floats(output), _floats(expected), strict=False)
            if a.shape == b.shape and b.numel()
        ]
        if not pairs:
            return self.error
        got, wanted = torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs])
        good = torch.isfinite(wanted)
        broken = good & ~torch.isfinite(got)
        nonzero = good & ~broken & (wanted != 0)
        distance, size = (got - wanted)[good].norm(), wanted[good].norm()
        self.error = _worse(self.error, float(distance / size) if size > 0 else float(distance))
        self.overflows = max(self.overflows, int(broken.sum()))
        if nonzero.any():
            self.underflow = max(self.underflow, float((got[nonzero] == 0).double().mean()))
        if good.any():
            self.largest = max(self.largest, float(wanted[good].abs().max()))
        return self.error

    def row(self, width: int) -> str:
        """A line of the report's table."""
        own = "" if self.own_error is None else f"{self.own_error:.2e}"
        numbers = f"{own:>9}  {self.error:>9.2e}  {self.largest:>9.3g}  {self.overflows:>9}  {self.underflow:>9.1%}"
        return f"{self.path or '(output)':<{width}}  {numbers}"


@dataclass
class HalfReport:
    """What `check_half` found. `str()` is a table in the order in which modules returned.

    `output` is the whole model, whose own error is that of operators outside all modules. `unfit` names parameters
    whose values the dtype cannot hold: their modules were kept in float32 for this run. `too_large` names modules whose
    outputs it cannot carry. `keep` is what to add to `keep_fp32`: modules around those, the owners of `unfit`, and what
    cut the output's error by a third when it was tried; `kept_error` is the error that is left, None with nothing kept.
    For what is `too_large` with nothing around it, use bfloat16.
    """

    dtype: torch.dtype
    modules: list[HalfError]
    output: HalfError
    unfit: list[str] = field(default_factory=list)
    too_large: list[str] = field(default_factory=list)
    keep: list[str] = field(default_factory=list)
    kept_error: float | None = None

    @property
    def overflows(self) -> bool:
        """Whether any output of the model is inf or NaN where float32's is finite."""
        return self.output.overflows > 0

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        rows = [*self.modules, self.output]
        width = max(len(row.path or "(output)") for row in rows)
        lines = [f"{name}: output error {self.output.error:.2e}, {self.output.overflows} overflows"]
        origin = next((row.path or "(output)" for row in rows if row.own_overflows), None)
        if origin is not None:
            lines.append(f"inf or NaN begins in {origin}")
        lines.append(f"{'module':<{width}}  {'own error':>9}  {'error':>9}  {'largest':>9}  overflows  underflow")
        lines += [row.row(width) for row in rows]
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

    Reads the device, and holds the outputs of every module in float32.

    >>> report = check_half(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.ones(1, 4))
    >>> report.overflows, report.keep
    (False, [])
    """
    if trials < 0:
        raise ValueError(f"trials is {trials}; expected how many forwards may be run to find what to keep, or 0")
    keep = kept_keys(keep_fp32)
    unfit = list(HalfPlan(model, dtype, keep).unfit)
    owners = list(dict.fromkeys(path for name in unfit if (path := name.rpartition(".")[0])))
    low = half(model, dtype, (*keep, *map(model.get_submodule, owners)), in_region=in_region).eval()
    comparison = _Comparison(copy.deepcopy(model).eval(), low, dtype, sample)
    first = comparison.run()
    limit = torch.finfo(dtype).max
    too_large = [path for path, module in first.errors.items() if module.own_overflows and module.largest > limit]
    report = HalfReport(dtype, list(first.errors.values()), first.output, unfit, too_large)
    more, run = _kept_for_range(comparison, first, limit)
    error = _keep_what_helps(comparison, run, more, trials)
    report.keep = list(dict.fromkeys([*more, *owners]))
    report.kept_error = error if more else None
    return report


def _kept_for_range(comparison: _Comparison, run: _Run, limit: float) -> tuple[list[str], _Run]:
    """What to keep so that no inf or NaN is made, with the run that keeps it.

    A module returns `dtype` even when kept, so for an output too large for that it is the nearest enclosing module
    whose own output is not. A later module's overflow shows once the earlier one is kept.
    """
    keep: list[str] = []
    while True:
        more = []
        for path in [path for path, module in run.errors.items() if module.own_overflows]:
            # up to a module that is called and returns what fits
            while path and (path not in run.errors or run.errors[path].largest > limit):
                path = path.rpartition(".")[0]
            if path and path not in keep:
                more.append(path)
        if not more:
            return keep, run
        keep += dict.fromkeys(more)
        run = comparison.run(keep)


def _keep_what_helps(comparison: _Comparison, run: _Run, keep: list[str], trials: int) -> float:
    """Add to `keep` the modules that cut the output's error by a third or more; returns the error that is left.

    They are tried one by one in the order of their own errors, each beside those that are kept already.
    """
    error = math.inf if math.isnan(run.output.error) else run.output.error
    candidates = [path for path, module in run.errors.items() if module.own_error and path not in keep]
    candidates.sort(key=lambda path: run.errors[path].own_error or 0.0, reverse=True)
    for path in candidates[:trials]:
        if error <= torch.finfo(comparison.dtype).eps:
            break
        left = comparison.error((*keep, path))
        if left < _HELPS * error:
            keep.append(path)
            error = left
    return error


class _Comparison:
    """A float32 model, its 16-bit copy and a sample; holds what every float32 module returned."""

    def __init__(self, reference: Module, low: Module, dtype: torch.dtype, sample: Any) -> None:
        self.reference, self.low, self.dtype = reference, low, dtype
        self._args, self._kwargs = (), {}
        if isinstance(sample, Mapping):
            self._kwargs = dict(sample)
        else:
            self._args = tuple(sample) if isinstance(sample, tuple | list) else (sample,)
        self.outputs: dict[str, list[Any]] = {}
        with _hooks(reference, after=self._hold):
            self._expected = self._call(reference)

    def run(self, keep: Sequence[str] = ()) -> _Run:
        """Compare every module, with the modules `keep` computed in float32."""
        run = _Run(self.reference, self.dtype, self.outputs)
        with _substituted(self._in_float32(keep)), _hooks(self.low, run.before, run.after):
            run.output.note(self._call(self.low), self._expected)
        return run

    def error(self, keep: Sequence[str]) -> float:
        """The output's error alone; inf for NaN."""
        with _substituted(self._in_float32(keep)):
            error = HalfError("", "").note(self._call(self.low), self._expected)
        return math.inf if math.isnan(error) else error

    def _call(self, model: Module) -> Any:
        args, kwargs = copy.deepcopy((self._args, self._kwargs))      # forward may write to it
        with torch.no_grad():
            return model(*args, **kwargs)

    def _hold(self, path: str, module: Module, args: Any, kwargs: Any, output: Any) -> None:
        self.outputs.setdefault(path, []).append(map_tensors(output, Tensor.clone))

    def _in_float32(self, keep: Sequence[str]) -> dict[Module, Callable[..., Any]]:
        """For modules of the 16-bit model the forwards of their references, between casts, as `half` has it."""
        return {
            self.low.get_submodule(path): functools.partial(
                _between_casts, self.reference.get_submodule(path), self.dtype
            )
            for path in keep
        }


class _Run:
    """One run of the 16-bit model, each module compared with its float32 reference as it returns.

    `errors` by path, in the order in which modules returned; `output` the model.
    """

    def __init__(self, reference: Module, dtype: torch.dtype, outputs: dict[str, list[Any]]) -> None:
        self.errors: dict[str, HalfError] = {}
        self.output = HalfError("", type(reference).__name__)
        self._reference, self._dtype, self._outputs = reference, dtype, outputs
        self._calls: dict[str, int] = {}
        self._open: list[_Open] = []

    def before(self, path: str, module: Module, args: Any, kwargs: Any) -> None:
        """Forward pre-hook: keep the inputs, which forward may write to."""
        inputs = _copied((args, kwargs))
        self._open.append(_Open(inputs if path else cast_tree(inputs, self._dtype), {}))    # as `half` casts them

    def after(self, path: str, module: Module, args: Any, kwargs: Any, output: Any) -> None:
        """Forward hook: compare with what the reference returned in its run, and makes of these inputs."""
        opened = self._open.pop()
        if self._open:
            self._open[-1].calls.setdefault(path, []).append((opened.inputs, map_tensors(output, Tensor.clone)))
        reference = self._reference.get_submodule(path)
        error = self.errors.setdefault(path, HalfError(path, type(reference).__name__)) if path else self.output
        if path:
            call = self._calls[path] = self._calls.get(path, 0) + 1
            expected = self._outputs.get(path, [])
            if call > len(expected):
                return      # the 16-bit run took another branch than the float32 one
            error.note(output, expected[call - 1])
        own = self._own_error(reference, opened, output)
        if own is not None:
            error.own_error = _worse(error.own_error or 0.0, own.error)
            error.own_overflows = max(error.own_overflows, own.overflows)

    def _own_error(self, reference: Module, opened: _Open, output: Any) -> HalfError | None:
        """The error of the module's own operators: in what it returned, and in what it called other modules with.

        The reference gets the inputs that the 16-bit module had, and from other modules what those returned to that.
        """
        error = HalfError("", "")
        args, kwargs = cast_tree(opened.inputs, torch.float32)
        replayed = {
            self._reference.get_submodule(path): functools.partial(_replay, error, iter(calls))
            for path, calls in opened.calls.items()
        }
        try:
            with _substituted(replayed), autocast(device_type_of(reference), enabled=False):
                error.note(output, reference.forward(*args, **kwargs))
        except Exception:       # whatever a forward asks of its surroundings that is not there a second time
            return None
        return error


class _Open(NamedTuple):
    """A module that is running: its inputs, and by path of the modules that it called their inputs and outputs."""

    inputs: Any
    calls: dict[str, list[tuple[Any, Any]]]


def _between_casts(reference: Module, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    """The float32 module's output for inputs of any dtype, in `dtype`."""
    return cast_tree(reference.forward(*cast_tree(args, torch.float32), **cast_tree(kwargs, torch.float32)), dtype)


def _replay(error: HalfError, calls: Iterator[tuple[Any, Any]], *args: Any, **kwargs: Any) -> Any:
    """A forward that returns what the next of these calls did, and notes in `error` how its inputs differ."""
    inputs, output = next(calls)
    error.note(inputs, (args, kwargs))
    return cast_tree(output, torch.float32)


def _copied(inputs: Any) -> Any:
    """A copy of a call's inputs, of tensors alone where others cannot be copied."""
    try:
        return copy.deepcopy(inputs)
    except Exception:
        return map_tensors(inputs, Tensor.clone)


@contextlib.contextmanager
def _substituted(forwards: Mapping[Module, Callable[..., Any]]) -> Iterator[None]:
    """Give modules other forwards."""
    for module, forward in forwards.items():
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module in forwards:
            module.__dict__.pop("forward", None)


@contextlib.contextmanager
def _hooks(
    model: Module, before: Callable[..., None] | None = None, after: Callable[..., None] | None = None
) -> Iterator[None]:
    """Call these with the path of every module and what its forward hooks get."""
    handles: list[Any] = []
    for path, module in model.named_modules():
        if before is not None:
            handles.append(module.register_forward_pre_hook(functools.partial(before, path), with_kwargs=True))
        if after is not None:
            handles.append(module.register_forward_hook(functools.partial(after, path), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _worse(a: float, b: float) -> float:
    return b if math.isnan(b) or b > a else a


def _floats(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(value, lambda tensor: found.append(tensor) or tensor)
    return [tensor for tensor in found if tensor.dtype in REAL_FLOATS]
