"""The three products of a linear layer in FP8: bits, shapes, dtypes, autograd, what is not finite, what is reused."""

import contextlib
import copy
import functools
import gc
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from ampkit import GradScaler, autocast, record_casts
from ampkit.matmul.float8_recipes import RECIPES
from ampkit_kernels import reference
from tests.helpers.float8 import BF16, GW_HP, OPERATORS, ROWWISE, RULES, TENSORWISE, fp8, mlp, same, step, with_forward

FP32 = torch.float32


def waves(*shape, start=0.3):
    """Numbers of many magnitudes, the same on every machine."""
    n = torch.arange(math.prod(shape), dtype=torch.float64) + start
    return ((n * 0.7548776662 % 1 - 0.5) * 2 ** (n * 0.5698402909 % 1 * 8 - 4).round()).float().reshape(shape)


# Three elements of the output and of the gradients of input and weight, and the sum of squares of each.
WRITTEN_DOWN = {
    (TENSORWISE, FP32): [
        (5.84375, -3.265625, -2.890625, 98018.6),
        (0.004058837890625, 0.00177001953125, 0.00072479248046875, 0.052937),
        (0.0179443359375, 0.002227783203125, -0.007568359375, 0.0631797),
    ],
    (TENSORWISE, BF16): [
        (5.84375, -3.265625, -2.890625, 98203.6),
        (0.004058837890625, 0.00177001953125, 0.00072479248046875, 0.0529762),
        (0.0179443359375, 0.002227783203125, -0.007568359375, 0.0631775),
    ],
    (ROWWISE, FP32): [
        (6.03125, -3.5625, -2.828125, 98187.6),
        (0.00408935546875, 0.00179290771484375, 0.0004215240478515625, 0.0513897),
        (0.01806640625, 0.00238037109375, -0.00714111328125, 0.061022),
    ],
    (ROWWISE, BF16): [
        (6.03125, -3.578125, -2.84375, 98358.3),
        (0.00408935546875, 0.00179290771484375, 0.000232696533203125, 0.0511307),
        (0.01806640625, 0.00238037109375, -0.00714111328125, 0.0613472),
    ],
}
WEIGHT_IN_BF16 = (0.0184326171875, 0.0023040771484375, -0.007232666015625, 0.0613574)
WRITTEN_DOWN |= {(GW_HP, dtype): [*WRITTEN_DOWN[ROWWISE, dtype][:2], WEIGHT_IN_BF16] for dtype in (FP32, BF16)}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_written_down_values(rule, dtype):
    layer = nn.Linear(32, 16, bias=False).to(dtype)
    layer.weight.data.copy_(waves(16, 32))
    found = step(layer, waves(3, 8, 32, start=0.1).to(dtype), waves(3, 8, 16, start=0.8) / 1024, fp8(rule))
    for each, (*elements, squares) in zip(found, WRITTEN_DOWN[rule, dtype], strict=True):
        assert each.flatten()[:3].tolist() == elements
        assert each.double().square().sum().item() == pytest.approx(squares, rel=1e-4)  # sums have no fixed order


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(
    ("rule", "recipe"), [(TENSORWISE, "tensorwise"), (ROWWISE, "rowwise"), (GW_HP, "rowwise_with_gw_hp")]
)
def test_the_bits_of_torchao(rule, recipe, dtype):
    torchao = pytest.importorskip("torchao.float8")
    linear = pytest.importorskip("torchao.float8.float8_linear").Float8Linear
    for shape, out, bias in (((64, 128), 96, True), ((2, 48, 256), 128, False), ((16, 64), 32, True)):
        layer = nn.Linear(shape[-1], out, bias=bias).to(dtype)
        other = linear.from_float(copy.deepcopy(layer), config=torchao.Float8LinearConfig.from_recipe_name(recipe))
        x = (torch.randn(shape) * torch.randn(shape[-1]).exp()).bfloat16()
        grad = torch.randn(*shape[:-1], out) * 1e-3
        assert same(step(layer, x, grad, fp8(rule))[:3], step(other, x, grad, torch.enable_grad())[:3])


DTYPES = st.sampled_from([FP32, BF16, torch.float16])


