"""When numbers go wrong: which operator, which module, which line, why, and the smallest change that helps."""

from ampkit.debugging.detect import detect_nonfinite
from ampkit.debugging.find import find_nonfinite
from ampkit.debugging.loop import check_loop
from ampkit.debugging.monitor import TensorMonitor
from ampkit.debugging.precision import compare_precision
from ampkit.debugging.report import NonFiniteError

__all__ = [
    "NonFiniteError", "TensorMonitor", "check_loop", "compare_precision", "detect_nonfinite", "find_nonfinite",
]
