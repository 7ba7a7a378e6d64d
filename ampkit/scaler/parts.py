"""Attributes of a scaler that live in one of the parts it is made of."""

from __future__ import annotations

from typing import Any


def attribute_of(part: str, name: str) -> Any:
    """A property that is `self.<part>.<name>`, of functions that Dynamo can trace."""
    return property(
        lambda self: getattr(getattr(self, part), name),
        lambda self, value: setattr(getattr(self, part), name, value),
    )
