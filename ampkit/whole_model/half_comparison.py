"""A half model and its float32 twin on one sample, module by module, and with some modules computed in float32."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from ampkit.containers import REAL_FLOATS, cast_tree, map_tensors
from ampkit.region.autocast import autocast
from ampkit.whole_model._boundary import device_type_of
from ampkit.whole_model.half_report import ModuleError


@dataclass
class Found:
    """One run: errors by path in the order in which modules returned; which modules each one called, "" the model."""

    modules: dict[str, ModuleError]
    output: ModuleError
    called_by: dict[str, list[str]]

    def share(self, path: str) -> float:
        """Of the modules that compute something themselves, how many are this one and those inside."""
        working = [one.path for one in (*self.modules.values(), self.output) if one.own_error != 0.0]
        inside = [one for one in working if one == path or one.startswith(f"{path}.")]
        return len(inside) / len(working) if working else 1.0

    def parts(self, path: str) -> Iterator[str]:
        """The modules that it called; of one that is more than half of the model also those that this one called."""
        for part in self.called_by.get(path, ()):
            yield part
            if self.share(part) > 0.5:
                yield from self.parts(part)


class Comparison:
    """The two models and the sample; the float32 outputs are kept."""

    def __init__(
        self, plain: Module, halved: Module, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.plain, self.halved, self.dtype = plain, halved, dtype
        self._sample = args, kwargs
        self._wanted: dict[str, list[Any]] = {}
        with _hooks(plain, after=self._keep):
            self._expected = self._run(plain)

    def found(self, keep: Sequence[str] = ()) -> Found:
        """Compare every module, the modules `keep` computed in float32."""
        comparer = _Comparer(self.plain, self.dtype, self._wanted)
        with _substituted(self._in_float32(keep)), _hooks(self.halved, comparer.before, comparer.after):
            output = self._run(self.halved)
        whole = comparer.errors.pop("", None) or ModuleError("", type(self.plain).__name__)
        compare(whole, output, self._expected)
        return Found(comparer.errors, whole, comparer.called_by)

    def error(self, keep: Sequence[str]) -> float:
        """The output's error alone."""
        with _substituted(self._in_float32(keep)):
            return compare(ModuleError("", ""), self._run(self.halved), self._expected).error

    def _run(self, model: Module) -> Any:
        args, kwargs = copy.deepcopy(self._sample)      # forward may write to it
        with torch.no_grad():
            return model(*args, **kwargs)

    def _keep(self, path: str, module: Module, args: Any, kwargs: Any, output: Any) -> None:
        self._wanted.setdefault(path, []).append(map_tensors(output, Tensor.clone))

    def _in_float32(self, keep: Sequence[str]) -> Mapping[Module, Callable[..., Any]]:
        """For modules of the half model the forwards of their twins, between casts, as `half` has it."""

        def forward(path: str) -> Callable[..., Any]:
            twin = self.plain.get_submodule(path)
            return lambda *args, **kwargs: cast_tree(
                twin.forward(*cast_tree(args, torch.float32), **cast_tree(kwargs, torch.float32)), self.dtype
            )

        return {self.halved.get_submodule(path): forward(path) for path in keep}


