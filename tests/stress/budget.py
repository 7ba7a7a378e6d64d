"""Shared by the harnesses: rounds of random numbers, fixed in a test run and many in a soak, and damage to data."""

import copy
import os
import random
import time
from collections.abc import Hashable, Iterator, Sequence
from typing import Any


def rounds(name: str, n: int) -> Iterator[random.Random]:
    """A generator of random numbers for each of `n` rounds, the same in every run.

    In a soak there are as many rounds as fit into `AMPKIT_SOAK_SECONDS`, from the seed `AMPKIT_SOAK_SEED`; `make soak`
    sets both. Prints the seed, which repeats the rounds.
    """
    seconds, seed = os.environ.get("AMPKIT_SOAK_SECONDS"), int(os.environ.get("AMPKIT_SOAK_SEED", 0))
    print(f"{name}: AMPKIT_SOAK_SEED={seed}")
    end, done = time.monotonic() + float(seconds or 0), 0
    while time.monotonic() < end if seconds else done < n:
        yield random.Random(f"{seed} {name} {done}")
        done += 1


def damage(state: Any, draw: random.Random, strange: Sequence[Any]) -> None:
    """Change one to three entries of nested dicts and lists: dropped, added, replaced by another or by `strange`."""
    for _ in range(draw.choice((1, 1, 2, 3))):
        entries = list(_entries(state))
        if not entries:
            return
        (holder, key), (source, source_key), value = draw.choice(entries), draw.choice(entries), draw.choice(strange)
        match draw.randrange(6):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, list):
                holder.insert(key, value)
            case 1:
                holder[draw.choice([name for name in strange if isinstance(name, Hashable)])] = value
            case 2:
                holder[key] = copy.deepcopy(source[source_key])
            case _:
                holder[key] = value


def _entries(state: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(state) if isinstance(state, dict) else range(len(state)):
        yield state, key
        if isinstance(state[key], dict | list):
            yield from _entries(state[key])
