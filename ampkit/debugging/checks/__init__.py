"""The checks of an examination, each a class in a file of its own. `CHECKS` is the whole list.

| check | finds | file |
| --- | --- | --- |
| `LoopOrder` | calls of scaler, backward, clipping, optimizer and scheduler in the wrong order | `loop_order` |
| `NonFinite` | the operator where inf and NaN begin, and why | `nonfinite`, with the four files below |
| `Divergence` | a loss that grows until it overflows | `divergence` |
| `Zeros` | results, and casts in hooks, that rounding turns into 0 | `zeros` |
| `Casts` | values that a dtype cannot hold: integers that wrap around, values that become equal | `casts` |
| `Sums` | sums, counts and averages that stop growing, and 16-bit sums inside operators | `sums` |
| `StaleCasts` | casts older than their weight | `stale_casts` |
| `StateInPlace` | float32 state that is rounded in place, or replaced | `state_in_place` |
| `ScaledNumbers` | numbers that carry the loss scale, and are used as if they did not | `scaled_numbers` |
| `Updates` | gradients that rounding makes 0, and 16-bit updates that are rounded away | `updates` |
| `Unchanged` | steps that change nothing | `unchanged` |
| `Trained` | gradients that no optimizer uses, and optimizers without gradients | `trained` |
| `Clipping` | clipping of nothing | `clipping` |
| `Replicas` | replicated parameters that differ on several ranks, and not on purpose | `replicas` |
| `Linearity` | custom functions whose gradient does not follow the loss; in some steps | `linearity` |

`NonFinite` uses `data` (values that came with the data), `origins` (which non-finite values of a step are errors),
`causes` (why an operator's result is not finite) and `replay` (the earlier calls whose rounding is the reason). To add
a check, write a subclass of `Check` and add it to the list; to remove one, delete its file and its entry.
"""

from ampkit.debugging.checks.casts import Casts
from ampkit.debugging.checks.check import Check
from ampkit.debugging.checks.clipping import Clipping
from ampkit.debugging.checks.divergence import Divergence
from ampkit.debugging.checks.linearity import Linearity
from ampkit.debugging.checks.loop_order import LoopOrder
from ampkit.debugging.checks.nonfinite import NonFinite
from ampkit.debugging.checks.replicas import Replicas
from ampkit.debugging.checks.scaled_numbers import ScaledNumbers
from ampkit.debugging.checks.stale_casts import StaleCasts
from ampkit.debugging.checks.state_in_place import StateInPlace
from ampkit.debugging.checks.sums import Sums
from ampkit.debugging.checks.trained import Trained
from ampkit.debugging.checks.unchanged import Unchanged
from ampkit.debugging.checks.updates import Updates
from ampkit.debugging.checks.zeros import Zeros

CHECKS: tuple[type[Check], ...] = (
    LoopOrder,
    NonFinite,
    Divergence,
    Zeros,
    Casts,
    Sums,
    StaleCasts,
    StateInPlace,
    ScaledNumbers,
    Updates,
    Unchanged,
    Trained,
    Clipping,
    Replicas,
    Linearity,
)

__all__ = ["CHECKS", "Check", "LoopOrder"]
