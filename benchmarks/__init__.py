"""Benchmarks of ampkit and torch.amp, on the same work in the same run: `python -m benchmarks`.

`registry` lists the cases, `case` defines a case, `measure` times it; `report` turns a result file into Markdown,
`compare` lists what got slower between two result files.
"""

import os

# Silence torch's profiler, which counts copies here; torch reads these variables when it is imported.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
