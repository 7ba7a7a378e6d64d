"""docs/differences.md: every test it names is there, and every difference of a region names one."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "differences.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(test_\w+)::(test_\w+)`", TEXT)))


def functions_of(module: str) -> set[str]:
    """Names of the test functions of a file in tests/."""
    (path,) = (ROOT / "tests").rglob(f"{module}.py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("module", "function"), NAMED)
def test_named_tests_exist(module, function):
    assert function in functions_of(module)


def test_every_row_before_the_scaler_names_a_test():
    rows = [line for line in TEXT.partition("\n## GradScaler")[0].splitlines() if line.startswith("| ")]
    differences = [row for row in rows if not row.startswith(("| torch.amp |", "| --- "))]
    assert len(differences) > 30
    assert [row for row in differences if not re.search(r"`test_\w+::test_\w+` \|$", row)] == []
