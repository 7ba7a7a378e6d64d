"""The Triton operator of docs/custom-operators.md, which follows its rule. The page's other code is run as it is."""

import re
import runpy
from pathlib import Path

import pytest
import torch

from ampkit import Policy, Rule, autocast, record_casts, register_op
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


def test_the_result_of_custom_op_names_its_operator() -> None:
    @torch.library.custom_op("test_custom_operators::named", mutates_args=())
    def named(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    policy = Policy.default("cpu").with_rules({named: "float32"})
    assert policy.explain(named).rule is Rule.FLOAT32
    with autocast("cpu", policy=policy):
        assert named(torch.ones(2, dtype=torch.bfloat16)).dtype is torch.float32


def test_parameters_and_operators_may_have_names_that_handlers_use() -> None:
    """A parameter `map` hid the builtin of this name, and with a parameter `_keys` every region raised SyntaxError."""
    schemas = {
        "linear": "Tensor type, Tensor _dtype",
        "map": "Tensor map, Tensor _mode",
        "_general": "Tensor _, Tensor _keys",
        "_operator": "Tensor _of_x, Tensor x",
    }
    library = torch.library.Library("test_custom_operators", "FRAGMENT")
    for name, parameters in schemas.items():
        library.define(f"{name}({parameters}) -> Tensor")
        library.impl(name, torch.mm, "CompositeExplicitAutograd")
    library.define("stacked(Tensor[] map) -> Tensor")
    library.impl("stacked", torch.cat, "CompositeExplicitAutograd")
    for name in schemas:
        register_op(f"test_custom_operators::{name}", "lower")
    register_op("test_custom_operators::stacked", "promote")
    ops, x = torch.ops.test_custom_operators, torch.randn(2, 2)
    with autocast("cpu", torch.bfloat16):
        assert [getattr(ops, name)(x, x).dtype for name in schemas] == [torch.bfloat16] * len(schemas)
        assert ops.stacked([x, x.bfloat16()]).dtype is torch.float32
        with record_casts():
            assert ops.stacked([x, x.bfloat16()]).dtype is torch.float32
