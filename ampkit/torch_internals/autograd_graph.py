"""Which leaves a loss's autograd graph reaches, and in which order, known before backward runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

_ACCUMULATES = "torch::autograd::AccumulateGrad"
_FORMS = ("ToCopy", "T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Alias", "Clone", "Expand")
_IN_ANOTHER_FORM = frozenset(f"{name}Backward0" for name in _FORMS)


def uses_of_leaves(losses: Iterable[Tensor], *, most_nodes: int = 200_000) -> dict[int, tuple[Tensor, int, int]]:
    """For each leaf, by its id: the leaf, and the numbers of its first and last use in backward, in rising order.

    They are negated sequence numbers of the nodes that compute with the leaf, not of its casts and views, which may be
    older. Only numbers of one thread compare. Empty for a graph of more than `most_nodes`.
    """
    nodes: dict[Any, None] = {}         # the wrappers stay alive, so that a node is one object
    waiting = [loss.grad_fn for loss in losses if loss.grad_fn is not None]
    roots = set(waiting)
    while waiting:
        node = waiting.pop()
        if node not in nodes:
            nodes[node] = None
            waiting.extend(child for child, _ in node.next_functions if child is not None)
            if len(nodes) > most_nodes:
                return {}
    known: dict[Any, Tensor | None] = {}
    found: dict[int, tuple[Tensor, int, int]] = {}
    for node in nodes:
        if _leaf_behind(node, known) is not None and node not in roots:
            continue
        number = -node._sequence_nr()
        for leaf in _leaves(node, known):
            _, first, last = found.get(id(leaf), (leaf, number, number))
            found[id(leaf)] = leaf, min(first, number), max(last, number)
    return found


def _leaves(node: Any, known: dict[Any, Tensor | None]) -> Iterator[Tensor]:
    for child, _ in node.next_functions:
        leaf = None if child is None else _leaf_behind(child, known)
        if leaf is not None:
            yield leaf


def _leaf_behind(node: Any, known: dict[Any, Tensor | None]) -> Tensor | None:
    """The leaf that a node casts or views; None for any other node."""
    path = []
    while node not in known:
        path.append(node)
        if node.name() == _ACCUMULATES:
            known[node] = node.variable
        elif node.name() in _IN_ANOTHER_FORM and node.next_functions[0][0] is not None:
            node = node.next_functions[0][0]
        else:
            known[node] = None
    for passed in path:
        known[passed] = known[node]
    return known[node]
