"""A smallest subset that passes a test, with few tests where the members that it needs are ranked high."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["minimal_subset"]

T = TypeVar("T")


def minimal_subset(order: Sequence[T], passes: Callable[[list[T]], bool]) -> list[T]:
    """A subset of `order` that passes and does not with any one member left out, in the order of `order`.

    All of `order` must pass, the empty set must not; neither is tested. Members likely to be needed come first: the
    shortest prefix that passes is found by doubling and halving, its last member is needed, and so on with those before
    it. Where more members can make a test fail again, the result is still minimal; it only takes more tests.
    `passes` should remember its answers: it is asked about some sets twice.

    >>> tests = []
    >>> def passes(members):
    ...     tests.append(members)
    ...     return {"b", "d"} <= set(members)
    >>> minimal_subset(["b", "d", "a", "c"], passes)
    ['b', 'd']
    >>> tests
    [['b'], ['b', 'd'], ['d'], ['b'], ['d']]
    """
    place = {member: i for i, member in enumerate(order)}

    def test(members: Sequence[T]) -> bool:
        return passes(sorted(members, key=place.__getitem__))

    needed: list[T] = []
    rest = list(order)
    while rest and not (needed and test(needed)):
        length = _shortest_prefix(rest, lambda prefix: test([*prefix, *needed]))
        needed.append(rest[length - 1])
        rest = rest[:length - 1]
    shrunk = True
    while shrunk and len(needed) > 1:
        shrunk = False
        for member in needed:
            fewer = [other for other in needed if other is not member]
            if test(fewer):
                needed, shrunk = fewer, True
                break
    return sorted(needed, key=place.__getitem__)


def _shortest_prefix(members: list[T], passes: Callable[[list[T]], bool]) -> int:
    """The length of a prefix that passes where one member less does not; all of `members` do."""
    low, high = 0, 1
    while high < len(members) and not passes(members[:high]):
        low, high = high, 2 * high
    high = min(high, len(members))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if passes(members[:middle]) else (middle, high)
    return high
