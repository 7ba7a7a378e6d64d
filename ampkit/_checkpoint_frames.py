"""Regions and `torch.utils.checkpoint`: what is recomputed in backward is recomputed under the same region.

torch's non-reentrant checkpoint remembers torch's own autocast state and nothing of a policy or a cache. While it runs
a checkpointed function it installs hooks for saved tensors that belong to a frame, and the frame holds the function to
call again. When a region casts inside such a frame, the frame's function is wrapped, once, to enter the same region.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# The innermost (pack, unpack) hooks for saved tensors, or None; the argument says to look past disabled hooks.
top_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks  # pyright: ignore

# Set by `autocast`: how to run a function again under a mode. Kept here so that the mode need not know regions.
reenter: Callable[[Any, Callable[..., Any]], Callable[..., Any]] | None = None


def note_region(mode: Any) -> None:
    """If a checkpointed function has begun to run, have it recomputed under `mode`, the one it was called in.

    Called before a region is entered, with the mode outside it (None: none), and at every cast.
    """
    hooks = top_hooks(True)
    frame = None if hooks is None else _frame_of(hooks[0])
    if frame is not None and reenter is not None and not getattr(frame, "_ampkit_region", False):
        frame._ampkit_region = True
        if mode is not None:
            frame.recompute_fn = reenter(mode, frame.recompute_fn)


def _frame_of(hook: Any) -> Any:
    """The checkpoint frame behind a pack hook; None if the hook is someone else's."""
    if not getattr(hook, "__qualname__", "").startswith("_checkpoint_hook."):
        return None
    for cell in hook.__closure__ or ():
        if hasattr(cell.cell_contents, "recompute_fn"):
            return cell.cell_contents
    return None
