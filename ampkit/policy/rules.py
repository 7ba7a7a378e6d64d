"""Rules of operators, and groups of operators that share a rule for one reason: the parts of operator lists."""

from enum import Enum
from typing import NamedTuple

__all__ = ["Group", "Rule"]


class Rule(Enum):
    """The action of autocast on an operator's eligible arguments.

    Eligible are floating-point tensors on the region's device, except float64.
    """

    LOWER = "lower"  # cast every eligible tensor to the region's dtype
    LOWER_FLOAT32_OUT = "lower_float32_out"  # matrix products: the same casts, a float32 result
    FLOAT32 = "float32"  # cast every eligible tensor to float32
    FLOAT32_DTYPE_ARG = "float32_dtype_arg"  # cast nothing, pass `dtype=torch.float32`
    PROMOTE = "promote"  # cast eligible tensors to the widest dtype among them; float16 and bfloat16 give float32
    BANNED = "banned"  # raise an error that says what to do instead
    DECOMPOSE = "decompose"  # a composite: its own code runs, and the region is active inside
    KEEP = "keep"  # cast nothing
    # Products in FP8 for the operators and sizes that have them, else LOWER; see `float8_recipes`:
    FLOAT8_TENSORWISE = "float8_tensorwise"  # one scale for a matrix; gradients in e5m2
    FLOAT8_ROWWISE = "float8_rowwise"  # a scale for each row, a power of 2; e4m3
    FLOAT8_ROWWISE_GW_HP = "float8_rowwise_gw_hp"  # the same, but gradients of weights in the region's dtype


class Group(NamedTuple):
    """Operators that share one rule for one reason, in some versions of torch."""

    rule: Rule
    why: str
    ops: str  # ATen names separated by whitespace
    since: tuple[int, int] = (0, 0)  # the first version, major and minor
    until: tuple[int, int] = (1000, 0)  # the first version to which the group does not apply
