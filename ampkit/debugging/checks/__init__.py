"""The checks of an examination, each a class in a file of its own. `CHECKS` is the whole list.

| check | finds | file |
| --- | --- | --- |
| `LoopOrder` | calls of scaler, backward, clipping, optimizer and scheduler in the wrong order | `loop_order` |
| `NonFinite` | the operator where inf and NaN begin, and why | `nonfinite`, with the four files below |
| `Divergence` | a loss that grows until it overflows | `divergence` |
| `Zeros` | results, and casts in hooks, that rounding turns into 0 | `zeros` |
| `Integers` | positions and counts that become equal in 16 bits | `integers` |
| `Sums` | sums, counts and averages that stop growing | `sums` |
| `StaleCasts` | casts older than their weight | `stale_casts` |
| `StateInPlace` | float32 state that is rounded in place | `state_in_place` |
| `Updates` | parameters without a gradient, or whose updates are rounded away | `updates` |
| `Linearity` | hooks and custom functions whose gradient does not follow the loss; in some steps | `linearity` |

`NonFinite` uses `data` (values that came with the data), `origins` (which non-finite values of a step are errors),
`causes` (why an operator's result is not finite) and `replay` (which earlier calls made it so by rounding). To add a
check, write a subclass of `Check` and add it to the list; to remove one, delete its file and its entry.
"""

from ampkit.debugging.checks.check import Check
from ampkit.debugging.checks.divergence import Divergence
from ampkit.debugging.checks.integers import Integers
from ampkit.debugging.checks.linearity import Linearity
from ampkit.debugging.checks.loop_order import LoopOrder
from ampkit.debugging.checks.nonfinite import NonFinite
from ampkit.debugging.checks.stale_casts import StaleCasts
from ampkit.debugging.checks.state_in_place import StateInPlace
from ampkit.debugging.checks.sums import Sums
from ampkit.debugging.checks.updates import Updates
from ampkit.debugging.checks.zeros import Zeros

CHECKS: tuple[type[Check], ...] = (
    LoopOrder,
    NonFinite,
    Divergence,
    Zeros,
    Integers,
    Sums,
    StaleCasts,
    StateInPlace,
    Updates,
    Linearity,
)

__all__ = ["CHECKS", "Check", "LoopOrder"]
