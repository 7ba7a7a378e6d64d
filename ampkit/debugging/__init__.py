"""Finds numerical errors in a training run: the place, the cause and a fix.

| question | answer | file |
| --- | --- | --- |
| is anything wrong in this run? | `examine`, `Examination`, `ampkit debug train.py` | `examination`, `cli` |
| which problems are checked, and where? | the list `CHECKS` | `checks` |
| does low precision cost this training anything? | `rehearse`, `ampkit debug rehearse` | `rehearsal` |

`observe` reports operators, steps and calls of the loop to the checks, and decides nothing. A check adds a `Finding`
to the `Report` (`finding`). `changes` has the fixes, and `trials` runs a step or a script again with a fix. `verify`
compares the losses of these runs. `snapshot` restores a step's state.
"""

from ampkit.debugging.examination import Examination, examine
from ampkit.debugging.finding import NonFiniteError
from ampkit.debugging.rehearsal import rehearse

__all__ = ["Examination", "NonFiniteError", "examine", "rehearse"]
