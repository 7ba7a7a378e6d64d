"""Operators, bytes, casts and shapes are counted as arithmetic says; rules are proposed only when timed."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from ampkit import Policy, Rule, autocast
from ampkit.__main__ import main
from ampkit.debugging import OperatorStats, collect_operator_stats, suggest_rules
from ampkit.debugging.operator_facts import tensors_in
from tests.debugging.models import MODELS, loss_of, make


def stats_of(model: nn.Module, x: Tensor, dtype: torch.dtype = torch.bfloat16) -> OperatorStats:
    with collect_operator_stats(model) as stats, autocast("cpu", dtype=dtype):
        model(x)
    return stats


def test_calls_bytes_and_casts_by_hand() -> None:
    model = nn.Sequential(nn.Linear(16, 8, bias=False), nn.Linear(8, 24, bias=False))
    stats = stats_of(model, torch.randn(32, 16))
    products = [one for one in stats.operators if one.op == "aten::mm"]
    assert [(one.module, one.dtype, one.phase, one.calls) for one in products] == [
        ("0", "bfloat16", "forward", 1), ("1", "bfloat16", "forward", 1),
    ]
    assert products[0].nbytes == 2 * (32 * 16 + 16 * 8 + 32 * 8)
    assert stats.casts() == {"0": 6 * (32 * 16 + 16 * 8), "1": 6 * 8 * 24}
    assert stats.shapes == []
    assert stats.seconds > 0
    assert sum(stats.by_dtype().values()) == pytest.approx(1)
    assert "casts: 0.004 MB in 0, 0.001 MB in 1" in str(stats)


def test_shapes_that_are_no_multiples_of_eight_name_the_parameter() -> None:
    model = nn.Sequential(nn.Linear(16, 10), nn.Identity(), nn.GELU(), nn.Linear(10, 8, bias=False))
    found = stats_of(model, torch.randn(32, 16)).shapes
    assert [(one.op, one.module, one.parameter, one.odd) for one in found] == [
        ("aten::addmm", "0", "0.weight", {"columns": 10}), ("aten::mm", "3", "3.weight", {"inner": 10}),
    ]
    images = stats_of(nn.Conv2d(3, 20, 3), torch.randn(2, 3, 8, 8))
    assert [(one.parameter, one.odd) for one in images.shapes] == [("weight", {"in": 3, "out": 20})]
    assert "no multiple of 8: in is 3, out is 20, in aten::convolution, Conv2d, of weight" in str(images)
    with collect_operator_stats(model) as stats:
        model(torch.randn(32, 16))
    assert stats.shapes == []       # float32: nothing to align


@pytest.mark.parametrize(("layer", "odd"), [
    (nn.Conv2d(16, 24, 3, groups=2), {"out": 12}),
    (nn.Conv2d(24, 16, 3, groups=2), {"in": 12}),
    (nn.ConvTranspose2d(16, 20, 3), {"out": 20}),
    (nn.ConvTranspose2d(12, 16, 3), {"in": 12}),
    (nn.ConvTranspose2d(16, 24, 3, groups=2), {"out": 12}),
    (nn.ConvTranspose2d(24, 16, 3, groups=2), {"in": 12}),
])
def test_channels_of_a_convolution_are_those_of_a_group(layer: nn.Conv2d, odd: dict[str, int]) -> None:
    """What one matrix product of it has, whichever way round the weight lies; as `record_casts` counts them."""
    x = torch.randn(2, layer.in_channels, 8, 8)
    found = stats_of(layer, x)
    assert [(one.parameter, one.odd) for one in found.shapes] == [("weight", odd)]
    assert [one.odd for one in found.rules.misaligned(8)] == [odd]


def test_the_weight_is_named_and_not_what_is_added() -> None:
    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.residual, self.left = nn.Parameter(torch.ones(8, 12)), nn.Parameter(torch.ones(8, 16))
            self.vector = nn.Parameter(torch.ones(12))

        def forward(self, x: Tensor) -> Tensor:
            return torch.addmm(self.residual, self.left, x) @ self.vector

    found = stats_of(Added(), torch.randn(16, 12)).shapes
    assert [(one.op, one.parameter, one.sizes) for one in found] == [
        ("aten::addmm", "left", {"rows": 8, "inner": 16, "columns": 12}),
    ]       # and no product with a vector


def test_products_with_vectors_are_not_to_be_changed() -> None:
    """Depthwise convolutions, and layers with one output: no padding helps them."""
    assert stats_of(nn.Conv2d(12, 12, 3, groups=12), torch.randn(2, 12, 8, 8)).shapes == []
    found = stats_of(nn.Linear(12, 1), torch.randn(8, 12))
    assert found.shapes == []
    assert found.rules.misaligned(8) == []


@pytest.mark.parametrize("name", MODELS)
def test_results_are_the_same_to_the_bit(name: str) -> None:

    def step(collect: bool) -> list[Tensor]:
        model, batch = make(name)
        with collect_operator_stats(model) if collect else torch.enable_grad():
            with autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model(batch))
            loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    assert all(torch.equal(a, b) for a, b in zip(step(False), step(True), strict=True))


def test_backward_belongs_to_the_module_of_its_forward() -> None:
    model, batch = make("mlp")
    with collect_operator_stats(model) as stats:
        loss_of(model(batch)).backward()
    assert {one.module for one in stats.operators if one.op == "aten::gelu_backward"} == {"1"}
    assert {one.phase for one in stats.operators} == {"forward", "backward"}


# --- rules


class Slow:
    """A metric whose time and value are set by the rule of softmax."""

    def __init__(self, seconds: float, value: float) -> None:
        self.seconds, self.value = seconds, value

    def __call__(self, policy: Policy) -> float:
        changed = policy.explain("aten::softmax.int").rule is Rule.KEEP
        time.sleep(self.seconds if changed else 0.02)
        return self.value if changed else 1.0


def softmax_stats() -> OperatorStats:
    with collect_operator_stats() as stats, autocast("cpu", dtype=torch.bfloat16):
        torch.randn(8, 8).bfloat16().softmax(-1)
    return stats


def test_a_rule_that_is_faster_and_passes_is_proposed() -> None:
    found = suggest_rules(softmax_stats(), Slow(0.002, 1.0), passes=lambda value: value == 1.0)
    assert found.best is not None
    assert found.best.rules == {"aten::softmax.int": Rule.KEEP}
    assert found.best.seconds < 0.5 * found.best.before
    assert found.policy == Policy.default("cpu").with_rules({"aten::softmax.int": Rule.KEEP})
    assert 'policy = policy.with_rules({"aten::softmax.int": Rule.KEEP})' in str(found)


@pytest.mark.parametrize(("seconds", "value"), [(0.002, 0.5), (0.03, 1.0), (0.02, 1.0)])
def test_a_rule_that_fails_or_saves_nothing_is_not(seconds: float, value: float) -> None:
    found = suggest_rules(
        softmax_stats(), Slow(seconds, value), passes=lambda value: value == 1.0, rounds=3, margin=0.3
    )
    assert found.best is None
    assert found.policy == Policy.default("cpu")
    assert str(found).startswith("nothing proposed: none of 1 changes passed and was faster\n  tried     aten::softmax")


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="stats hold no operator that a region casts for"):
        suggest_rules(OperatorStats(), lambda policy: 1.0)
    with pytest.raises(ValueError, match="rounds is 0 and most is 6; expected 1 or more of each"):
        suggest_rules(OperatorStats(), lambda policy: 1.0, rounds=0)


# --- scripts

SCRIPT = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 10), torch.nn.Dropout(0.5), torch.nn.Linear(10, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(int(sys.argv[1]))
for step in range(3):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.ones(8, 8)).float().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    return str(file)


def test_operators_of_a_script(script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "stats.json"
    assert main(["debug", "operators", "--at-step", "1", "--json", str(file), script, "1"]) == 0
    assert "no multiple of 8: columns is 10" in capsys.readouterr().err
    report = json.loads(file.read_text())
    assert report["kind"] == "ampkit.debugging.operators"
    assert {one["phase"] for one in report["operators"]} == {"forward", "backward", "optimizer"}
    assert main(["debug", "operators", "--at-step", "9", script, "1"]) == 3


def test_two_runs_of_a_script_differ_where_they_do(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, seed in (("a", "1"), ("b", "2"), ("c", "1")):
        assert main(["debug", "hashes", "--at-step", "1", "--json", str(tmp_path / name), script, seed]) == 0
    a, b, c = (str(tmp_path / name) for name in "abc")
    assert main(["debug", "diff", a, c]) == 0
    assert "are the same to the bit" in capsys.readouterr().out
    assert main(["debug", "diff", a, b]) == 1
    assert "the first difference, after" in capsys.readouterr().out
    assert main(["debug", "diff", a, script]) == 2
    assert "no log of hashes, version 1.0" in capsys.readouterr().err


def test_tensors_are_found_in_any_nesting() -> None:
    class Point(NamedTuple):
        x: Tensor
        y: int

    class Sub(Tensor):
        pass

    a, b, c, d = torch.ones(1), nn.Parameter(torch.ones(1)), torch.ones(1).as_subclass(Sub), torch.ones(1)
    found = tensors_in((a, [b, (None, 1, "s")], {"k": OrderedDict(x=c)}, Point(d, 3)))
    assert [id(one) for one in found] == [id(one) for one in (a, b, c, d)]
    assert tensors_in(a) == [a]
    assert tensors_in(3) == []
