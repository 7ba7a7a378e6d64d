"""ampkit and torch.amp on the same work in the same run: `python -m benchmarks`.

`registry` says what is measured, `case` what a case is, `measure` how it is timed; `report` turns a result file into
Markdown, `compare` says what got slower between two of them.
"""

import os

# Silences torch's profiler, which counts copies here; torch reads these when it is imported.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
