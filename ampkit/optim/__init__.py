"""Optimizers that unscale, clip and skip on the device: `torch.optim`'s AdamW and SGD, stepped by one kernel.

They take `torch.optim`'s constructor arguments and exchange `state_dict`s with it both ways. During a step a gradient
scaler sets `found_inf` (skip) and `grad_scale` (divide gradients by it). On a GPU gradients are only read, on a CPU
they are multiplied in place by a scale. With `max_grad_norm` the step also clips, and writes no gradient.

With `rounding="stochastic"` or `masters="remainder"` bfloat16 weights keep updates that rounding to nearest loses.
Moments have the dtype `state_dtype`. With any of the three a step is computed in float32 and rounded once. On a CPU
torch's fused functions compute it (`float32_step`).
"""

from ampkit.optim.adamw import AdamW
from ampkit.optim.sgd import SGD

__all__ = ["SGD", "AdamW"]
