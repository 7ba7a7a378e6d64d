"""Checkpoints: a forward that `torch.utils.checkpoint` recomputes in backward runs in its regions again.

torch's checkpoint saves torch's own autocast state, but not the policies. Both of its forms store the function to
recompute where a checkpoint begins: the frame of the non-reentrant form, the `ctx` of the reentrant one. For the whole
process, these two places then store a function that enters the regions that the checkpoint was called in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from ampkit.dispatch.dispatcher import current_mode
from ampkit.forks import process_lock
from ampkit.region.arguments import RegionSpec
from ampkit.region.module_hooks import apply_module_rules
from ampkit.region.stack import enter, leave_down_to, thread
from ampkit.torch_private import CheckpointFrame, dynamo_skip

__all__ = ["wrap_checkpoints"]


@functools.cache
def wrap_checkpoints() -> None:
    """Have checkpoints, from now on, recompute under the policies of their forward."""
    with process_lock():
        if not hasattr(CheckpointFunction.forward, "_ampkit_wraps"):
            _wrap_beginnings()


def _wrap_beginnings() -> None:
    begin, forward = CheckpointFrame.__init__, CheckpointFunction.forward

    @dynamo_skip
    @functools.wraps(begin)
    def begun(frame: Any, *args: Any, **kwargs: Any) -> None:
        begin(frame, *args, **kwargs)
        frame.recompute_fn = _in_regions_of_now(frame.recompute_fn)

    @functools.wraps(forward)
    def forward_in_regions(ctx: Any, *args: Any) -> Any:
        outputs = forward(ctx, *args)
        ctx.run_function = _in_regions_of_now(ctx.run_function)
        return outputs

    forward_in_regions._ampkit_wraps = forward  # type: ignore[attr-defined]
    CheckpointFrame.__init__ = begun
    CheckpointFunction.forward = staticmethod(forward_in_regions)  # pyright: ignore[reportAttributeAccessIssue]


def _in_regions_of_now(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` to run under the policies that are active now.

    torch's checkpoint restores enabled flags and dtypes itself.
    """
    mode = current_mode()
    if mode is None:
        return function
    policies, cached = mode.policies, mode.cache is not None
    of_module = bool(thread.regions) and thread.regions[-1].spec.of_module

    def recompute(*args: Any, **kwargs: Any) -> Any:
        depth = len(thread.regions)
        try:
            for device_type, policy in policies:
                dtype, enabled = torch.get_autocast_dtype(device_type), torch.is_autocast_enabled(device_type)
                spec = RegionSpec(device_type, dtype, enabled, cached, policy, of_module=of_module)
                apply_module_rules(enter(spec, recomputes=True))
            return function(*args, **kwargs)
        finally:
            leave_down_to(depth)

    return recompute
