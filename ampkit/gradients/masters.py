"""How code that handles gradients finds an optimizer's float32 master weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

_ATTRIBUTE = "_ampkit_masters"


class Masters(Protocol):
    """What handling gradients needs of master weights."""

    def take_gradients_(self) -> None:
        """Move gradients that arrived at 16-bit parameters to their masters."""

    def follow_model_(self) -> None:
        """Let masters take the values of 16-bit parameters that were changed from outside."""

    def write_back_(self) -> None:
        """Round the masters into the model's 16-bit parameters."""

    def masters(self) -> Sequence[Tensor]:
        """The float32 masters."""
        ...

    def model_parameters(self) -> Sequence[Tensor]:
        """The model's 16-bit parameters, in the order of `masters`."""
        ...


def masters_of(optimizer: Any) -> Masters | None:
    """The master weights of an optimizer; None where it has none."""
    return getattr(optimizer, _ATTRIBUTE, None)


def set_masters(optimizer: Any, masters: Masters) -> None:
    """Let `masters_of` find them from now on."""
    setattr(optimizer, _ATTRIBUTE, masters)


def take_master_gradients(optimizer: Any) -> None:
    """Move gradients that arrived at 16-bit parameters to their masters; no-op for an optimizer without masters."""
    masters: Masters | None = getattr(optimizer, _ATTRIBUTE, None)
    if masters is not None:
        masters.take_gradients_()
