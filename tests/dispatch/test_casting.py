"""What a region casts, beside torch.amp under `Policy.torch`; and where the default policy is better.

`on_both` runs a call on the CPU in torch.amp's region and in ampkit's and compares the results to the bit; on CUDA,
`on_fake_cuda` compares dtypes, as torch.amp's own kernels for CUDA answer to fake tensors. Every registered operator is
compared in `policy/test_op_registry.py` and `parity/test_op_db.py`; here are the special cases.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ampkit import Policy, autocast
from ampkit.policy.operators import fold, resolve
from ampkit.policy.torch_lists import TORCH
from tests.helpers.op_samples import same
from tests.helpers.regions import BF16, FP16, FP32, FP64, LSTM_IN_16_BITS, like_torch, on_both, on_fake_cuda, outcome


def rand(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.rand(shape).to(dtype)


def cuda(*shape: int, dtype: torch.dtype = FP16) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device="cuda")


def under_default(call, dtype=BF16):
    return outcome(call, autocast("cpu", dtype))


def mm(*dtypes):
    return torch.mm(*[rand(4, 4).mul(9).to(dtype) for dtype in dtypes])


# On the CPU, in a bfloat16 region: the dtype of the result, or the exception that torch.amp raises too.
CPU = {
    "the other half type is cast": (lambda: mm(FP16, FP16), BF16),
    "float64 is not eligible": (lambda: mm(FP64, FP64), FP64),
    "float64 beside float32": (lambda: mm(FP64, FP32), RuntimeError),
    "integers": (lambda: mm(torch.int32, torch.int32), torch.int32),
    "complex": (lambda: mm(torch.complex64, torch.complex64), torch.complex64),
    "float8 is cast": (lambda: mm(torch.float8_e4m3fn, FP32), BF16),
    "sparse": (lambda: torch.mm(torch.eye(4).to_sparse(), rand(4, 4)), BF16),
    "out= decides": (lambda: torch.mm(rand(4, 4), rand(4, 4), out=torch.empty(4, 4)), FP32),
    "out= of another dtype": (lambda: torch.mm(*[rand(4, 4)] * 2, out=torch.empty(4, 4, dtype=BF16)), RuntimeError),
    "in place": (lambda: rand(4, 4).addmm_(rand(4, 4), rand(4, 4)), FP32),
    "in place, mixed": (lambda: rand(4, 4).addmm_(rand(4, 4, dtype=BF16), rand(4, 4)), RuntimeError),
    "meta tensors are on no device": (lambda: torch.mm(*[torch.empty(4, 4, device="meta")] * 2).dtype, FP32),
}


@pytest.mark.parametrize("case", CPU)
def test_on_the_cpu(case):
    call, expected = CPU[case]
    if expected is RuntimeError:
        with pytest.raises(RuntimeError, match="dtype"):
            on_both(call)
    else:
        result = on_both(call)
        assert (result.dtype if isinstance(result, torch.Tensor) else result) is expected


# On CUDA, in a float16 region: the dtype of the result.
CUDA = {
    "a dtype that is asked for stands": (lambda: torch.softmax(cuda(4), 0, dtype=FP16), FP16),
    "float64 that is asked for stands": (lambda: torch.cumsum(cuda(4), 0, dtype=FP64), FP64),
    "softmax of float64": (lambda: torch.softmax(cuda(4, dtype=FP64), 0), FP64),
    "sum of complex numbers": (lambda: torch.sum(cuda(4, dtype=torch.complex64)), torch.complex64),
    "norm.Scalar of float64": (lambda: torch.ops.aten.norm.Scalar(cuda(4, dtype=FP64), 2), FP64),
    "promotion": (lambda: torch.addcmul(cuda(4, dtype=FP32), cuda(4), cuda(4)), FP32),
    "promotion, dot": (lambda: torch.dot(cuda(4), cuda(4, dtype=FP32)), FP32),
    "the inner softmax": (lambda: torch.ops.aten._softmax(cuda(4), 0, False), FP16),
    "rms_norm": (lambda: F.rms_norm(cuda(4, 4), (4,)), FP32 if resolve("rms_norm") in fold(TORCH["cuda"]) else FP16),
    "a number to a power": (lambda: 2 ** cuda(4), FP32),
    "a power": (lambda: cuda(4) ** 2, FP32),
    "a power in place": (lambda: cuda(4).pow_(2), FP16),
}


@pytest.mark.parametrize("case", CUDA)
def test_on_cuda(case):
    call, expected = CUDA[case]
    assert on_fake_cuda(call) is expected


def test_banned():
    """binary_cross_entropy on CUDA tensors; each remedy that the message names works."""
    with pytest.raises(RuntimeError, match=r"(?s)binary_cross_entropy.*unsafe under autocast") as caught:
        on_fake_cuda(lambda: F.binary_cross_entropy(cuda(4), cuda(4)))
    for remedy in ("binary_cross_entropy_with_logits", "autocast(enabled=False)", "Rule.FLOAT32"):
        assert remedy in str(caught.value)
    policy = Policy.default("cuda").with_rules({"aten::binary_cross_entropy": "float32"})
    with FakeTensorMode():
        with autocast("cuda:0", policy=policy):
            assert F.binary_cross_entropy(cuda(4), cuda(4)).dtype is FP32
        with autocast("cuda:0"):
            assert F.binary_cross_entropy_with_logits(cuda(4), cuda(4)).dtype is FP32
            with autocast("cuda", enabled=False):
                assert F.binary_cross_entropy(cuda(4).float(), cuda(4).float()).dtype is FP32
            assert F.binary_cross_entropy(cuda(4, dtype=FP64), cuda(4, dtype=FP64)).dtype is FP64
    policy = Policy.default("cpu").with_rules({"aten::gelu": "banned"})
    with autocast("cpu", policy=policy), pytest.raises(RuntimeError, match=r"(?s)'aten::gelu'.*safe in low precision"):
        F.gelu(torch.ones(4))


# The default policy


def test_default_policy_adds_to_the_list_of_torch():
    """`exp2`, `logaddexp`, `lerp` and similar operators, which torch.amp forgets on CUDA."""
    with FakeTensorMode(), autocast("cuda:0"):
        assert torch.exp2(cuda(4)).dtype is FP32
        assert torch.logaddexp(cuda(4), cuda(4)).dtype is FP32
        assert torch.lerp(cuda(4), cuda(4, dtype=FP32), 0.5).dtype is FP32
        assert torch.mm(cuda(4, 4, dtype=FP32), cuda(4, 4)).dtype is FP16


@pytest.mark.parametrize(
    "call",
    [lambda x: torch.softmax(x, -1), lambda x: F.layer_norm(x, (4,)), torch.exp, torch.sum, torch.norm, F.softplus],
    ids=["softmax", "layer_norm", "exp", "sum", "norm", "softplus"],
)
def test_cpu_policy_of_torch_keeps_these_and_the_default_does_not(call):
    """softmax, layer_norm, exp, sum and norm stay bfloat16 with torch.amp; the default has the dtype of CUDA."""
    x = rand(4, 4, dtype=BF16)
    assert on_both(lambda: call(x)).dtype is BF16
    better = under_default(lambda: call(x))
    assert better.dtype is FP32
    exact = call(x.double())
    assert (better - exact).abs().max() <= (call(x) - exact).abs().max()


# Promotion on the CPU


def only_ampkit(call, dtype=BF16):
    """What a call gives in ampkit's region, once torch.amp was seen to raise."""
    assert isinstance(outcome(call, torch.autocast("cpu", dtype)), RuntimeError)
    return outcome(call, like_torch(dtype))


