"""FP8 rules in compiled and exported code: aot_eager has eager's bits, and one graph takes any number of rows."""

import contextlib

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from ampkit import autocast
from tests.helpers.float8 import BF16, GW_HP, ROWWISE, RULES, TENSORWISE, fp8, policy, same, step, with_forward


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def layers():
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16))


@pytest.mark.parametrize(("rule", "inside"), [(TENSORWISE, False), (ROWWISE, True), (GW_HP, False)])
def test_aot_eager_has_the_bits_of_eager(rule, inside):
    """Also with the region inside."""
    model, x, grad, given = layers(), torch.randn(13, 32), torch.randn(13, 16), policy(rule)
    want = step(model, x, grad, fp8(rule))

    def with_region(x):
        with autocast("cpu", BF16, policy=given):
            return model(x)

    compiled = torch.compile(with_region if inside else model.forward, backend="aot_eager", fullgraph=True)
    assert same(step(with_forward(model, compiled), x, grad, contextlib.nullcontext() if inside else fp8(rule)), want)


def test_rows_are_dynamic_and_another_rule_compiles_again():
    """Two graphs for training: numbers of rows in multiples of 16, and others, which are padded."""
    counter = CompileCounterWithBackend("aot_eager")
    model = torch.compile(nn.Linear(32, 16), backend=counter, dynamic=True, fullgraph=True)
    for rows, n_graphs in ((80, 1), (48, 1), (160, 1), (33, 2), (47, 2), (64, 2)):  # none is K or N
        with fp8(ROWWISE):
            model(torch.randn(rows, 32)).sum().backward()
        assert counter.frame_count == n_graphs
    with fp8(GW_HP):
        model(torch.randn(80, 32))
    assert counter.frame_count == 3


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore::torch.jit.TracerWarning")  # of the layers' sizes
@pytest.mark.parametrize("rule", RULES)
def test_tracing_in_fp8_is_refused(rule):
    with fp8(rule), pytest.raises(RuntimeError, match="trace the model under another policy"):
        torch.jit.trace(layers(), torch.randn(8, 32))


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
