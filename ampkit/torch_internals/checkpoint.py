"""`torch.utils.checkpoint`: a hook by which a forward that is recomputed in backward runs in its region again.

torch's checkpoint saves torch's own autocast state, but neither policy nor cache. Both of its forms store the function
to recompute where a checkpoint begins: the frame of the non-reentrant form, the `ctx` of the reentrant one. For the
whole process, these two places then store a function that enters the region that the checkpoint was called in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import CheckpointFunction

from ampkit.torch_internals.dynamo import dynamo_skip
from ampkit.torch_internals.forks import renewed_lock
from ampkit.torch_internals.private_names import private, refuse

_Frame = private("utils.checkpoint._CheckpointFrame")
_lock = renewed_lock(__name__, "_lock")


def follow(recomputing: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Have each checkpoint, when it begins, replace the function to recompute by `recomputing(function)`."""
    with _lock:
        if _Frame is not refuse and not hasattr(CheckpointFunction.forward, "_ampkit_wraps"):
            _follow(recomputing)


def _follow(recomputing: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    begin, forward = _Frame.__init__, CheckpointFunction.forward

    @dynamo_skip
    @functools.wraps(begin)
    def begun(frame: Any, *args: Any, **kwargs: Any) -> None:
        begin(frame, *args, **kwargs)
        frame.recompute_fn = recomputing(frame.recompute_fn)

    @functools.wraps(forward)
    def followed(ctx: Any, *args: Any) -> Any:
        outputs = forward(ctx, *args)
        ctx.run_function = recomputing(ctx.run_function)
        return outputs

    followed._ampkit_wraps = forward  # type: ignore[attr-defined]
    _Frame.__init__ = begun
    CheckpointFunction.forward = staticmethod(followed)  # pyright: ignore[reportAttributeAccessIssue]
