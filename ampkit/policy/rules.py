"""What operator lists are made of: rules, and groups of operators that share one for one reason."""

from enum import Enum
from typing import NamedTuple

__all__ = ["Group", "Rule"]


class Rule(Enum):
    """What autocast does with an operator's eligible arguments.

    Eligible is a floating-point tensor on the region's device, float64 excepted.
    """

    LOWER = "lower"                            # cast every eligible tensor to the region's dtype
    LOWER_FLOAT32_OUT = "lower_float32_out"    # of matrix products: the same casts, a float32 result
    FLOAT32 = "float32"                        # cast every eligible tensor to float32
    FLOAT32_DTYPE_ARG = "float32_dtype_arg"    # leave tensors alone, ask for float32 through `dtype=`
    PROMOTE = "promote"                        # cast all of them to the widest dtype among them
    BANNED = "banned"                          # raise, and say what to do instead
    DECOMPOSE = "decompose"                    # a composite: its own code runs, the region active inside
    KEEP = "keep"                              # call it on the arguments as they came
    # FP8 products, for the operators and sizes that have them, elsewhere LOWER; see `float8_recipes`:
    FLOAT8_TENSORWISE = "float8_tensorwise"    # one scale for a matrix; gradients in e5m2
    FLOAT8_ROWWISE = "float8_rowwise"          # a scale for each row, a power of 2; e4m3
    FLOAT8_ROWWISE_GW_HP = "float8_rowwise_gw_hp"   # the same, but gradients of weights in the region's dtype


class Group(NamedTuple):
    """Operators that share one rule for one reason.

    `ops` holds ATen names separated by whitespace. A group applies to torch versions from `since` up to, not
    including, `until`, both ``(major, minor)``; outside that span its names may not even exist.
    """

    rule: Rule
    why: str
    ops: str
    since: tuple[int, int] = (0, 0)
    until: tuple[int, int] = (1000, 0)
