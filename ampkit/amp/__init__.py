"""The interface of Apex amp: `from ampkit import amp` takes the place of `from apex import amp`.

- `frontend`: `initialize`, `scale_loss`, `state_dict` and the other functions around a training loop.
- `levels`: what O0 to O3 mean, which overrides they accept, and which models and optimizers are refused.
- `scaled_gradients`: gradients from a scaled backward to the step, and the scaler of one loss.
- `fp16_optimizer`: `FP16Optimizer`, after Apex's FP16_Optimizer.
- `fp32_checkpoints`: state dicts of a 16-bit model in float32.
- `function_casts`: `half_function`, `register_half_function`, `disable_casts` and their kind.
"""

from typing import TYPE_CHECKING, Any

from ampkit.amp.frontend import initialize, load_state_dict, loss_scalers, master_params, scale_loss, state_dict
from ampkit.amp.function_casts import (
    disable_casts,
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)

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

# Names that scripts import from Apex's amp or torch.amp, and what to use in their place.
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

if not TYPE_CHECKING:  # a type checker would accept every name

    def __getattr__(name: str) -> Any:
        """Raise `AttributeError` that names the replacement of a name from Apex or torch."""
        hint = f"; use {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
        raise AttributeError(f"module 'ampkit.amp' has no attribute {name!r}{hint}")
