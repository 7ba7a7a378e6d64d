"""Casts that made distinct integers equal, as bfloat16 does to positions above 256: on the device until it is read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ampkit.torch_internals.float8 import is_eager
from ampkit.torch_internals.operator_tracing import is_opaque
from ampkit.torch_internals.tensors import is_capturing
from ampkit.torch_internals.transforms import functorch_level

__all__ = ["IntegerCasts"]

_MOST = 1 << 14         # elements of a tensor that are looked at: sorting all of an activation would take long
_LARGEST = 1 << 24      # up to which float32 has every integer; beyond are the constants of masks


class IntegerCasts:
    """Collects the answers for the casts of a record."""

    def __init__(self) -> None:
        self._answers: dict[torch.device, list[tuple[Any, Tensor]]] = {}

    def note(self, call: Any, casts: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Ask about the casts of a call, tensors before and after; never syncs."""
        for exact, cast in casts:
            if (
                exact.dtype is torch.float32 and cast.dtype.itemsize == 2 and not exact.requires_grad
                and is_eager(exact) and not is_opaque(exact) and functorch_level() is None and not is_capturing()
            ):
                self._answers.setdefault(exact.device, []).append((call, _merges(exact, cast.dtype)))

    def merged(self) -> list[Any]:
        """The calls with such casts. Syncs once for each device."""
        return [
            call
            for answers in self._answers.values()
            for (call, _), merged in zip(answers, torch.stack([flag for _, flag in answers]).tolist(), strict=True)
            if merged
        ]


def _merges(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Whether a tensor holds integers alone, of which `dtype` makes distinct ones equal."""
    values = exact.detach().flatten()[:_MOST].sort().values      # rounding keeps the order
    cast = values.to(dtype)
    integers = ((values == values.round()) & (values.abs() <= _LARGEST)).all()
    return integers & ((values[1:] != values[:-1]) & (cast[1:] == cast[:-1])).any()
