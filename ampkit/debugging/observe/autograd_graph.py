"""The nodes and the leaves that a backward pass reaches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def nodes_from(roots: Iterable[Any]) -> dict[Any, None]:
    """Return the nodes that backward reaches, each once, in an order that is the same in each run."""
    pending: list[Any] = list(roots)
    seen: dict[Any, None] = {}
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen[node] = None
            pending += [following for following, _ in node.next_functions]
    return seen


def leaves_from(roots: Iterable[Any]) -> list[Tensor]:
    """Return the leaves that backward accumulates gradients in."""
    return [node.variable for node in nodes_from(roots) if hasattr(node, "variable")]
