"""The ahead-of-time check itself: it passes good code and no bad code. `make kernels-check` runs it whole."""

import ast
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("triton.backends.nvidia")

from tests.kernels.aot import Case, Code, faults  # noqa: E402  (needs Triton's NVIDIA backend)

GOOD = Code(Counter({"LDG.E.128": 4, "STG.E.128": 2, "LDG.E": 3}), registers=60, stack=0, local=0)


def case(**expected: int) -> Case:
    return Case("a kernel", None, {}, 8, expected.pop("max_registers", 64), **expected)


def run(*arguments: str, interpret: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "tests.kernels.aot_check", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_one_variant_and_both_bad_kernels() -> None:
    """Code 0 says that the variant is fine and that the two bad kernels were judged bad."""
    done = run("--capability", "90", "--only", "unscale fp32")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok     sm_90  unscale fp32" in done.stdout
    assert "1 variants, 0 wrong" in done.stdout


def test_interpret_mode_is_refused() -> None:
    done = run(interpret=True)
    assert done.returncode == 2
    assert "TRITON_INTERPRET is set: nothing can be compiled" in done.stderr


def launches(source: str) -> list[ast.Call]:
    """Every `kernel[grid](...)` in a module."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [call for call in calls if isinstance(call.func, ast.Subscript) and "kernel[" in ast.unparse(call.func)]


def test_every_launch_says_whether_products_may_be_fused_with_sums() -> None:
    """Left open, Triton 3.9 warns and 3.10 will compute otherwise than the versions before it."""
    found = {path.name: launches(path.read_text("utf-8")) for path in (ROOT / "kernels").rglob("*.py")}
    silent = [
        f"{name}:{call.lineno}" for name, calls in found.items() for call in calls
        if "enable_fp_fusion" not in [keyword.arg for keyword in call.keywords]
    ]
    assert not silent
    assert sum(map(len, found.values())) >= 5


def test_good_code_has_no_faults() -> None:
    assert faults(case(wide_loads=4, wide_stores=2), GOOD) == []


@pytest.mark.parametrize(
    ("code", "expected", "text"),
    [
        (GOOD, {"wide_loads": 5}, "4 128-bit loads, expected at least 5"),
        (GOOD, {"wide_stores": 3}, "2 128-bit stores, expected at least 3"),
        (GOOD, {"max_registers": 59}, "60 registers per thread, ceiling 59"),
        (Code(GOOD.accesses, 60, 16, 0), {}, "spills: stack 16 bytes"),
        (Code(Counter({"STL": 2}), 60, 0, 0), {}, "2 local accesses"),
    ],
)
def test_each_fault_is_named(code: Code, expected: dict[str, int], text: str) -> None:
    found = faults(case(**expected), code)
    assert len(found) == 1
    assert text in found[0]
