"""What operator lists are made of: rules, and groups of operators that share one for one reason."""

from enum import Enum
from typing import NamedTuple

__all__ = ["Group", "Rule"]


class Rule(Enum):
    """What autocast does with an operator's eligible arguments.

    Eligible is a floating-point tensor on the region's device, float64 excepted.
    """

    LOWER = "lower"                            # cast every eligible tensor to the region's dtype
    FLOAT32 = "float32"                        # cast every eligible tensor to float32
    FLOAT32_DTYPE_ARG = "float32_dtype_arg"    # leave tensors alone, ask for float32 through `dtype=`
    PROMOTE = "promote"                        # cast all of them to the widest dtype among them
    BANNED = "banned"                          # raise, and say what to do instead
    DECOMPOSE = "decompose"                    # a composite: its own code runs, the region active inside
    KEEP = "keep"                              # call it on the arguments as they came


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
