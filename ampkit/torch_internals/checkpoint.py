"""Regions and `torch.utils.checkpoint`: what is recomputed in backward is recomputed under the same region.

torch's checkpoint saves torch's own autocast state, but neither policy nor cache. Its non-reentrant form installs
saved-tensor hooks that belong to a frame, which holds the function to recompute. When a region casts inside such a
frame, that function is wrapped, once, to enter the same region. The reentrant form is an autograd function without
such hooks: its `forward` is replaced, for the process, by one that wraps the function it keeps for backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import CheckpointFunction

from ampkit.torch_internals.lookup import private

# The innermost (pack, unpack) hooks for saved tensors, or None; the argument says to look past disabled hooks.
top_hooks: Callable[[bool], Any] = private("_C._autograd._top_saved_tensors_default_hooks")


def note_region(mode: Any) -> None:
    """If a checkpointed function has begun to run, have it recomputed under `mode`, the one it was called in.

    Called before a region is entered, with the mode outside it (None: none), and at every cast.
    """
    hooks = top_hooks(True)
    frame = None if hooks is None else _frame_of(hooks[0])
    if frame is not None and not getattr(frame, "_ampkit_region", False):
        if mode is not None:
            frame.recompute_fn = mode.recomputing(frame.recompute_fn)
        frame._ampkit_region = True


def follow_reentrant(current: Callable[[], Any]) -> None:
    """Have the reentrant checkpoint recompute under the mode its forward ran in, which `current` returns."""
    forward = CheckpointFunction.forward
    if hasattr(forward, "_ampkit_wraps"):
        return

    @functools.wraps(forward)
    def followed(ctx: Any, *args: Any) -> Any:
        outputs = forward(ctx, *args)
        mode = current()
        if mode is not None:
            ctx.run_function = mode.recomputing(ctx.run_function)
        return outputs

    followed._ampkit_wraps = forward  # type: ignore[attr-defined]
    CheckpointFunction.forward = staticmethod(followed)  # pyright: ignore[reportAttributeAccessIssue]


def _frame_of(hook: Any) -> Any:
    """The checkpoint frame behind a pack hook; None if the hook is not checkpoint's."""
    if not getattr(hook, "__qualname__", "").startswith("_checkpoint_hook."):
        return None
    for cell in hook.__closure__ or ():
        if hasattr(cell.cell_contents, "recompute_fn"):
            return cell.cell_contents
    return None
