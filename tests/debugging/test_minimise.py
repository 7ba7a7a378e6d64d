"""Minimal subsets: right by exhaustion, and minimal where more is not better."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from ampkit.debugging.search import minimal_subset

Oracle = Callable[[frozenset[int]], bool]


class Remembered:
    """A test that remembers its answers."""

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle
        self.seen: dict[frozenset[int], bool] = {}

    def __call__(self, members: list[int]) -> bool:
        key = frozenset(members)
        if key not in self.seen:
            self.seen[key] = self.oracle(key)
        return self.seen[key]


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 9), st.data())
def test_the_result_is_one_of_the_minimal_sets(n: int, data: st.DataObject) -> None:
    groups = data.draw(st.lists(st.frozensets(st.integers(0, n - 1), min_size=1), min_size=1, max_size=3))
    order = data.draw(st.permutations(range(n)))

    def oracle(members: frozenset[int]) -> bool:
        return any(group <= members for group in groups)

    found = frozenset(minimal_subset(order, Remembered(oracle)))
    some = (frozenset(one) for k in range(1, n + 1) for one in itertools.combinations(range(n), k))
    assert found in [one for one in some if oracle(one) and not any(oracle(one - {member}) for member in one)]
    if len(groups) == 1:
        assert found == groups[0]


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 7), st.randoms(use_true_random=False))
def test_minimal_also_where_more_is_not_better(n: int, chance: random.Random) -> None:
    answers: dict[frozenset[int], bool] = {frozenset(): False, frozenset(range(n)): True}
    test = Remembered(lambda members: answers.setdefault(members, chance.random() < 0.4))
    found = frozenset(minimal_subset(list(range(n)), test))
    assert answers[found]
    assert not any(answers[found - {one}] for one in found)
