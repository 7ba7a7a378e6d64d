"""Tells the user's code from libraries, and warns at the user's line."""

from __future__ import annotations

import functools
import sys
import sysconfig
import warnings
from pathlib import Path

import torch

AMPKIT = f"{Path(__file__).resolve().parent}/"
TORCH = f"{Path(str(torch.__file__)).parent}/"
_STANDARD_LIBRARY = f"{sysconfig.get_paths()['stdlib']}/"
_SITE_PACKAGES = tuple(f"{sysconfig.get_paths()[name]}/" for name in ("purelib", "platlib"))


@functools.cache
def is_library(filename: str) -> bool:
    """Return whether a file is part of torch, ampkit or Python's standard library.

    Every other file counts as user code, including libraries such as transformers: a model is written there. einops
    only spells operators for its caller.
    """
    generated = ("<ampkit ", "<eval_with_key", "<frozen", "<string>")
    if filename.startswith((TORCH, AMPKIT, *generated)) or "/ampkit_kernels/" in filename or "/einops/" in filename:
        return True
    return filename.startswith(_STANDARD_LIBRARY) and not filename.startswith(_SITE_PACKAGES)


def warn_user(message: str, passing: tuple[str, ...] = (), category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost line outside ampkit and outside modules whose names begin with one of `passing`."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("ampkit.", *passing)):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
