"""When numbers go wrong: which operator, which module, which line, why, and the smallest change that helps."""

from ampkit.debugging.checks import assert_close_to_reference, assert_finite
from ampkit.debugging.detect import detect_nonfinite
from ampkit.debugging.find import find_nonfinite
from ampkit.debugging.hashes import HashDifference, HashLog, compare_hashes, record_hashes
from ampkit.debugging.monitor import TensorMonitor
from ampkit.debugging.operator_stats import MatrixShape, OperatorStat, OperatorStats, collect_operator_stats
from ampkit.debugging.precision import PrecisionComparison, compare_precision
from ampkit.debugging.precision_report import GradientError, ModuleError, OperatorError, PrecisionReport
from ampkit.debugging.report import Finding, NonFiniteError, NonFiniteReport
from ampkit.debugging.search import SearchResult, search_policy
from ampkit.debugging.suggest_rules import RuleSuggestions, RuleTrial, suggest_rules

__all__ = [
    "Finding", "GradientError", "HashDifference", "HashLog", "MatrixShape", "ModuleError", "NonFiniteError",
    "NonFiniteReport", "OperatorError", "OperatorStat", "OperatorStats", "PrecisionComparison", "PrecisionReport",
    "RuleSuggestions", "RuleTrial", "SearchResult", "TensorMonitor", "assert_close_to_reference", "assert_finite",
    "collect_operator_stats", "compare_hashes", "compare_precision", "detect_nonfinite", "find_nonfinite",
    "record_hashes", "search_policy", "suggest_rules",
]
