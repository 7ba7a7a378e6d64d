"""Warnings that point at the user's line, from however deep in the package they come."""

from __future__ import annotations

import sys
import warnings


def warn_user(message: str, passing: tuple[str, ...] = (), category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost line that is neither the package's nor of modules whose names begin with one of `passing`.
    """
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("ampkit.", *passing)):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
