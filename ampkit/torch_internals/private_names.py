"""Lookup of private names of torch: a missing name breaks regions and nothing else."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import torch

from ampkit.torch_internals.versions import no_regions

# The names that were looked up, and those that this torch lacks.
looked_up: list[str] = []
missing: list[str] = []


def private(path: str) -> Any:
    """The object `torch.<path>`; if there is none, `refuse`, with a note in `missing`."""
    if path not in looked_up:
        looked_up.append(path)
    try:
        return functools.reduce(getattr, path.split("."), torch)
    except AttributeError:
        if f"torch.{path}" not in missing:
            missing.append(f"torch.{path}")
        return refuse


def refuse(*_: object, **__: object) -> NoReturn:
    """Raise the error of a region in a torch that lacks a name."""
    raise RuntimeError(no_regions(f"it has no {', '.join(missing)}"))
