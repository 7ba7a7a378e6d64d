"""How long a harness runs and with which seed: bounded for CI, as long as told in a soak."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator

CI_SECONDS = 4.0


def rounds(name: str, share: float = 1.0) -> Iterator[random.Random]:
    """One generator of random numbers per round until the time is up; prints the seed that makes the same rounds.

    `AMPKIT_SOAK_SECONDS` is how long, `AMPKIT_SOAK_SEED` the seed; without them it is `share` of what CI gives a file,
    and always the same seed. `make soak` sets both.
    """
    seconds = share * float(os.environ.get("AMPKIT_SOAK_SECONDS", CI_SECONDS))
    seed = int(os.environ.get("AMPKIT_SOAK_SEED", 0))
    print(f"{name}: AMPKIT_SOAK_SEED={seed}, {seconds:.0f} s")
    end = time.monotonic() + seconds
    n = 0
    while n == 0 or time.monotonic() < end:
        yield random.Random(f"{seed} {name} {n}")
        n += 1
