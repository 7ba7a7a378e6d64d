"""Minimal subsets: right by exhaustion, minimal where more is not better, cheaper than delta debugging."""

from __future__ import annotations

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from ampkit.debugging.minimise import minimal_subset
from tests.debugging.ddmin import ddmin


class Test:
    """Remembers its answers, and counts the questions."""

    __test__ = False

    def __init__(self, oracle: object) -> None:
        self.oracle, self.seen = oracle, {}     # type: ignore[var-annotated]

    def __call__(self, members: list[int]) -> bool:
        key = frozenset(members)
        if key not in self.seen:
            self.seen[key] = self.oracle(key)   # type: ignore[operator]
        return self.seen[key]


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 9), st.data())
def test_the_result_is_one_of_the_minimal_sets(n: int, data: st.DataObject) -> None:
    groups = data.draw(st.lists(st.frozensets(st.integers(0, n - 1), min_size=1), min_size=1, max_size=3))
    order = data.draw(st.permutations(range(n)))
    test = Test(lambda members: any(group <= members for group in groups))
    found = frozenset(minimal_subset(order, test))
    minimal = [
        frozenset(some) for k in range(1, n + 1) for some in itertools.combinations(range(n), k)
        if test.oracle(frozenset(some))     # type: ignore[operator]
        and not any(test.oracle(frozenset(some) - {one}) for one in some)       # type: ignore[operator]
    ]
    assert found in minimal
    if len(groups) == 1:
        assert found == groups[0]


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 7), st.randoms(use_true_random=False))
def test_minimal_also_where_more_is_not_better(n: int, chance: random.Random) -> None:
    answers: dict[frozenset[int], bool] = {frozenset(): False, frozenset(range(n)): True}
    test = Test(lambda members: answers.setdefault(members, chance.random() < 0.4))
    found = frozenset(minimal_subset(list(range(n)), test))
    assert answers[found]
    assert not any(answers[found - {one}] for one in found)


def test_far_fewer_tests_than_delta_debugging_where_the_ranking_is_good() -> None:
    chance = random.Random(0)
    ours = theirs = 0
    for _ in range(40):
        culprits = frozenset(chance.sample(range(30), chance.randint(1, 4)))
        others = [one for one in range(30) if one not in culprits]
        chance.shuffle(others)
        order = [*culprits, *others]
        for first, second in (chance.sample(range(len(order)), 2) for _ in range(2)):   # nearly right
            order[first], order[second] = order[second], order[first]
        mine, plain = Test(culprits.issubset), Test(culprits.issubset)
        assert frozenset(minimal_subset(order, mine)) == frozenset(ddmin(sorted(order), plain)) == culprits
        ours += len(mine.seen)
        theirs += len(plain.seen)
    assert ours <= theirs / 2
