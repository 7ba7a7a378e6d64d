"""How long a harness runs and with which seed: the same rounds in every run of the tests, as long as told in a soak."""

import os
import random
import time
from collections.abc import Iterator


def rounds(name: str, n: int) -> Iterator[random.Random]:
    """One generator of random numbers for each of `n` rounds, the same every time.

    In a soak as many as fit into `AMPKIT_SOAK_SECONDS`, from `AMPKIT_SOAK_SEED`; `make soak` sets both. Prints the
    seed that makes the same rounds.
    """
    seconds, seed = os.environ.get("AMPKIT_SOAK_SECONDS"), int(os.environ.get("AMPKIT_SOAK_SEED", 0))
    print(f"{name}: AMPKIT_SOAK_SEED={seed}")
    end, done = time.monotonic() + float(seconds or 0), 0
    while time.monotonic() < end if seconds else done < n:
        yield random.Random(f"{seed} {name} {done}")
        done += 1
