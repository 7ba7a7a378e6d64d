"""check_half: what converting a model to half precision does to its numbers, module by module.

A float32 copy and a half copy run on the same sample. Each module's error is split in two: what has come down
to its output in all, and what it has added itself, found by giving its float32 twin the very inputs that the
half one had. The second says which layer to keep in float32.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from ampkit.containers import REAL_FLOATS, cast_tree, map_tensors
from ampkit.whole_model.half import BATCH_NORMS, Keep, half

__all__ = ["HalfReport", "ModuleError", "check_half"]

_TOO_LARGE = 4.0        # own errors above so many units of the dtype's precision are more than rounding


@dataclass
class ModuleError:
    """One module in half precision beside its float32 twin.

    `error` is the relative L2 error of its outputs, `own_error` the part that the module itself adds (None for
    modules made of others), `overflows` how many output elements are inf or NaN where float32's are finite,
    `underflow` the share of nonzero outputs that became 0, `largest` the largest finite float32 magnitude.
    """

    path: str
    kind: str
    error: float = 0.0
    own_error: float | None = None
    overflows: int = 0
    underflow: float = 0.0
    largest: float = 0.0


@dataclass
class HalfReport:
    """What `check_half` found. `str()` is a table, the most harmful modules first.

    `modules` are in the order they ran; `output` is the whole model. `unfit` names parameters whose values the
    dtype cannot hold: their modules were kept in float32 for this run. `too_large` names modules whose outputs
    it cannot carry. `keep` is what to add to `keep_fp32`: modules around those, modules whose own error is far
    above rounding, and the owners of `unfit`. For what is `too_large` with nothing around it, use bfloat16.
    """

    dtype: torch.dtype
    modules: list[ModuleError]
    output: ModuleError
    unfit: list[str] = field(default_factory=list)
    too_large: list[str] = field(default_factory=list)
    keep: list[str] = field(default_factory=list)

    @property
    def overflows(self) -> bool:
        """Whether any output of the model is inf or NaN where float32's is finite."""
        return self.output.overflows > 0

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        lines = [f"{name}: output error {self.output.error:.2e}, {self.output.overflows} overflows"]
        worst = sorted(self.modules, key=lambda m: (-m.overflows, -(m.own_error or 0.0), -m.error))
        width = max((len(m.path) for m in worst), default=6)
        lines.append(f"{'module':<{width}}  {'own error':>9}  {'error':>9}  {'largest':>9}  overflows  underflow")
        for m in worst:
            own = "" if m.own_error is None else f"{m.own_error:.2e}"
            numbers = f"{own:>9}  {m.error:>9.2e}  {m.largest:>9.3g}  {m.overflows:>9}  {m.underflow:>9.1%}"
            lines.append(f"{m.path:<{width}}  {numbers}")
        if self.unfit:
            lines.append(f"parameters that {name} cannot hold: {', '.join(self.unfit)}")
        if self.too_large:
            lines.append(f"outputs that {name} cannot carry: {', '.join(self.too_large)}")
        lines.append(f"worth keeping in float32: {', '.join(self.keep) or 'nothing'}")
        return "\n".join(lines)


def check_half(
    model: Module,
    sample: Any,
    dtype: torch.dtype = torch.float16,
    keep_fp32: Keep | str = BATCH_NORMS,
    *,
    in_region: bool = False,
) -> HalfReport:
    """Run copies of a float32 model in float32 and in half on a sample, in eval mode, and compare every module.

    Args:
        model: stays as it is.
        sample: what to call it with: a tuple of positional arguments, a mapping of keyword arguments, or one.
        dtype, keep_fp32, in_region: as of `half`.

    Returns:
        A `HalfReport`; print it, or call `half` with its `keep` added to `keep_fp32`.

    Raises:
        What `half` raises, apart from parameters that do not fit: they are reported.

    What lies behind an overflow cannot be judged; call it again with `keep` added to `keep_fp32`.

    Reads the device, and holds the outputs of every module in float32.

    >>> report = check_half(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.ones(1, 4))
    >>> report.overflows, report.keep
    (False, [])
    """
    args, kwargs = _arguments(sample)
    plain = copy.deepcopy(model).eval()
    keep = (keep_fp32,) if isinstance(keep_fp32, str) else tuple(keep_fp32)
    unfit = _unfit_parameters(model, dtype, keep)
    owners = {name: name.rpartition(".")[0] for name in unfit}
    halved = half(model, dtype, _in(model, (*keep, *(model.get_submodule(path) for path in owners.values()))),
                  in_region=in_region).eval()
    wanted = _Recorder(plain)
    with torch.no_grad(), wanted:
        expected = plain(*args, **kwargs)
    got = _Comparer(halved, plain, wanted.outputs)
    with torch.no_grad(), got:
        output = halved(*args, **kwargs)
    modules = list(got.errors.values())
    whole = got.compare(ModuleError("", type(model).__name__), output, expected)
    too_large = _too_large(modules, dtype)
    keep_more = _worth_keeping(modules, too_large, dtype) + [path for path in owners.values() if path]
    return HalfReport(dtype, modules, whole, unfit, too_large, list(dict.fromkeys(keep_more)))


