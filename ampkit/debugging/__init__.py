"""When numbers go wrong: which operator, which module, which line, why, and the smallest change that helps."""

from ampkit.debugging.detect import detect_nonfinite
from ampkit.debugging.find import find_nonfinite
from ampkit.debugging.report import Finding, NonFiniteError, NonFiniteReport

__all__ = ["Finding", "NonFiniteError", "NonFiniteReport", "detect_nonfinite", "find_nonfinite"]
