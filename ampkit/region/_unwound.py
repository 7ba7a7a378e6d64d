"""Whether a call that opened a region has ended without closing it: an exception went past what would have done so.

Two things close a region by being called and have no `finally`: a graph that `torch.compile(backend="eager")` runs,
and the hooks of a module, which an exception that is no `Exception` (`KeyboardInterrupt`) skips.
"""

from __future__ import annotations

import sys
from types import FrameType


def is_running(frame: FrameType) -> bool:
    """Whether the call with this frame is still going on, in this thread."""
    at: FrameType | None = sys._getframe(1)
    while at is not None and at is not frame:
        at = at.f_back
    return at is not None
