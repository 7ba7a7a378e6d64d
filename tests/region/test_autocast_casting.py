"""What a region on the CPU casts, beside torch.amp under `Policy.torch`; and where the default policy is better.

Numbers are those of the conformance list. `on_both` runs a call in torch.amp's region and in ampkit's and compares
the results to the bit, or the fact that both raise.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists

from ampkit import Policy, autocast
from tests.helpers.regions import BF16, FP16, FP32, FP64, LSTM_IN_16_BITS, like_torch, on_both, outcome

lower = pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])


def rand(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.rand(shape).to(dtype)


def under_default(call, dtype=BF16):
    return outcome(call, autocast("cpu", dtype))


# LOWER


def test_half_in_a_bfloat16_region():
    """The other half type is cast too."""
    assert on_both(lambda: torch.mm(rand(4, 4, dtype=FP16), rand(4, 4, dtype=FP16))).dtype is BF16


def test_double_passes():
    """float64 is not eligible."""
    assert on_both(lambda: torch.mm(rand(4, 4, dtype=FP64), rand(4, 4, dtype=FP64))).dtype is FP64


def test_double_beside_float_raises():
    """The float32 operand is cast, the float64 one is not, and the product refuses the mixture."""
    with pytest.raises(RuntimeError, match="dtype"):
        on_both(lambda: torch.mm(rand(4, 4, dtype=FP64), rand(4, 4)))


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64])
def test_integers_and_complex_pass(dtype):
    """Neither is eligible."""
    assert on_both(lambda: torch.mm(rand(4, 4).mul(9).to(dtype), rand(4, 4).to(dtype))).dtype is dtype


def test_float8_is_cast():
    """To the region's dtype."""
    assert on_both(lambda: torch.mm(rand(4, 4, dtype=torch.float8_e4m3fn), rand(4, 4))).dtype is BF16


def test_out_variants_are_not_cast():
    """The caller chose the dtype of what is written."""
    assert on_both(lambda: torch.mm(rand(4, 4), rand(4, 4), out=torch.empty(4, 4))).dtype is FP32
    with pytest.raises(RuntimeError):
        on_both(lambda: torch.mm(rand(4, 4), rand(4, 4), out=torch.empty(4, 4, dtype=BF16)))


def test_in_place_variants_are_not_cast():
    """`addmm_` with mixed dtypes raises as it does outside."""
    assert on_both(lambda: rand(4, 4).addmm_(rand(4, 4), rand(4, 4))).dtype is FP32
    with pytest.raises(RuntimeError, match="dtype"):
        on_both(lambda: rand(4, 4).addmm_(rand(4, 4, dtype=BF16), rand(4, 4)))


def test_meta_tensors_pass_and_fake_ones_are_cast():
    """Meta tensors are on no autocast device; a fake tensor has the device that it stands for."""
    meta = torch.empty(4, 4, device="meta")
    assert on_both(lambda: torch.mm(meta, meta).dtype) is FP32
    with FakeTensorMode():
        assert on_both(lambda: torch.mm(torch.empty(4, 4), torch.empty(4, 4)).dtype) is BF16


def test_sparse_tensors_are_cast():
    """A product of sparse COO tensors."""
    assert on_both(lambda: torch.mm(torch.eye(4).to_sparse(), rand(4, 4)).dtype) is BF16
    dense = on_both(lambda: torch.mm(torch.eye(4).to_sparse(), rand(4, 4)))
    assert dense.layout is torch.strided


@pytest.mark.parametrize(
    "call",
    [lambda x: torch.softmax(x, -1), lambda x: F.layer_norm(x, (4,)), torch.exp, torch.sum, torch.norm,
     lambda x: F.log_softmax(x, -1), lambda x: F.group_norm(x, 2), lambda x: F.rms_norm(x, (4,)),
     lambda x: x.cumsum(0), lambda x: x.pow(3), torch.linalg.vector_norm, F.softplus],
    ids=["softmax", "layer_norm", "exp", "sum", "norm", "log_softmax", "group_norm", "rms_norm", "cumsum", "pow",
         "vector_norm", "softplus"],
)
def test_cpu_policy_of_torch_keeps_these_and_the_default_does_not(call):
    """softmax, layer_norm, exp, sum and norm stay bfloat16 with torch.amp; the default has the dtype of CUDA."""
    x = rand(4, 4, dtype=BF16)
    assert on_both(lambda: call(x)).dtype is BF16
    better = under_default(lambda: call(x))
    assert better.dtype is FP32
    exact = call(x.double())
    assert (better - exact).abs().max() <= (call(x) - exact).abs().max()


