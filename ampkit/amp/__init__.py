"""The interface of Apex amp: `from ampkit import amp` takes the place of `from apex import amp`."""

from typing import TYPE_CHECKING, Any

from ampkit.amp.frontend import (
    disable_casts,
    float_function,
    half_function,
    initialize,
    load_state_dict,
    loss_scalers,
    master_params,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
    scale_loss,
    state_dict,
)

__all__ = [
    "disable_casts", "float_function", "half_function", "initialize", "load_state_dict", "loss_scalers",
    "master_params", "promote_function", "register_float_function", "register_half_function",
    "register_promote_function", "scale_loss", "state_dict",
]

# Names that scripts have from Apex's amp, or from torch's module of that name, and what stands in their place.
_ELSEWHERE = {
    "GradScaler": "ampkit.GradScaler",
    "autocast": "ampkit.autocast",
    "custom_bwd": "ampkit.custom_bwd",
    "custom_fwd": "ampkit.custom_fwd",
    "is_autocast_available": "torch.amp.is_autocast_available",
    "FP16_Optimizer": "ampkit.FP16Optimizer",
    "scaler": "amp.loss_scalers(optimizer)",
    "_amp_state": "amp.loss_scalers(optimizer) for its loss_scalers, amp.initialize(verbosity=...) for its verbosity",
    "init": "amp.initialize(model, optimizer, opt_level='O1')",
    "opt_levels": "amp.initialize(..., opt_level='O1')",
    "handle": "amp.scale_loss and amp.disable_casts",
    "lists": "ampkit.Policy, whose rules() lists them",
    "register": "amp.register_half_function, amp.register_float_function or amp.register_promote_function",
}

if not TYPE_CHECKING:       # which would take every name for one of these

    def __getattr__(name: str) -> Any:
        """Raise, saying what stands in the place of a name that is elsewhere."""
        hint = f"; use {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
        raise AttributeError(f"module 'ampkit.amp' has no attribute {name!r}{hint}")
