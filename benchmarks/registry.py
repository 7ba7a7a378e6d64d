"""All cases, and the selection for a run."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from benchmarks import debugging, features, float8, host, kernels, regions, scaling, training, tuning
from benchmarks.case import Case


def every_case() -> list[Case]:
    """All cases, small ones first, so that an interrupted run has covered most families.

    Raises `ValueError` if two cases of a family have one name: results could not be distinguished.
    """
    modules = (regions, host, scaling, kernels, float8, tuning, training, features, debugging)
    cases: list[Case] = [case for module in modules for case in module.cases()]
    seen: set[tuple[str, str]] = set()
    for case in cases:
        if (case.family, case.name) in seen:
            raise ValueError(f"two cases are called {case.family}/{case.name}")
        seen.add((case.family, case.name))
    return cases


def choose(device_type: str, patterns: Sequence[str] = ()) -> list[Case]:
    """Return the cases for a device: the everyday ones, or those whose "family/name" matches a shell pattern.

    Raises `ValueError`, with the families there are, if nothing matches.
    """
    able = [case for case in every_case() if device_type in case.devices]
    if not patterns:
        return [case for case in able if case.everyday]
    chosen = [
        case for case in able if any(fnmatch.fnmatch(f"{case.family}/{case.name}", pattern) for pattern in patterns)
    ]
    if not chosen:
        families = ", ".join(sorted({case.family for case in able}))
        raise ValueError(
            f"no case for {device_type!r} matches {' '.join(patterns)!r}; patterns are like 'training/*' or "
            f"'*/char-GPT*', families are {families}"
        )
    return chosen