class _Comparer:
    """Compares every module's outputs with those of its float32 twin as they come."""

    def __init__(self, plain: Module, dtype: torch.dtype, wanted: dict[str, list[Any]]) -> None:
        self.plain, self.dtype = plain, dtype
        self.wanted = wanted
        self.errors: dict[str, ModuleError] = {}
        self.called_by: dict[str, list[str]] = {}
        self._calls: dict[str, int] = {}
        self._open: list[tuple[str, Any, dict[str, list[_Call]]]] = []  # path, inputs, the calls of other modules

    def before(self, path: str, module: Module, args: Any, kwargs: Any) -> None:
        """Keep the inputs, which forward may write to."""
        inputs = _copied((args, kwargs))
        self._open.append((path, inputs if path else cast_tree(inputs, self.dtype), {}))    # as `half` casts them

    def after(self, path: str, module: Module, args: Any, kwargs: Any, output: Any) -> None:
        """Compare the outputs with the twin's in its own run, and with the twin's on these inputs."""
        _, inputs, calls = self._open.pop()
        if self._open:
            caller, _, beside = self._open[-1]
            beside.setdefault(path, []).append(_Call(inputs, map_tensors(output, Tensor.clone)))
            called = self.called_by.setdefault(caller, [])
            if path not in called:
                called.append(path)
        call = self._calls.get(path, 0)
        self._calls[path] = call + 1
        twin = self.plain.get_submodule(path)
        error = self.errors.setdefault(path, ModuleError(path, type(twin).__name__))
        if path:
            wanted = self.wanted.get(path, [])
            if call >= len(wanted):
                return      # the half run took another turn than the float32 one
            compare(error, output, wanted[call])
        own = self._own(twin, inputs, calls, output)
        if own is not None:
            error.own_error = _worse(error.own_error or 0.0, own.error)
            error.own_overflows = max(error.own_overflows, own.overflows)

    def _own(self, twin: Module, inputs: Any, calls: dict[str, list[_Call]], output: Any) -> ModuleError | None:
        """The error of the module's own operators: in what it returned, and in what it called other modules with.

        The twin gets the inputs that the half module had, and from other modules what those returned to that.
        """
        error = ModuleError("", "")
        args, kwargs = cast_tree(inputs, torch.float32)
        replayed = {self.plain.get_submodule(path): _replay(error, of_path) for path, of_path in calls.items()}
        try:
            with _substituted(replayed), autocast(device_type_of(twin), enabled=False):
                return compare(error, output, twin.forward(*args, **kwargs))
        except Exception:       # whatever a forward asks of its surroundings that is not there a second time
            return None


class _Call(NamedTuple):
    """One call of a module: positional and keyword inputs, and what it returned."""

    inputs: Any
    output: Any


def _replay(error: ModuleError, calls: list[_Call]) -> Callable[..., Any]:
    """A forward that returns what these calls did, and notes in `error` how their inputs differ from its own."""
    left = iter(calls)

    def forward(*args: Any, **kwargs: Any) -> Any:
        call = next(left)
        compare(error, call.inputs, (args, kwargs))
        return cast_tree(call.output, torch.float32)

    return forward


def _copied(inputs: Any) -> Any:
    """Inputs that stay as they are; what cannot be copied is taken as it is."""
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
            handles.append(module.register_forward_pre_hook(_bound(before, path), with_kwargs=True))
        if after is not None:
            handles.append(module.register_forward_hook(_bound(after, path), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _bound(function: Callable[..., None], path: str) -> Callable[..., None]:
    return lambda *args: function(path, *args)


def compare(error: ModuleError, output: Any, wanted: Any) -> ModuleError:
    """Note the worst of several calls in `error`. Where float32 is not finite itself, nothing is compared."""
    pairs = [
        (a.double(), b.double())
        for a, b in zip(_floats(output), _floats(wanted), strict=False)
        if a.shape == b.shape and b.numel()
    ]
    if not pairs:
        return error
    a, b = (torch.cat([pair[i].reshape(-1) for pair in pairs]) for i in (0, 1))
    good = torch.isfinite(b)
    broken = good & ~torch.isfinite(a)
    nonzero = good & ~broken & (b != 0)
    distance, size = (a - b)[good].norm(), b[good].norm()
    error.error = _worse(error.error, float(distance / size) if size > 0 else float(distance))
    error.overflows = max(error.overflows, int(broken.sum()))
    lost = float((a[nonzero] == 0).double().mean()) if bool(nonzero.any()) else 0.0
    error.underflow = max(error.underflow, lost)
    error.largest = max(error.largest, float(b[good].abs().max()) if bool(good.any()) else 0.0)
    return error


def _worse(a: float, b: float) -> float:
    return b if math.isnan(b) or b > a else a


def _floats(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(value, lambda tensor: found.append(tensor) or tensor)
    return [tensor for tensor in found if tensor.dtype in REAL_FLOATS]