@settings(max_examples=25)
@given(
    rule=st.sampled_from(RULES),
    rows=st.lists(st.integers(1, 7), max_size=3),
    k=st.integers(1, 5),
    n=st.integers(1, 5),
    x_dtype=DTYPES,
    dtype=DTYPES,
    region=st.sampled_from([BF16, torch.float16]),
    bias=st.booleans(),
)
def test_shapes_strides_and_dtypes(rule, rows, k, n, x_dtype, dtype, region, bias):
    """Results are close to float64, gradients have the dtypes of their tensors, strided operands give the same bits."""
    x, grad = torch.randn(*rows, 16 * k).to(x_dtype), torch.randn(*rows, 16 * n)
    layer = nn.Linear(16 * k, 16 * n, bias=bias).to(dtype)
    exact = step(copy.deepcopy(layer).double(), x.double(), grad, torch.enable_grad())
    with record_casts() as record:
        found = step(layer, x, grad, fp8(rule, dtype=region))
    assert record.calls[0].float8 == rule.name
    assert [each.dtype for each in found] == [region, x_dtype, *[dtype] * (1 + bias)]
    for got, want in zip(found, exact, strict=True):
        assert (got.double() - want).norm() <= 0.15 * want.norm()
    layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    x, grad = (torch.stack((each, each), -1)[..., 0] for each in (x, grad))
    assert same(found, step(layer, x, grad, fp8(rule, dtype=region)))


@pytest.mark.parametrize("rule", RULES)
def test_mm_addmm_and_matmul_have_the_bits_of_linear(rule):
    layer, x, grad = nn.Linear(64, 48), torch.randn(13, 64), torch.randn(13, 48)
    want = step(layer, x, grad, fp8(rule, *OPERATORS))
    for _ in range(2):
        for call in (
            lambda x: torch.addmm(layer.bias, x, layer.weight.t()),
            lambda x: torch.mm(x, layer.weight.t()) + layer.bias.bfloat16(),
            lambda x: x @ layer.weight.t() + layer.bias.bfloat16(),
        ):
            assert same(step(with_forward(layer, call), x, grad, fp8(rule, *OPERATORS)), want)
        layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())  # as GPT-2's Conv1D has it


@pytest.mark.parametrize("product", range(3))
@pytest.mark.parametrize("operator", ["linear", "matmul"])
def test_each_product_of_a_recipe_may_be_in_the_regions_dtype(product, operator, monkeypatch):
    """Output, gradient of the input, gradient of the weight: with None that one is the region's, and the others FP8."""
    layer, x, grad = nn.Linear(32, 48, bias=False), torch.randn(24, 32), torch.randn(24, 48)
    model = layer if operator == "linear" else with_forward(layer, lambda x: x @ layer.weight.t())
    region = functools.partial(fp8, ROWWISE, f"aten::{operator}")
    expected, low = step(model, x, grad, region()), step(model, x, grad, autocast("cpu", BF16))
    assert not any(map(torch.equal, expected, low))
    operands = (("x", "w"), ("g", "w_t"), ("g_t", "x_t"))[product]
    monkeypatch.setitem(RECIPES, ROWWISE, RECIPES[ROWWISE]._replace(**dict.fromkeys(operands)))
    expected[product] = low[product]
    with record_casts() as record:
        assert same(step(model, x, grad, region()), expected)
    assert record.calls[0].float8 == "FLOAT8_ROWWISE"
    gemms = ["output", "input gradient", "weight gradient"]
    assert {loss.gemm for loss in record.float8()} == set(gemms) - {gemms[product]}
    assert record.calls[0].computed_in == ((BF16,) * 2 if product == 0 else (torch.float8_e4m3fn,) * 2)


@pytest.mark.parametrize("rule", RULES)
def test_backward_in_a_region_and_under_both_checkpoints(rule):
    model, x, grad = mlp(), torch.randn(8, 6, 64), torch.randn(8, 6, 64)
    want = step(model, x, grad, fp8(rule))
    for reentrant in (False, True):
        checkpointed = functools.partial(checkpoint, model, use_reentrant=reentrant)
        assert same(step(with_forward(model, checkpointed), x, grad, fp8(rule)), want)
    with fp8(rule, *OPERATORS):
        assert same(step(model, x, grad, contextlib.nullcontext()), want)


