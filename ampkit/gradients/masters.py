"""How code that handles gradients finds the float32 `MasterWeights` of an optimizer: as an attribute of it."""

from __future__ import annotations

from typing import Any

_ATTRIBUTE = "_ampkit_masters"


def masters_of(optimizer: Any) -> Any:
    """The `MasterWeights` of an optimizer; None where it has none."""
    return getattr(optimizer, _ATTRIBUTE, None)


def set_masters(optimizer: Any, masters: Any) -> None:
    """Let `masters_of` find them from now on."""
    setattr(optimizer, _ATTRIBUTE, masters)


def take_master_gradients(optimizer: Any) -> None:
    """Move gradients that arrived at 16-bit parameters to their masters; no-op for an optimizer without masters."""
    masters = getattr(optimizer, _ATTRIBUTE, None)      # not `masters_of`: a call more in every step
    if masters is not None:
        masters.take_gradients_()
