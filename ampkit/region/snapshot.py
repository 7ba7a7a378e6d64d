"""The autocast state at one moment, to be restored elsewhere: in a recompute, or in another thread."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ampkit.policy.op_table import TORCH
from ampkit.policy.policy import Policy
from ampkit.region import all_float32, recording
from ampkit.region.mode import AutocastMode, DispatchGuard
from ampkit.region.module_hooks import ModuleRuleHooks
from ampkit.region.restoring import Restoring
from ampkit.region.stack import leave_ended
from ampkit.region.thread_state import thread
from ampkit.region.weight_cache import RegionCache
from ampkit.torch_internals import checkpoint
from ampkit.torch_internals.dispatcher import current

NativeState = Sequence[tuple[str, bool, torch.dtype]]       # torch's own: device type, enabled, dtype


def native_state(device_types: Iterable[str]) -> NativeState:
    """torch's own autocast state for some device types."""
    return [
        (device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))
        for device_type in device_types
    ]


class reentered(Restoring[None]):
    """A context for a recompute: regions with these policies and a cache of its own.

    `native` is the state of torch's own autocast to restore; the caller restores what it leaves out.
    """

    def __init__(
        self,
        policies: tuple[tuple[str, Policy], ...],
        *,
        cached: bool,
        native: NativeState = (),
    ) -> None:
        self.policies = policies
        self.cached = cached
        self.native = native

    def record(self) -> None:
        self.found = native_state(device_type for device_type, _, _ in self.native)
        self.hooks = [ModuleRuleHooks(policy) for _, policy in self.policies if policy.modules]
        self.guard = DispatchGuard(
            recording.new_mode(self.policies, RegionCache() if self.cached else None), current(),
            active=bool(self.policies), everything=self._in_float32(),
        )

    def _in_float32(self) -> bool:
        """Whether the state that this restores, or that the caller has restored, computes in float32."""
        if self.native:
            return any(enabled and dtype is torch.float32 for _, enabled, dtype in self.native)
        return all_float32.wanted(device_type for device_type, _ in self.policies)

    def change(self) -> None:
        _set_native(self.native)
        self.guard.enter()
        for hooks in self.hooks:
            hooks.begin()

    def restore(self, *, again: bool) -> None:
        for hooks in reversed(self.hooks):
            hooks.remove()
        leave_ended(thread.regions)      # an early stop of the recompute is an exception
        self.guard.leave(again=again)
        _set_native(self.found)


def _set_native(states: NativeState) -> None:
    for device_type, enabled, dtype in states:
        torch.set_autocast_enabled(device_type, enabled)
        torch.set_autocast_dtype(device_type, dtype)


class Snapshot:
    """The autocast state of the calling thread when this is made, to be restored in a recompute or another thread."""

    def __init__(self) -> None:
        mode = current()
        self.policies = mode.policies if mode is not None else ()
        self.cached = mode is not None and mode.cache is not None
        self.native = native_state(TORCH)

    def restored(self) -> reentered:
        """A context that restores the state; it has a weight cache of its own."""
        return reentered(self.policies, cached=self.cached, native=self.native)

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` run in that state."""

        @functools.wraps(function, updated=())
        def restored(*args: Any, **kwargs: Any) -> Any:
            with self.restored():
                return function(*args, **kwargs)

        return restored


def _run_again(mode: AutocastMode, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` for a recompute in backward, under the policies of its forward.

    torch's checkpoint restores the enabled flags and dtypes itself.
    """
    def recompute(*args: Any, **kwargs: Any) -> Any:
        with reentered(mode.policies, cached=mode.cache is not None):
            return function(*args, **kwargs)

    return recompute


checkpoint.reenter = _run_again
