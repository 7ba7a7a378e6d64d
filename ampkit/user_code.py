"""The user's own code: which files are not, and warnings that point at the user's line."""

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
    """Whether code in a file is torch's, ampkit's or Python's own.

    Everything else, transformers and its like too, is where somebody wrote the model.
    """
    generated = ("<ampkit ", "<eval_with_key", "<frozen", "<string>")
    if filename.startswith((TORCH, AMPKIT, *generated)) or "/ampkit_kernels/" in filename:
        return True
    return filename.startswith(_STANDARD_LIBRARY) and not filename.startswith(_SITE_PACKAGES)


def warn_user(message: str, passing: tuple[str, ...] = (), category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost line that is neither the package's nor of modules whose names begin with one of `passing`.
    """
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("ampkit.", *passing)):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