def saved_by(model, x, region):
    """Tensors that a forward saves, parameters aside, as (shape, dtype, bytes)."""
    saved, own = {}, {p.data_ptr() for p in model.parameters()}

    def note(tensor):
        return saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), region:
        model(x)
    return [(tuple(sorted(t.shape)), t.dtype, t.nbytes) for address, t in saved.items() if address not in own]


@pytest.mark.parametrize("rule", RULES)
def test_what_is_saved_for_backward(rule):
    """One byte for each element of the input; two with gradients of weights in bf16; nothing for a frozen weight."""
    layer = nn.Linear(64, 48)
    x = torch.randn(32, 64, requires_grad=True)
    inputs = [each for each in saved_by(layer, x, fp8(rule)) if each[0] == (32, 64)]
    assert inputs == [((32, 64), BF16, 4096) if rule is GW_HP else ((32, 64), torch.float8_e4m3fn, 2048)]
    layer.weight.requires_grad_(False)
    assert saved_by(layer, x, fp8(rule)) == []
    found = step(layer, x, torch.randn(32, 48), fp8(rule))
    assert found[1] is not None
    assert found[2] is None


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_reaches_output_and_gradients(rule, value):
    """`torch.tensor(inf).to(torch.float8_e4m3fn)` is 448: a plain cast would hide it."""
    layer, x, grad = nn.Linear(64, 48), torch.randn(8, 64), torch.randn(8, 48)
    bad = x.clone()
    bad[3, 5] = value
    output, _, weight, _ = step(layer, bad, grad, fp8(rule))
    assert not output[3].isfinite().any()
    assert not weight[:, 5].isfinite().any()
    bad = grad.clone()
    bad[3, 5] = value
    _, x_grad, weight, bias = step(layer, x, bad, fp8(rule))
    assert not x_grad[3].isfinite().any()
    assert not weight[5].isfinite().any()
    assert not bias[5].isfinite()
    with torch.no_grad():
        layer.weight[5, 3] = value
    output, x_grad, *_ = step(layer, x, grad, fp8(rule))
    assert not output[:, 5].isfinite().any()
    assert not x_grad[:, 3].isfinite().any()


