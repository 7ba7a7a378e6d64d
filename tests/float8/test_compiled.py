"""FP8 rules in compiled and exported code: aot_eager has eager's bits, one graph serves all numbers of rows."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from ampkit import autocast
from tests.helpers.float8 import BF16, GW_HP, ROWWISE, RULES, TENSORWISE, fp8, policy, same, step


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Inside(nn.Module):
    """A model with the region in its forward."""

    def __init__(self, model, policy):
        super().__init__()
        self.model, self.policy = model, policy

    def forward(self, x):
        with autocast("cpu", BF16, policy=self.policy):
            return self.model(x)


def layers():
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16))


@pytest.mark.parametrize(("rule", "inside"), [(TENSORWISE, False), (ROWWISE, True), (GW_HP, False)])
def test_aot_eager_has_the_bits_of_eager(rule, inside):
    model, x, grad = layers(), torch.randn(13, 32), torch.randn(13, 16)
    want = step(model, x, grad, fp8(rule))
    if inside:
        model = Inside(model, policy(rule))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert same(step(compiled, x, grad, autocast("cpu", enabled=False) if inside else fp8(rule)), want)


def test_rows_are_dynamic_and_another_rule_compiles_again():
    """Two graphs for training: numbers of rows in multiples of 16, and others, which are padded."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.backends.debugging.aot_eager(graph, inputs)

    model = torch.compile(nn.Linear(32, 16), backend=backend, dynamic=True, fullgraph=True)
    for rows, n_graphs in ((80, 1), (48, 1), (160, 1), (33, 2), (47, 2), (64, 2)):      # none is K or N
        with fp8(ROWWISE):
            model(torch.randn(rows, 32)).sum().backward()
        assert len(graphs) == n_graphs
    with fp8(GW_HP):
        model(torch.randn(80, 32))
    assert len(graphs) == 3


@pytest.mark.parametrize("rule", RULES)
def test_exported_code_computes_in_fp8(rule):
    model, x = layers(), torch.randn(8, 32)
    with torch.no_grad(), fp8(rule):
        want = model(x)
        program = torch.export.export(model, (x,))
    assert torch.equal(program.module()(x), want)
    assert sum("scaled_mm" in str(node.target) for node in program.graph.nodes) == 2


def test_inductor_computes_in_fp8():
    """Its casts to FP8 are eager's; what comes after a product it may round once less."""
    layer, x = nn.Linear(32, 16, bias=False), torch.randn(32, 32)
    with torch.no_grad(), fp8(ROWWISE):
        torch.testing.assert_close(torch.compile(layer, fullgraph=True)(x), layer(x), rtol=2**-7, atol=1e-4)
