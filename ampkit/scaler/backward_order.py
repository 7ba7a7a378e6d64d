"""The order in which backward reaches parameters, which shows where an overflow began."""

from __future__ import annotations

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
    may change. Parameters are known by their ids and not referred to, not weakly either: `torch.utils.swap_tensors` and
    `Module.to` refuse tensors with weak references. So the order is dropped when an optimizer makes its first step
    without a loss that was read for it: its parameters may have the ids of others that are gone.
    """

    def __init__(self) -> None:
        self.wanted = True
        self._is_fresh = False
        self._uses: dict[int, Use] = {}

    def learn(self, losses: Iterable[Tensor]) -> None:
        """Read the graphs of these losses."""
        if not self._is_fresh:
            self._uses.clear()
            self._is_fresh = True
        for key, (_, first, last) in uses_of_leaves(losses).items():
            self._uses[key] = Use(first, last)

    def begin(self) -> None:
        """The next loss belongs to another iteration."""
        self._is_fresh = False

    def note_step(self, *, first: bool, skipped: bool) -> None:
        """An optimizer has stepped, for the `first` time or again."""
        if first and not self._is_fresh:
            self._uses.clear()
        self.wanted = skipped

    def use_of(self, param: Tensor) -> Use | None:
        """When backward reaches a parameter; None if no graph has it: under FSDP, in a reentrant checkpoint."""
        return self._uses.get(id(param))