@pytest.mark.parametrize("rule", RULES)
def test_a_scaler_skips_the_step_that_overflows(rule):
    model = mlp()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler("cpu", init_scale=2.0**120)
    before = copy.deepcopy(model.state_dict())
    for steps in (False, True):
        optimizer.zero_grad()
        with fp8(rule, dtype=torch.float16):
            loss = model(torch.randn(8, 64)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update(2.0**10)
        assert same([*before.values()], [*model.state_dict().values()]) is not steps


@pytest.mark.parametrize("loss", [lambda y: y.square().sum(), torch.sum])
@pytest.mark.parametrize("operand", ["input", "weight"])
def test_double_backward_is_refused(operand, loss):
    """Also where what follows is linear, so that the incoming gradient is a constant."""
    layer, x = nn.Linear(64, 48), torch.randn(8, 64, requires_grad=True)
    with fp8(ROWWISE):
        y = layer(x)
    (grad,) = torch.autograd.grad(loss(y.float()), x if operand == "input" else layer.weight, create_graph=True)
    with pytest.raises(RuntimeError, match=r"no derivative.*policy.for_modules"):
        grad.square().sum().backward()


@pytest.mark.parametrize("shape", [(8, 64), (2, 4, 64), (64,)])
def test_outputs_are_written_in_place(shape):
    """As `nn.ReLU(inplace=True)` after a layer without a bias does."""
    layer, x, grad = nn.Linear(64, 48, bias=False), torch.randn(shape), torch.randn(*shape[:-1], 48)
    want = step(nn.Sequential(layer, nn.ReLU()), x, grad, fp8(ROWWISE))
    assert same(step(nn.Sequential(layer, nn.ReLU(inplace=True)), x, grad, fp8(ROWWISE)), want)


def test_forward_mode_keeps_its_tangent():
    layer, x = nn.Linear(64, 48), torch.randn(8, 64)
    with forward_ad.dual_level(), record_casts() as record, fp8(ROWWISE):
        y = layer(forward_ad.make_dual(x, torch.ones(8, 64)))
        tangent = forward_ad.unpack_dual(y).tangent
    assert tangent is not None
    torch.testing.assert_close(tangent.float(), torch.ones(8, 64) @ layer.weight.t(), rtol=0.02, atol=0.02)
    assert record.calls[0].float8 == "inside forward-mode AD"


@pytest.fixture
def made(monkeypatch):
    """For each quantized tensor its shape, and whether forms along rows and along columns were made."""
    calls, quantize = [], reference.quantize

    def counting(x, along_rows, along_columns):
        calls.append((tuple(x.shape), along_rows is not None, along_columns is not None))
        return quantize(x, along_rows, along_columns)

    monkeypatch.setattr(reference, "quantize", counting)
    return calls


class TestReuse:
    """How often tensors are quantized."""

    @pytest.mark.parametrize("dtype", [FP32, BF16])
    @pytest.mark.parametrize("rule", RULES)
    def test_q_k_and_v_share_an_input_and_a_region_its_weights(self, made, rule, dtype):
        layers, x = [nn.Linear(64, 48).to(dtype) for _ in range(3)], torch.randn(8, 64, requires_grad=True) * 1
        with fp8(rule):
            for layer in layers * 2:
                layer(x)
        inputs = [call for call in made if call[0] == (8, 64)]
        assert inputs == [((8, 64), True, rule is not GW_HP)]
        assert len(made) == 1 + 3
        x += 1
        with fp8(rule):
            layers[0](x)
            x += 1
            layers[0](x)
        assert len(made) == 4 + 3

    @pytest.mark.parametrize(
        "write",
        [
            lambda x: x.data.mul_(3),
            lambda x: setattr(x, "data", x.data.t()),
            lambda x: x.numpy().fill(2),
        ],
    )
    def test_writes_that_autograd_does_not_see_reach_the_next_layer(self, write):
        """To leaves and buffers, which are what such writes go to."""
        layer, x = nn.Linear(64, 48), torch.randn(64, 64)
        for context in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
            with context, fp8(ROWWISE):
                layer(x)
                write(x)
                assert torch.equal(layer(x), fp8_output(layer, x))

    def test_an_outer_region_keeps_the_forms_of_weights_until_a_step(self, made):
        model, x = mlp(), torch.randn(8, 64)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        with autocast("cpu", enabled=False):
            for n_steps in range(1, 4):
                made.clear()
                for _ in range(4):
                    with fp8(ROWWISE):
                        loss = model(x).float().square().mean()
                    loss.backward()
                weights = [call for call in made if call[0] in ((128, 64), (64, 128))]
                assert len(weights) == 2 + 4, n_steps  # the forms of backward are made at each use
                optimizer.step()
            with torch.no_grad():
                want = fp8_output(model, x)
                next(model.parameters()).mul_(2)
                with fp8(ROWWISE):
                    assert not torch.equal(model(x), want)
                    assert torch.equal(model(x), fp8_output(model, x))

    def test_without_a_cache_backward_keeps_nothing(self):
        def held():
            gc.collect()
            return sum(type(item) is torch.Tensor and item.dtype.itemsize == 1 for item in gc.get_objects())

        layer, before = nn.Linear(64, 48), held()
        found = step(layer, torch.randn(8, 64), torch.randn(8, 48), fp8(ROWWISE))
        assert found[2] is not None
        assert held() == before

    def test_inference_quantizes_once_an_outermost_region(self, made):
        model, x = mlp(), torch.randn(8, 64)
        for context in (torch.no_grad(), torch.inference_mode()):
            with context, autocast("cpu", enabled=False):
                for _ in range(3):
                    with fp8(ROWWISE):
                        model(x)
        assert len([call for call in made if call[0] != (8, 64) and call[0] != (8, 128)]) == 4
        assert [call for call in made if call[2]] == []


def fp8_output(model, x):
    with fp8(ROWWISE, cache_enabled=False):
        return model(x)
