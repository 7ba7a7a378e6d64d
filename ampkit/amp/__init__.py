"""The interface of Apex amp: `from ampkit import amp` takes the place of `from apex import amp`.

- `frontend`: `initialize`, `scale_loss`, `state_dict` and the other functions around a training loop.
- `levels`: the meaning of O0 to O3, which overrides they accept, and which models and optimizers are refused.
- `scaled_gradients`: gradients from a scaled backward to the step, and the scaler of one loss.
- `fp16_optimizer`: `FP16Optimizer`, after Apex's FP16_Optimizer.
- `fp32_checkpoints`: state dicts of a 16-bit model in float32.
- `function_casts`: `half_function`, `register_half_function`, `disable_casts`, ....
"""

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
