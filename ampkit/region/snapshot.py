"""The autocast state of a moment, to be brought back elsewhere: in a recompute, or in another thread."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ampkit.policy.op_table import TORCH
from ampkit.policy.policy import Policy
from ampkit.region import _checkpoint_frames, _lifted_mode, _module_regions, recording
from ampkit.region._lifted_mode import AutocastMode, Entered
from ampkit.region._restoring import Restoring
from ampkit.region.autocast import leave_ended, regions
from ampkit.region.weight_cache import RegionCache

NativeState = Sequence[tuple[str, bool, torch.dtype]]       # of torch: device type, enabled, dtype


def native_state(kinds: Iterable[str]) -> NativeState:
    """torch's own autocast state for some device types."""
    return [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]


class reentered(Restoring[None]):
    """A context for a recompute: regions with these policies, a cache of its own, and modules followed by `watch`.

    `native` is the state of torch's to go with it; flags and dtypes that it leaves out are the caller's to restore,
    around it.
    """

    def __init__(
        self,
        policies: tuple[tuple[str, Policy], ...],
        *,
        cached: bool,
        watch: Callable[[], _module_regions.Watch | None],
        native: NativeState = (),
    ) -> None:
        self.policies = policies
        self.cached = cached
        self.watch = watch
        self.native = native

    def record(self) -> None:
        self.found = native_state(kind for kind, _, _ in self.native)
        self.hooks = self.watch()
        self.entered = Entered(
            recording.new_mode(self.policies, RegionCache() if self.cached else None), _lifted_mode.current(),
            active=bool(self.policies),
        )

    def change(self) -> None:
        _set_native(self.native)
        self.entered.enter()
        if self.hooks is not None:
            self.hooks.begin()

    def restore(self, *, again: bool) -> None:
        _module_regions.leave_interrupted()
        if self.hooks is not None:
            self.hooks.remove()
        leave_ended(regions())      # a recompute ends with an exception when it has what backward needs
        self.entered.leave(again=again)
        _set_native(self.found)


def _set_native(states: NativeState) -> None:
    for kind, enabled, dtype in states:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


class Snapshot:
    """The autocast state of this thread at this moment, to be restored elsewhere: another thread, or a recompute."""

    def __init__(self) -> None:
        mode = _lifted_mode.current()
        self.policies = mode.policies if mode is not None else ()
        self.cached = mode is not None and mode.cache is not None
        self.native = native_state(TORCH)
        self.watch = _module_regions.watch_again()

    def restored(self) -> reentered:
        """A context in which the state is as it was; weights are cast into a cache of its own."""
        return reentered(self.policies, cached=self.cached, watch=self.watch, native=self.native)

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
    watch = _module_regions.watch_again()

    def recompute(*args: Any, **kwargs: Any) -> Any:
        with reentered(mode.policies, cached=mode.cache is not None, watch=watch):
            return function(*args, **kwargs)

    return recompute


_checkpoint_frames.reenter = _run_again
