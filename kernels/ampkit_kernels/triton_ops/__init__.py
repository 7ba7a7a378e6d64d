"""The operations as Triton kernels: the only modules of this package that import Triton.

Each launcher has the signature of the function of the same name in `reference` or `reference_optimizers`, and takes
what `dispatch.served` hands it: tensors that are dense, on one device, and not empty. `adamw_plan` and `sgd_plan` keep
what launching found out, for lists that are stepped again and again.
"""

from .adamw import adamw_, adamw_plan
from .cast import cast_
from .counts import nonfinite_counts
from .multiply import multiply_
from .norm import norm_and_check
from .sgd import sgd_, sgd_plan
from .unscale import unscale_
from .unscale_into import unscale_into_

__all__ = [
    "adamw_", "adamw_plan", "cast_", "multiply_", "nonfinite_counts", "norm_and_check", "sgd_", "sgd_plan", "unscale_",
    "unscale_into_",
]
