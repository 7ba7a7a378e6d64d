"""Optimizers that unscale, clip and skip on the device: `torch.optim`'s AdamW and SGD, stepped by one kernel.

They take `torch.optim`'s constructor arguments, exchange `state_dict`s with it both ways, and read, for the
one step during which a gradient scaler has set them, `found_inf` (skip), `grad_scale` (divide gradients by)
and `grad_multiplier` (multiply gradients by). Gradients are only read.
"""

from ampkit.optim.adamw import AdamW
from ampkit.optim.sgd import SGD

__all__ = ["SGD", "AdamW"]
