"""The ahead-of-time check over one variant; `make kernels-check` runs it whole."""

import ast
import os
import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT


@pytest.mark.parametrize(("interpret", "code", "text"), [
    ("0", 0, "1 variants, 0 wrong"), ("1", 2, "TRITON_INTERPRET is set: nothing can be compiled"),
])
def test_one_variant_and_the_bad_kernels(interpret: str, code: int, text: str) -> None:
    """Code 0 says that the variant is fine and that each bad kernel was judged bad for its fault."""
    pytest.importorskip("triton.backends.nvidia")
    command = [sys.executable, "-m", "tests.kernels.aot_check", "--capability", "90", "--only", "unscale fp32 checks"]
    environment = {**os.environ, "TRITON_INTERPRET": interpret}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, text in done.stdout + done.stderr) == (code, True), done.stdout + done.stderr


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
