"""Delta debugging as it is in the book (Zeller and Hildebrandt, 2002): what a search has to beat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["ddmin"]

T = TypeVar("T")


def ddmin(members: Sequence[T], passes: Callable[[list[T]], bool]) -> list[T]:
    """A 1-minimal subset of `members` that passes."""
    found, n_parts = list(members), 2
    while len(found) >= 2:
        size = -(-len(found) // n_parts)
        parts = [found[i:i + size] for i in range(0, len(found), size)]
        smaller = next((part for part in parts if passes(part)), None)
        if smaller is not None:
            found, n_parts = smaller, 2
            continue
        rests = ([one for one in found if one not in part] for part in parts) if len(parts) > 2 else ()
        smaller = next((rest for rest in rests if passes(rest)), None)
        if smaller is not None:
            found, n_parts = smaller, max(n_parts - 1, 2)
        elif n_parts >= len(found):
            break
        else:
            n_parts = min(len(found), 2 * n_parts)
    return found
