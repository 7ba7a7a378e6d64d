"""The ahead-of-time check itself: it passes good code and no bad code. `make kernels-check` runs it whole."""

import ast
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("triton.backends.nvidia")

from tests.kernels.aot import INSTRUCTION, Case, Code, faults, innermost_loops  # noqa: E402  (needs Triton's NVIDIA backend)

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


def unrolled(*loops: str) -> Code:
    names = {"L": "LDG.E.128", "S": "STG.E.128"}
    return replace(GOOD, loops=tuple(tuple(names[kind] for kind in loop) for loop in loops))


def test_an_unrolled_loop_is_judged_by_the_turn() -> None:
    assert faults(case(lists_read=2), unrolled("LLLSSLLLSSLLLSS", "LL", "S", "")) == []


def test_of_one_list_most_is_loaded_first() -> None:
    assert faults(case(), unrolled("LLLSLSSS")) == []
    assert len(faults(case(lists_read=2), unrolled("LLLSLSSS"))) == 1


@pytest.mark.parametrize(
    ("code", "expected", "text"),
    [
        (GOOD, {"wide_loads": 5}, "4 128-bit loads, expected at least 5"),
        (GOOD, {"wide_stores": 3}, "2 128-bit stores, expected at least 3"),
        (GOOD, {"max_registers": 59}, "60 registers per thread, ceiling 59"),
        (GOOD, {"programs": 5}, "4 programs of 60 registers fit a multiprocessor, its grid has 5"),
        (Code(GOOD.accesses, 60, 16, 0), {}, "spills: stack 16 bytes"),
        (Code(Counter({"STL": 2}), 60, 0, 0), {}, "2 local accesses"),
        (unrolled("LLS", "LSL"), {}, "a load waits for a store: 1 loads before the first one in a turn"),
        (unrolled("LSLS"), {"lists_read": 2}, "1 loads before the first one in a turn of a loop over 2 lists"),
    ],
)
def test_each_fault_is_named(code: Code, expected: dict[str, int], text: str) -> None:
    found = faults(case(**expected), code)
    assert len(found) == 1
    assert text in found[0]


SASS = """
        /*0010*/                   LDG.E R2, desc[UR18][R2.64] ;
        /*0020*/              @!P0 BRA 0x00a0 ;
        /*0030*/                   LDG.E.128 R4, desc[UR18][R2.64] ;
        /*0040*/                   FMUL R4, R4, R5 ;
        /*0050*/               @P1 STG.E.128 desc[UR18][R2.64], R4 ;
        /*0060*/               @P0 BRA 0x0030 ;
        /*0070*/                   STG.E desc[UR18][R2.64], R4 ;
        /*0080*/               @P0 BRA.U 0x10 ;
        /*0090*/                   BRA 0x90 ;
        /*00a0*/                   EXIT ;
"""


def test_the_innermost_loops_of_machine_code() -> None:
    """One around another, and the empty one behind every program's end."""
    code = [(int(at, 16), text) for at, text in INSTRUCTION.findall(SASS)]
    assert innermost_loops(code) == (("LDG.E.128", "STG.E.128"),)