def test_order_of_arguments_does_not_matter():
    """cat of float32 and half. torch.amp promotes in one order and raises in the other, as for the other half type."""
    single, half, brain = rand(4), rand(4, dtype=FP16), rand(4, dtype=BF16)
    halves = only_ampkit(lambda: torch.cat([half, half]))
    assert halves.dtype is FP16
    assert torch.equal(halves, torch.cat([half, half]))
    assert on_both(lambda: torch.cat([single, half])).dtype is FP32
    assert only_ampkit(lambda: torch.cat([half, single])).dtype is FP32
    assert only_ampkit(lambda: torch.cat([half, brain])).dtype is FP32
    assert only_ampkit(lambda: torch.cat([brain, half]), FP16).dtype is FP32


@pytest.mark.parametrize(
    "call",
    [
        lambda a, b: a.scatter_add(0, torch.tensor([0, 1]), b),
        lambda a, b: a.index_put((torch.tensor([0, 1]),), b),
        lambda a, b: torch.lerp(a, b, 0.5),
    ],
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
    [
        (lambda: torch.mv(rand(4, 4), rand(4)), BF16),
        (lambda: torch.dot(rand(4), rand(4)), FP32),
        (lambda: torch.addmv(rand(4), rand(4, 4), rand(4)), BF16),
        (lambda: torch.addr(rand(4, 4), rand(4), rand(4)), BF16),
    ],
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


# Numbers in the place of tensors, named tensors


ARITHMETIC = {
    "x * 2.5": lambda x: x * 2.5,
    "1 - x": lambda x: 1 - x,
    "x + True": lambda x: x + True,
    "add_": lambda x: x.add_(1),
}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_numbers_beside_operators_that_some_policy_names(name):
    """A rule for `add` somewhere in the process must not change what `x + 1` does where it is not active."""
    names = ("add", "mul", "sub", "rsub", "div", "floor_divide")
    policy = Policy.torch("cpu").with_rules(dict.fromkeys(names, "float32") | {"aten::add_": "keep"})
    active, call = autocast("cpu", policy=policy), ARITHMETIC[name]
    with active:
        pass
    for x in (rand(3, dtype=BF16), torch.tensor(1.5, dtype=BF16), torch.tensor(3), rand(3, dtype=FP64)):
        expected = call(x.clone())
        for region in (active, like_torch(), autocast("cpu", enabled=False, policy=policy)):
            with region:
                got = call(x.clone())
                with torch.autocast("cpu", enabled=False):
                    inside = call(x.clone())
            assert same(inside, expected)
            if region is active and x.dtype is BF16 and name != "add_":
                assert got.dtype is FP32
            else:
                assert same(got, expected)


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


def test_numbers_of_traced_code_beside_an_operator_that_python_calls_with_tensors_alone() -> None:
    """Tracing marks tensors as numbers, which Python gets as numbers; `eq` with them raised once a policy named it."""
    with autocast("cpu", policy=Policy.default("cpu").with_rules({"aten::eq.Tensor": "float32"})):
        traced = torch.jit.trace(lambda x: 448.0 / x, torch.ones(3))  # it compares its constants
        assert torch.equal(traced(torch.full((3,), 2.0)), torch.full((3,), 224.0))
