"""A scaler's parts as plain attributes, and back: the form in which scalers are pickled, from version 0.1 on."""

from __future__ import annotations

from typing import Any

from ampkit.scaler.iteration import Iteration
from ampkit.scaler.live_scale import LiveScale
from ampkit.scaler.saved_state import OWN_KEY
from ampkit.scaler.step_log import StepLog
from ampkit.scaler.unscaling import Unscaling

_ITERATION = ("_per_optimizer_states", "_norm", "_scale_calls", "_losses", "_scale_used")
"""What version 0.1 pickled of an iteration; ignored on loading."""


_SETTINGS = ("process_group", "allow_fp16", "on_stuck", "count_every_step")


def require_picklable(iteration: Iteration, unscaling: Unscaling) -> None:
    """Raise for state that a pickle would lose, and for a process group."""
    if iteration.states:
        raise AssertionError(
            "A GradScaler instance may only be pickled at the beginning of an iteration, or at the end after "
            "scaler.update(): what is known about this iteration's gradients would be lost."
        )
    if unscaling.process_group is not None:
        raise TypeError(
            "a GradScaler with a process_group cannot be pickled, because process groups cannot: save "
            "scaler.state_dict() instead"
        )


def flatten(live: LiveScale, unscaling: Unscaling, log: StepLog) -> dict[str, Any]:
    """What lasts of these parts, tensors as numbers. Reads the device."""
    saved = live.state_dict()
    settings = (unscaling.process_group, unscaling.allow_fp16, log.on_stuck, log.count_every_step)
    return {
        "_loss_scale": live.strategy,
        "_history_size": live.history_size,
        "_init_scale": saved["scale"],
        "_init_growth_tracker": saved["_growth_tracker"],
        "_init_counters": saved[OWN_KEY]["counters"],
        "_init_totals": saved[OWN_KEY]["totals"],
        **dict(zip(_SETTINGS, settings, strict=True)),
        "_warned": log.warned,
        "_alarm_due": log.alarm_due,
    }


def split(state: dict[str, Any]) -> tuple[LiveScale, list[Any], dict[str, Any]]:
    """The scale among flattened attributes, on no device; the settings of the other parts; and what is left."""
    rest = {name: value for name, value in state.items() if name not in _ITERATION}
    live = LiveScale(rest.pop("_loss_scale"), rest.pop("_history_size"))
    live.init_scale = rest.pop("_init_scale")
    live.init_growth_tracker = rest.pop("_init_growth_tracker")
    live.init_counters = rest.pop("_init_counters")
    live.init_totals = rest.pop("_init_totals")
    return live, [rest.pop(name) for name in _SETTINGS], rest
