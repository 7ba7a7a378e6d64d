"""The order in which backward reaches parameters, which shows where an overflow began."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from ampkit.torch_internals.autograd_graph import uses_of_leaves


class Use(NamedTuple):
    """When backward first and last reaches a parameter, as numbers that rise through it."""

    first: int
    last: int


class BackwardOrder:
    """Read from the graphs of losses, about a microsecond per node.

    `wanted`: whether to read the next loss, until a step has been taken, and again after a skipped one, since graphs
    may change. Parameters are held by weak references.
    """

    def __init__(self) -> None:
        self.wanted = True
        self._uses: dict[int, tuple[weakref.ref[Tensor], Use]] = {}

    def learn(self, losses: Iterable[Tensor]) -> None:
        """Read the graphs of these losses."""
        self._uses = {key: entry for key, entry in self._uses.items() if entry[0]() is not None}
        for key, (param, first, last) in uses_of_leaves(losses).items():
            self._uses[key] = weakref.ref(param), Use(first, last)

    def use_of(self, param: Tensor) -> Use | None:
        """When backward reaches a parameter; None if no graph has it: under FSDP, in a reentrant checkpoint."""
        reference, use = self._uses.get(id(param), (None, None))
        return use if reference is not None and reference() is param else None
