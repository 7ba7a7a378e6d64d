"""The ahead-of-time check over one variant; `make kernels-check` runs it whole."""

import os
import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT


@pytest.mark.parametrize(
    ("interpret", "code", "text"),
    [
        ("0", 0, "4 variants, 0 wrong"),
        ("1", 2, "TRITON_INTERPRET is set: nothing can be compiled"),
    ],
)
def test_one_variant_and_the_bad_kernels(interpret: str, code: int, text: str) -> None:
    """Code 0 says that the variant is fine and that each bad kernel was judged bad for its fault."""
    pytest.importorskip("triton.backends.nvidia")
    command = [sys.executable, "-m", "tests.kernels.aot_check", "--capability", "90", "--only", "unscale fp32 checks"]
    environment = {**os.environ, "TRITON_INTERPRET": interpret}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, text in done.stdout + done.stderr) == (code, True), done.stdout + done.stderr