class _Recorder:
    """Every module's outputs, by path and call."""

    def __init__(self, model: Module) -> None:
        self.model = model
        self.outputs: dict[str, list[Any]] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        for path, module in self.model.named_modules():
            if path:
                self._handles.append(module.register_forward_hook(self._hook(path), with_kwargs=True))

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, path: str) -> Any:
        def hook(module: Module, args: Any, kwargs: Any, output: Any) -> None:
            self.outputs.setdefault(path, []).append(map_tensors(output, Tensor.clone))

        return hook


class _Comparer(_Recorder):
    """Compares every module's outputs with those of its float32 twin as they come."""

    def __init__(self, model: Module, plain: Module, wanted: dict[str, list[Any]]) -> None:
        super().__init__(model)
        self.plain = plain
        self.wanted = wanted
        self.errors: dict[str, ModuleError] = {}
        self._calls: dict[str, int] = {}

    def _hook(self, path: str) -> Any:
        twin = self.plain.get_submodule(path)

        def hook(module: Module, args: Any, kwargs: Any, output: Any) -> None:
            call = self._calls.get(path, 0)
            self._calls[path] = call + 1
            wanted = self.wanted.get(path, [])
            if call >= len(wanted):
                return      # the half run took another turn than the float32 one
            error = self.errors.setdefault(path, ModuleError(path, type(twin).__name__))
            self.compare(error, output, wanted[call])
            if next(module.children(), None) is None:
                local = twin.forward(*cast_tree(args, torch.float32), **cast_tree(kwargs, torch.float32))
                own = self.compare(ModuleError(path, ""), output, local).error
                error.own_error = max(error.own_error or 0.0, own)

        return hook

    def compare(self, error: ModuleError, output: Any, wanted: Any) -> ModuleError:
        """Note the worst of several calls in `error`."""
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
        both = good & ~broken
        distance, size = (a - b)[both].norm(), b[both].norm()
        nonzero = both & (b != 0)
        error.error = max(error.error, float(distance / size) if size > 0 else float(distance))
        error.overflows = max(error.overflows, int(broken.sum()))
        lost = float((a[nonzero] == 0).double().mean()) if bool(nonzero.any()) else 0.0
        error.underflow = max(error.underflow, lost)
        error.largest = max(error.largest, float(b[good].abs().max()) if bool(good.any()) else 0.0)
        return error


def _floats(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(value, lambda tensor: found.append(tensor) or tensor)
    return [tensor for tensor in found if tensor.dtype in REAL_FLOATS]


def _too_large(modules: list[ModuleError], dtype: torch.dtype) -> list[str]:
    """Leaves whose float32 outputs `dtype` cannot carry; those after them that break as well are not at fault."""
    limit = torch.finfo(dtype).max
    return [m.path for m in modules if m.own_error is not None and m.overflows and m.largest > limit]


def _worth_keeping(modules: list[ModuleError], too_large: list[str], dtype: torch.dtype) -> list[str]:
    """What to keep in float32. A module hands on `dtype` even when kept, so for an output too large for that it is
    the nearest enclosing module whose own output is not."""
    by_path = {m.path: m for m in modules}
    found = []
    for path in too_large:
        while path and by_path[path].largest > torch.finfo(dtype).max:
            path = path.rpartition(".")[0]
        if path:
            found.append(path)
    limit = _TOO_LARGE * torch.finfo(dtype).eps
    inexact = [m for m in modules if m.path not in too_large and (m.own_error or 0.0) > limit]
    return found + [m.path for m in sorted(inexact, key=lambda m: -(m.own_error or 0.0))]


def _unfit_parameters(model: Module, dtype: torch.dtype, keep: tuple[Any, ...]) -> list[str]:
    limit = torch.finfo(dtype).max
    kept_types = tuple(key for key in keep if isinstance(key, type))
    found = []
    for name, param in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        if param.dtype in REAL_FLOATS and param.numel() and not isinstance(owner, kept_types):
            largest = param.detach().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max()
            if torch.isinf(largest.to(dtype)) and float(largest) > limit:
                found.append(name)
    return found


def _in(model: Module, keep: tuple[Any, ...]) -> tuple[Any, ...]:
    """Without the model itself, which a parameter directly on it would name."""
    return tuple(key for key in keep if key is not model)


def _arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(sample, Mapping):
        return (), dict(sample)
    return (tuple(sample), {}) if isinstance(sample, tuple | list) else ((sample,), {})
