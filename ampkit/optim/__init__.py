"""Optimizers that unscale, clip and skip on the device: `torch.optim`'s AdamW and SGD, stepped by one kernel.

They take `torch.optim`'s constructor arguments, exchange `state_dict`s with it both ways, and read, for the
one step during which a gradient scaler has set them, `found_inf` (skip), `grad_scale` (divide gradients by)
and `grad_multiplier` (multiply gradients by). On a GPU gradients are only read, on a CPU they are multiplied in place.

bfloat16 weights keep updates that rounding to nearest loses by `rounding="stochastic"` or `masters="remainder"`;
moments have the dtype `state_dtype`. Each of the three makes the step one in float32, on the CPU too, rounded once.
"""

from ampkit.optim.adamw import AdamW
from ampkit.optim.sgd import SGD

__all__ = ["SGD", "AdamW"]