def test_binary_cross_entropy_is_allowed_on_cpu():
    """On CUDA it is banned."""
    x = rand(4, dtype=BF16)
    assert on_both(lambda: F.binary_cross_entropy(x, x)).dtype is FP32
    assert under_default(lambda: F.binary_cross_entropy(x, x)).dtype is FP32


# PROMOTE


def only_ampkit(call, dtype=BF16):
    """What a call gives in ampkit's region, once torch.amp was seen to raise."""
    assert isinstance(outcome(call, torch.autocast("cpu", dtype)), RuntimeError)
    return outcome(call, like_torch(dtype))


def test_cat_of_the_other_half_type():
    """float16 tensors in a bfloat16 region: torch.amp raises; here it is a cat."""
    half = [rand(4, dtype=FP16), rand(4, dtype=FP16)]
    result = only_ampkit(lambda: torch.cat(half))
    assert torch.equal(result, torch.cat(half))
    assert result.dtype is FP16


def test_order_of_arguments_does_not_matter():
    """cat of float32 and half. torch.amp promotes in one order and raises in the other."""
    single, half, brain = rand(4), rand(4, dtype=FP16), rand(4, dtype=BF16)
    assert on_both(lambda: torch.cat([single, half])).dtype is FP32
    assert only_ampkit(lambda: torch.cat([half, single])).dtype is FP32
    assert only_ampkit(lambda: torch.cat([half, brain])).dtype is FP32
    assert only_ampkit(lambda: torch.cat([brain, half]), FP16).dtype is FP32


@pytest.mark.parametrize(
    "call",
    [lambda a, b: a.scatter_add(0, torch.tensor([0, 1]), b),
     lambda a, b: a.index_put((torch.tensor([0, 1]),), b),
     lambda a, b: torch.lerp(a, b, 0.5)],
    ids=["scatter_add", "index_put", "lerp"],
)
def test_mixed_dtypes_that_torch_refuses_on_cpu(call):
    """scatter_add, index_put and lerp. Under the default policy these promote on the CPU as on CUDA."""
    with pytest.raises(RuntimeError):
        on_both(lambda: call(rand(2, dtype=BF16), rand(2)))
    assert under_default(lambda: call(rand(2, dtype=BF16), rand(2))).dtype is FP32
    assert under_default(lambda: call(rand(2), rand(2, dtype=BF16))).dtype is FP32


@pytest.mark.parametrize(
    ("call", "default"),
    [(lambda: torch.mv(rand(4, 4), rand(4)), BF16), (lambda: torch.dot(rand(4), rand(4)), FP32),
     (lambda: torch.addmv(rand(4), rand(4, 4), rand(4)), BF16),
     (lambda: torch.addr(rand(4, 4), rand(4), rand(4)), BF16)],
    ids=["mv", "dot", "addmv", "addr"],
)
def test_vector_products_on_cpu(call, default):
    """torch.amp leaves mv, dot, addmv and addr in float32; the default policy does here what torch.amp does on CUDA."""
    assert on_both(call).dtype is FP32
    assert under_default(call).dtype is default


@pytest.mark.parametrize(
    ("layer", "native"),
    [(nn.LSTM, BF16), (nn.RNN, BF16), (nn.GRU, FP32), (nn.LSTMCell, FP32), (nn.GRUCell, FP32), (nn.RNNCell, BF16)],
)
def test_recurrent_layers(layer, native):
    """torch.amp runs LSTM and RNN low, GRU and cells in float32; the default policy runs all in the region's dtype."""
    module, x = layer(4, 3), rand(5, 2, 4) if "Cell" not in layer.__name__ else rand(2, 4)

    def call():
        result = module(x)
        return result[0] if isinstance(result, tuple) else result

    if layer is not nn.LSTM or LSTM_IN_16_BITS:
        assert on_both(call).dtype is native
    assert under_default(call).dtype is BF16


CPU_LISTS = AutocastCPUTestLists(torch.device("cpu"))
CPU_CALLS = [
    (name, call, kwargs)
    for name, calls in vars(CPU_LISTS).items() if isinstance(calls, list)
    for call, kwargs in [((call[0], call[1]), call[2] if len(call) > 2 and isinstance(call[2], dict) else {})
                         for call in calls]
]
EXPECTED = {
    "torch_16": None, "nn_16": None, "torch_fp32": FP32, "nn_fp32": FP32, "torch_need_autocast_promote": FP32,
    "torch_expect_builtin_promote": "as torch", "methods_expect_builtin_promote": "as torch",
}


