"""What `check_half` reports: each module in half precision beside its float32 twin."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class ModuleError:
    """One module in half precision beside its float32 twin.

    `error` is the relative L2 error of its outputs, inf or NaN where they are and float32's are not. `own_error` is the
    part that the module itself adds: its twin is given the very inputs that it had, and the very outputs of the modules
    that it called, so that what is left are its own operators. None where its forward could not be run once more.
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


@dataclass
class HalfReport:
    """What `check_half` found. `str()` is a table in the order in which modules returned.

    `output` is the whole model, whose own error is that of operators outside all modules. `unfit` names parameters
    whose values the dtype cannot hold: their modules were kept in float32 for this run. `too_large` names modules whose
    outputs it cannot carry. `keep` is what to add to `keep_fp32`: modules around those, the owners of `unfit`, and what
    cut the output's error when it was tried; `kept_error` is the error that is left then, None where nothing was tried.
    For what is `too_large` with nothing around it, use bfloat16.
    """

    dtype: torch.dtype
    modules: list[ModuleError]
    output: ModuleError
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
        paths = [*(module.path for module in self.modules), "(output)"]
        width = max(map(len, paths))
        lines = [f"{name}: output error {self.output.error:.2e}, {self.output.overflows} overflows"]
        origin = next((path for path, row in zip(paths, rows, strict=True) if row.own_overflows), None)
        if origin is not None:
            lines.append(f"inf or NaN begins in {origin}")
        lines.append(f"{'module':<{width}}  {'own error':>9}  {'error':>9}  {'largest':>9}  overflows  underflow")
        for path, row in zip(paths, rows, strict=True):
            own = "" if row.own_error is None else f"{row.own_error:.2e}"
            numbers = f"{own:>9}  {row.error:>9.2e}  {row.largest:>9.3g}  {row.overflows:>9}  {row.underflow:>9.1%}"
            lines.append(f"{path:<{width}}  {numbers}")
        if self.unfit:
            lines.append(f"parameters that {name} cannot hold: {', '.join(self.unfit)}")
        if self.too_large:
            lines.append(f"outputs that {name} cannot carry: {', '.join(self.too_large)}")
        then = "" if self.kept_error is None else f" (output error {self.output.error:.2e} -> {self.kept_error:.2e})"
        lines.append(f"worth keeping in float32: {', '.join(self.keep) or 'nothing'}{then}")
        return "\n".join(lines)
