"""Context managers that an interrupt cannot leave half entered or half left.

`KeyboardInterrupt` can be raised between any two instructions. What a context changes is therefore recorded before it
is changed, and restored as values: restoring is idempotent, and repeating it completes what was cut short.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Restoring(Generic[T]):
    """A context manager made of three steps, the last of which may be repeated."""

    def record(self) -> None:
        """Note what will be changed."""

    def change(self) -> T:
        """Change it; what this returns is what `with` gives."""
        raise NotImplementedError

    def restore(self, *, again: bool) -> None:
        """Restore what was noted; `again` if a `change` or a `restore` was cut short before."""
        raise NotImplementedError

    def __enter__(self) -> T:
        self.record()
        try:
            return self.change()
        except BaseException:
            self.restore(again=True)
            raise

    def __exit__(self, *exc: Any) -> None:
        try:
            self.restore(again=False)
        except BaseException:
            self.restore(again=True)
            raise