@lower
@pytest.mark.parametrize(
    ("group", "call", "kwargs"), CPU_CALLS, ids=[f"{name}-{call[0]}" for name, call, _ in CPU_CALLS]
)
def test_every_entry_of_torchs_own_list(group, call, kwargs, dtype):
    """Each runs, in the dtype that the list says."""
    if group == "torch_need_autocast_promote" and dtype is FP16:
        pytest.skip("the entries mix bfloat16 with float32, which torch.amp refuses in a float16 region")
    name, args = call
    if not isinstance(args, tuple):
        args = (args,)

    def run():
        if group.startswith("methods"):
            return getattr(args[0], name)(*args[1:])
        for home in (torch, torch._C._nn, F):
            if hasattr(home, name):
                return getattr(home, name)(*args, **kwargs)
        raise LookupError(name)

    result = on_both(run, dtype)
    first = result[0] if isinstance(result, tuple) else result
    expected = EXPECTED[group]
    if expected != "as torch" and isinstance(first, torch.Tensor):
        assert first.dtype is (expected or dtype)


# What none of them touches


def test_arguments_are_not_changed():
    a, b = rand(4, 4), rand(4, 4)
    before = a._version, b._version, a.dtype
    on_both(lambda: torch.mm(a, b))
    assert (a._version, b._version, a.dtype) == before


def test_unlisted_operators_keep_their_dtype():
    for call in (F.relu, F.gelu, torch.mean, torch.abs, lambda x: x + x, lambda x: x * 2, lambda x: x.add_(1)):
        assert on_both(lambda call=call: call(rand(4, dtype=BF16))).dtype is BF16
        assert on_both(lambda call=call: call(rand(4))).dtype is FP32


def test_result_of_comparison_is_bool():
    for name in ("eq", "ge", "gt", "le", "lt", "ne"):
        call = getattr(torch, name)
        assert on_both(lambda call=call: call(rand(4), rand(4, dtype=BF16))).dtype is torch.bool


def test_python_numbers_promote_as_outside():
    assert on_both(lambda: rand(4, dtype=BF16) * 3.5).dtype is BF16
    assert on_both(lambda: rand(4, dtype=BF16) + rand(4)).dtype is FP32


ARITHMETIC = {
    "x + 1": lambda x: x + 1, "x * 2.5": lambda x: x * 2.5, "1 - x": lambda x: 1 - x, "x / 3": lambda x: x / 3,
    "x + True": lambda x: x + True, "add_": lambda x: x.add_(1), "x + 1j": lambda x: x + 1j, "x // 2": lambda x: x // 2,
}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_numbers_beside_operators_that_some_policy_names(name):
    """A rule for `add` somewhere in the process must not change what `x + 1` does where it is not active."""
    names = ("add", "mul", "sub", "rsub", "div", "floor_divide")
    policy = Policy.torch("cpu").with_rules(dict.fromkeys(names, "float32") | {"aten::add_": "keep"})
    with autocast("cpu", policy=policy):
        pass
    call = ARITHMETIC[name]
    half = FP32 if "j" in name else BF16        # since torch 2.14 bfloat16 has a complex type, and that few kernels
    for x in (rand(3, dtype=half), rand(3), torch.tensor(1.5, dtype=half), torch.tensor(3), rand(3, dtype=FP64)):
        for region in (like_torch(), autocast("cpu", enabled=False, policy=policy), autocast("cpu", policy=policy)):
            expected = call(x.clone())
            with region:
                got = call(x.clone())
                with torch.autocast("cpu", enabled=False):
                    inside = call(x.clone())
            assert torch.equal(inside, expected)
            assert inside.dtype is expected.dtype
            if region.policy == policy and region._enabled and x.dtype is BF16 and name != "add_":
                assert got.dtype in (FP32, torch.complex64)
            else:
                assert torch.equal(got, expected)
                assert got.dtype is expected.dtype


@pytest.mark.skipif(not hasattr(torch.Tensor, "rename"), reason="torch has no named tensors since 2.13")
@pytest.mark.filterwarnings("ignore:Named tensors:UserWarning")
def test_named_tensors_are_refused():
    """With an error that says what to do, rather than in the wrong dtype."""
    x = rand(3, 3).rename("N", "C")
    with torch.autocast("cpu"):
        assert torch.mm(x, x.rename("C", "D")).dtype is BF16
    with like_torch():
        for call in (lambda: torch.mm(x, x.rename("C", "D")), lambda: torch.prod(x, "C")):
            with pytest.raises(RuntimeError, match="Named tensors are currently unsupported"):
                call()
        assert torch.mm(x.rename(None), x.rename(None)).dtype is BF16
