"""What a region costs per operator in three designs of the mode: `python -m benchmarks 'dispatch/*'`.

The three are a plain `TorchDispatchMode` (below autograd, so its casts are not differentiated: it is here only for its
cost), the same mode with every key above `Python` excluded, and ampkit's, which has a dispatch key of its own. They are
compared with torch.autocast and with no region.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ampkit import Policy, autocast
from benchmarks.case import AMPKIT, SAME_LIST, TORCH, Case, Side
from benchmarks.overhead import PLAIN, Region, repeated
from benchmarks.timing import Run

_ABOVE_PYTHON = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.PythonDispatcher) - (
    torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.Python).add(torch._C.DispatchKey.Python)
)
_EXCLUDED = _ABOVE_PYTHON.remove(torch._C._dispatch_key_parse("PythonTLSSnapshot"))
_CAST = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.linear.default}


class Plain(TorchDispatchMode):
    """A mode at the `Python` key: operators arrive decomposed, and after autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, Tensor] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def cast(self, value: Any) -> Any:
        """An argument cast to bfloat16; a weight's cast comes from the cache."""
        if not isinstance(value, Tensor) or value.dtype is not torch.float32:
            return value
        if not (value.is_leaf and value.requires_grad):
            return value.bfloat16()
        if id(value) not in self.cache:
            self.cache[id(value)] = value.bfloat16()
        return self.cache[id(value)]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _CAST:
            args = tuple(map(self.cast, args))
        return func(*args, **(kwargs or {}))


class Excluding(Plain):
    """The mode with all keys above `Python` excluded until it has cast, and then restored."""

    def __enter__(self) -> Excluding:
        self.before = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
        self.guard = torch._C._ExcludeDispatchKeyGuard(_EXCLUDED)
        self.guard.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.guard.__exit__(*error)
        self.cache.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C._ForceDispatchKeyGuard(*self.before):
            return super().__torch_dispatch__(func, types, args, kwargs)


DESIGNS: dict[str, Region] = {
    PLAIN: contextlib.nullcontext,
    TORCH: lambda: torch.autocast("cpu"),
    "plain mode": Plain,
    "keys excluded": Excluding,
    SAME_LIST: lambda: autocast("cpu", policy=Policy.torch("cpu")),
    AMPKIT: lambda: autocast("cpu"),
}


def _unlisted(region: bool) -> Callable[[], object]:
    x = torch.ones(2, 2)
    return lambda: torch.add(x, x)


def _nothing_to_cast(region: bool) -> Callable[[], object]:
    low, other = torch.ones(2, 2).bfloat16(), torch.ones(2, 2).bfloat16()
    return lambda: torch.mm(low, other)


def _one_cast(region: bool) -> Callable[[], object] | None:
    x, other = torch.ones(2, 2), torch.ones(2, 2).bfloat16()
    return (lambda: torch.mm(x, other)) if region else None     # outside, nothing would make the dtypes agree


def _weights(region: bool) -> Callable[[], object]:
    x, w, b = torch.ones(2, 2), torch.ones(2, 2, requires_grad=True), torch.ones(2, requires_grad=True)
    x = x.bfloat16() if region else x
    return lambda: torch.nn.functional.linear(x, w, b)


# Each takes whether it is called inside a region, and makes the call; None where it cannot be made there.
OPERATORS: dict[str, Callable[[bool], Callable[[], object] | None]] = {
    "unlisted: add": _unlisted,
    "listed, nothing to cast: mm": _nothing_to_cast,
    "listed, one cast: mm": _one_cast,
    "weights cached: linear": _weights,
}
OPENING = "make, enter and leave"


@dataclass(frozen=True, kw_only=True)
class Dispatch(Case):
    """Calls of one operator inside each design's region, or entering the region itself. Tensors are 2x2."""

    family: str = "dispatch"
    devices: tuple[str, ...] = ("cpu",)
    everyday: bool = False
    sample_seconds: float = 2e-3

    def sides(self, device: torch.device) -> dict[str, Side]:
        if self.name == OPENING:
            return {design: Side(_opened(region)) for design, region in DESIGNS.items()}
        calls = {design: OPERATORS[self.name](design != PLAIN) for design in DESIGNS}
        return {
            design: Side(repeated(call, DESIGNS[design], grad=True)) for design, call in calls.items()
            if call is not None
        }


def _opened(region: Region) -> Run:
    def run(calls: int) -> None:
        for _ in range(calls):
            with region():
                pass

    return run


def cases() -> list[Case]:
    """A case per operator, and one for the region."""
    return [Dispatch(name=name) for name in (*OPERATORS, OPENING)]
