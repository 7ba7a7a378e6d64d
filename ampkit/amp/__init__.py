"""The interface of Apex amp: `from ampkit import amp` takes the place of `from apex import amp`."""

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
