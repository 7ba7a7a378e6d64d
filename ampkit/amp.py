"""Apex amp's names for what ampkit does: `from ampkit import amp` takes the place of `from apex import amp`.

`loss_scalers` is no name of Apex's: the scalers behind the losses, to ask and to plot.
"""

from ampkit.whole_model.function_casts import (
    disable_casts,
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from ampkit.whole_model.levels import amp_state_dict as state_dict
from ampkit.whole_model.levels import initialize, loss_scalers, master_params, scale_loss
from ampkit.whole_model.levels import load_amp_state_dict as load_state_dict

__all__ = [
    "disable_casts",
    "float_function",
    "half_function",
    "initialize",
    "load_state_dict",
    "loss_scalers",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
]
