"""The Triton operator of docs/custom-operators.md, which follows its rule. The page's other code is run as it is."""

import re
import runpy
from pathlib import Path

import pytest
import torch

from ampkit import autocast
from tests.helpers.paths import ROOT

HEAD = "import torch\nfrom torch import Tensor\nfrom ampkit import Rule, register_op\n"


def test_the_triton_operator_of_the_page_follows_its_rule(tmp_path: Path) -> None:
    """In Triton's interpreter: float32 by `register_op`, the dtype that comes where autocast is off."""
    pytest.importorskip("triton", reason="it is in ampkit[dev]")
    page = (ROOT / "docs" / "custom-operators.md").read_text(encoding="utf-8")
    found = re.search(r"^```python\n(import triton\n.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert found is not None
    file = tmp_path / "operator.py"
    file.write_text(HEAD + found[1])
    names, x = runpy.run_path(str(file)), torch.randn(2000)
    try:
        torch.library.wrap_triton(names["double_kernel"])
    except RuntimeError:
        pytest.skip("wrap_triton of this torch takes no kernel of Triton's interpreter")
    double = names["double"]
    assert torch.equal(double(x.half()), 2 * x.half())
    with autocast("cpu", torch.float16):
        result = double(x.half())
    assert result.dtype is torch.float32
    assert torch.equal(result, 2 * x.half().float())
