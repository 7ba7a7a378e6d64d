"""Tools that find where numbers go wrong: the operator, the module, the line, the cause, and the smallest change.

| question | tool | file |
| --- | --- | --- |
| what is wrong in this run, whatever it is? | `examine` | `examine`, `cheap_looks` |
| where does inf or NaN begin, in steps as they run? | `detect_nonfinite` | `detect` |
| the same, with a change that was tried | `find_nonfinite` | `find` |
| are scaler, gradients and optimizer called in the right order? | `check_loop` | `loop` |
| which operators lose precision against float32? | `compare_precision` | `precision` |
| is low precision to blame, and what should be kept out of it? | `rehearse` | `rehearsal` |
| the same for a script that stays as it is | `ampkit debug` | `cli` |

`operator_calls` observes the operators for `detect` and `precision`, with the callers from `call_sites` and the
schema's facts from `operator_facts`. `nonfinite_origins` follows inf and NaN to a symptom, and `causes` finds out why;
`replay` runs the calls that lead there again, from a `tape`, to find those whose rounding is the cause. `two_scales`
finds gradients that do not follow the loss.
`reference_copies` holds a step's float32 values, by `storage_map`; `loss_changes` has what each module's rounding is
expected to change of the loss. `snapshot` restores a step's state, `regions` gives a program's regions another policy,
`rehearse_script` runs a script for a rehearsal, `proposed_changes` has the changes and the advice, and `report` the
results of all tools.
"""

from ampkit.debugging.detect import detect_nonfinite
from ampkit.debugging.examine import examine
from ampkit.debugging.find import find_nonfinite
from ampkit.debugging.loop import check_loop
from ampkit.debugging.precision import compare_precision
from ampkit.debugging.rehearsal import rehearse
from ampkit.debugging.report import NonFiniteError

__all__ = [
    "NonFiniteError",
    "check_loop",
    "compare_precision",
    "detect_nonfinite",
    "examine",
    "find_nonfinite",
    "rehearse",
]
