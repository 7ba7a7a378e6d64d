"""What a region costs per operator in three designs of the mode: `python -m benchmarks.lifting`.

The three are a `TorchDispatchMode` as torch has it (below autograd: it is here for its price alone, for its casts are
not differentiated), the same mode lifted above autograd by excluding every key over it, and ampkit's, which has a
dispatch key of its own. They stand beside torch.autocast and no region at all. Times are the least of many interleaved
rounds: other jobs on the machine can only add to them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ampkit import Policy, autocast

_ABOVE_PYTHON = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.PythonDispatcher) - (
    torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.Python).add(torch._C.DispatchKey.Python)
)
_EXCLUDED = _ABOVE_PYTHON.remove(torch._C._dispatch_key_parse("PythonTLSSnapshot"))
_CAST = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.linear.default}


class Plain(TorchDispatchMode):
    """A mode at the `Python` key: operators arrive taken apart, and after autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, Tensor] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def cast(self, value: Any) -> Any:
        """An argument in bfloat16; that of a weight from the cache."""
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
    """The mode lifted: nothing above the `Python` key answers before it, and everything does after it."""

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


DESIGNS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "no region": contextlib.nullcontext,
    "torch.autocast": lambda: torch.autocast("cpu"),
    "plain mode": Plain,
    "keys excluded": Excluding,
    "ampkit, torch's list": lambda: autocast("cpu", policy=Policy.torch("cpu")),
    "ampkit, default list": lambda: autocast("cpu"),
}


def cases() -> dict[str, Callable[[], Any]]:
    """One operator each, on tensors so small that the operator costs next to nothing."""
    x, w, b = torch.ones(2, 2), torch.ones(2, 2, requires_grad=True), torch.ones(2, requires_grad=True)
    low, other = x.bfloat16(), x.bfloat16()
    return {
        "unlisted: add": lambda: torch.add(x, x),
        "listed, nothing to cast: mm": lambda: torch.mm(low, other),
        "listed, one cast: mm": lambda: torch.mm(x, other),
        "weights cached: linear": lambda: torch.nn.functional.linear(low, w, b),
    }


def microseconds(call: Callable[[], Any], calls: int) -> float:
    """Time per call over `calls` of them."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls * 1e6


def measure(rounds: int = 60, calls: int = 400) -> dict[str, dict[str, float]]:
    """Least time per case and design, in microseconds; designs take turns within a round."""
    table: dict[str, dict[str, float]] = {}
    for _ in range(rounds):
        for design, make in DESIGNS.items():
            for name, call in cases().items():
                if design == "no region" and "mm" in name:
                    continue    # nothing there would make its dtypes agree
                if design == "no region" and "linear" in name:
                    call = _unmixed
                with make():
                    call()
                    taken = microseconds(call, calls)
                row = table.setdefault(name, {})
                row[design] = min(taken, row.get(design, taken))
            taken = microseconds(lambda make=make: _enter(make), calls // 4)
            row = table.setdefault("make, enter and leave", {})
            row[design] = min(taken, row.get(design, taken))
    return table


_W, _B, _X = torch.ones(2, 2, requires_grad=True), torch.ones(2, requires_grad=True), torch.ones(2, 2)


def _unmixed() -> Tensor:
    return torch.nn.functional.linear(_X, _W, _B)


def _enter(make: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
    with make():
        pass


def main() -> None:
    """Print the table in Markdown."""
    torch.set_num_threads(1)
    table = measure()
    print("| µs | " + " | ".join(DESIGNS) + " |")
    print("| --- |" + " ---: |" * len(DESIGNS))
    for name, row in table.items():
        print(f"| {name} | " + " | ".join(f"{row[d]:.2f}" if d in row else "" for d in DESIGNS) + " |")


if __name__ == "__main__":
    main()
