"""What a CUDA region casts, on fake tensors where there is no GPU: torch.amp's own CUDA kernels answer to those.

Numbers are those of the conformance list. `on_fake_cuda` compares the dtypes that a call gives in torch.amp's region
and in ampkit's under `Policy.torch("cuda")`. Every registered operator is walked through in `test_cuda_lists`.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ampkit import Policy, autocast
from ampkit.policy.op_table import TORCH, fold
from ampkit.policy.operator_keys import resolve
from tests.helpers.op_samples import native
from tests.helpers.regions import BF16, FP16, FP32, FP64, on_fake_cuda

halves = pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])


def cuda(*shape: int, dtype: torch.dtype = FP16) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device="cuda")


@halves
@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.mm(cuda(4, 4, dtype=FP32), cuda(4, 4, dtype=FP32)),
        lambda: torch.mv(cuda(4, 4, dtype=FP32), cuda(4, dtype=FP32)),
        lambda: torch.addmm(cuda(4, 4, dtype=FP32), cuda(4, 4, dtype=FP32), cuda(4, 4, dtype=FP32)),
        lambda: torch.addr(cuda(4, 4, dtype=FP32), cuda(4, dtype=FP32), cuda(4, dtype=FP32)),
        lambda: torch.linalg.vecdot(cuda(4, 4, dtype=FP32), cuda(4, 4, dtype=FP32)),
        lambda: torch.linalg.multi_dot([cuda(4, 4, dtype=FP32)] * 3),
        lambda: torch.einsum("ij,jk", cuda(4, 4, dtype=FP32), cuda(4, 4, dtype=FP32)),
        lambda: F.linear(cuda(4, 4, dtype=FP32), cuda(4, 4, dtype=FP32), cuda(4, dtype=FP32)),
        lambda: F.conv2d(cuda(1, 2, 8, 8, dtype=FP32), cuda(3, 2, 3, 3, dtype=FP32), padding="same"),
        lambda: F.conv_transpose1d(cuda(1, 2, 8, dtype=FP32), cuda(2, 3, 3, dtype=FP32)),
        lambda: F.prelu(cuda(2, 4, dtype=FP32), cuda(1, dtype=FP32)),
        lambda: F.scaled_dot_product_attention(*[cuda(1, 2, 4, 8, dtype=FP32)] * 3),
    ],
    ids=["mm", "mv", "addmm", "addr", "vecdot", "multi_dot", "einsum", "linear", "conv2d", "conv_transpose", "prelu",
         "sdpa"],
)
def test_lower(call, dtype):
    """Every operator of CUDA's lower list gives the region's dtype."""
    assert on_fake_cuda(call, dtype) is dtype


@halves
@pytest.mark.parametrize(
    "call",
    [torch.acos, torch.exp, torch.log, torch.rsqrt, torch.reciprocal, torch.tan, F.softplus, torch.logsumexp,
     F.mse_loss, F.l1_loss, F.binary_cross_entropy_with_logits, F.huber_loss, F.cosine_similarity, torch.cdist,
     torch.dist],
    ids=lambda call: call.__name__,
)
def test_float32(call, dtype):
    """Every operator of CUDA's float32 list takes half up."""
    def run():
        x = cuda(4, 4, dtype=dtype)
        if call is torch.logsumexp:
            return call(x, 0)
        unary = call.__name__ in ("acos", "exp", "log", "rsqrt", "reciprocal", "tan", "softplus")
        return call(x) if unary else call(x, x)

    assert on_fake_cuda(run, dtype) is FP32


def test_dtype_argument_is_set_unless_given():
    """sum, softmax and cumsum of half give float32; an explicit dtype stands."""
    for call in (torch.sum, lambda x, **k: torch.softmax(x, 0, **k), lambda x, **k: torch.cumsum(x, 0, **k),
                 lambda x, **k: x.prod(0, **k), lambda x, **k: F.log_softmax(x, 0, **k),
                 lambda x, **k: torch.linalg.vector_norm(x, **k), lambda x, **k: x.sum((0, 1), keepdim=True, **k)):
        assert on_fake_cuda(lambda call=call: call(cuda(4, 4))) is FP32
        assert on_fake_cuda(lambda call=call: call(cuda(4, 4), dtype=FP16)) is FP16
        assert on_fake_cuda(lambda call=call: call(cuda(4, 4), dtype=FP64)) is FP64


def test_dtype_argument_of_what_is_not_eligible():
    """softmax of float64 stays float64, the sum of integers int64."""
    assert on_fake_cuda(lambda: torch.softmax(cuda(4, dtype=FP64), 0)) is FP64
    assert on_fake_cuda(lambda: torch.sum(cuda(4, dtype=torch.int32))) is torch.int64
    assert on_fake_cuda(lambda: torch.sum(cuda(4, dtype=torch.complex64))) is torch.complex64


def test_dtype_argument_leaves_the_input_alone():
    """What runs below autograd is the operator on half input with a dtype: no copy to float32 before it."""
    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "aten":
                log.append((func, args[0].dtype, (kwargs or {}).get("dtype")))
            return func(*args, **(kwargs or {}))

    logs = []
    for context in (native("cuda", FP16), autocast("cuda:0", policy=Policy.torch("cuda"))):
        logs.append(log := [])
        with FakeTensorMode():
            x = cuda(4, 4)
            with Log(), context:
                torch.sum(x)
                torch.cumprod(x, 0)
    assert logs[0] == logs[1]
    assert logs[0] == [(torch.ops.aten.sum.default, FP16, FP32), (torch.ops.aten.cumprod.default, FP16, FP32)]


def test_norm():
    """norm of half is float32, of float64 float64; an explicit dtype stands."""
    aten = torch.ops.aten.norm
    assert on_fake_cuda(lambda: aten.Scalar(cuda(4), 2)) is FP32
    assert on_fake_cuda(lambda: aten.Scalar(cuda(4, dtype=FP64), 2)) is FP64
    assert on_fake_cuda(lambda: aten.ScalarOpt_dim(cuda(4, 4), 2, [0], False)) is FP32
    assert on_fake_cuda(lambda: aten.ScalarOpt_dim_dtype(cuda(4, 4), 2, [0], False, dtype=FP16)) is FP16
    assert on_fake_cuda(lambda: torch.norm(cuda(4))) is FP32


def test_promotion():
    """float32 wins. Where torch.amp raises for float16 beside bfloat16, the result is float32."""
    assert on_fake_cuda(lambda: torch.addcmul(cuda(4, dtype=FP32), cuda(4), cuda(4))) is FP32
    assert on_fake_cuda(lambda: torch.addcmul(cuda(4), cuda(4), cuda(4))) is FP16
    assert on_fake_cuda(lambda: torch.dot(cuda(4), cuda(4, dtype=FP32))) is FP32
    with pytest.raises(AssertionError, match=r"ampkit gives torch\.float32") as caught:
        on_fake_cuda(lambda: torch.addcmul(cuda(4, dtype=BF16), cuda(4, dtype=FP32), cuda(4, dtype=FP32)))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_banned():
    """binary_cross_entropy on CUDA tensors; CPU tensors pass."""
    with pytest.raises(RuntimeError, match=r"(?s)binary_cross_entropy.*unsafe under autocast") as caught:
        on_fake_cuda(lambda: F.binary_cross_entropy(cuda(4), cuda(4)))
    for remedy in ("binary_cross_entropy_with_logits", "autocast(enabled=False)", "Rule.FLOAT32"):
        assert remedy in str(caught.value)
    assert on_fake_cuda(lambda: F.binary_cross_entropy(torch.ones(4), torch.ones(4))) is FP32


def test_banned_operator_with_each_remedy():
    policy = Policy.default("cuda").with_rules({"aten::binary_cross_entropy": "float32"})
    with FakeTensorMode():
        with autocast("cuda:0", policy=policy):
            assert F.binary_cross_entropy(cuda(4), cuda(4)).dtype is FP32
        with autocast("cuda:0"):
            assert F.binary_cross_entropy_with_logits(cuda(4), cuda(4)).dtype is FP32
            with autocast("cuda", enabled=False):
                assert F.binary_cross_entropy(cuda(4).float(), cuda(4).float()).dtype is FP32
            assert F.binary_cross_entropy(cuda(4, dtype=FP64), cuda(4, dtype=FP64)).dtype is FP64


def test_ban_on_another_operator_says_the_same():
    policy = Policy.default("cpu").with_rules({"aten::gelu": "banned"})
    with autocast("cpu", policy=policy), pytest.raises(RuntimeError, match=r"(?s)'aten::gelu'.*safe in low precision"):
        F.gelu(torch.ones(4))


def test_cross_entropy():
    """float32, by way of what it is composed of."""
    assert on_fake_cuda(lambda: F.cross_entropy(cuda(4, 3), torch.zeros(4, dtype=torch.long, device="cuda"))) is FP32


def test_what_keeps_half():
    """batch_norm, gelu, mean and var are not listed."""
    def batch_norm(x):
        return F.batch_norm(x, None, None, training=True)

    for call in (F.gelu, torch.mean, torch.var, F.relu, torch.abs, batch_norm):
        assert on_fake_cuda(lambda call=call: call(cuda(4, 4))) is FP16


def test_inner_softmax_called_directly():
    """Only the outer softmax is listed."""
    assert on_fake_cuda(lambda: torch.ops.aten._softmax(cuda(4), 0, False)) is FP16


def test_norms():
    """layer, RMS and group norm of half are float32."""
    for call in (lambda x: F.layer_norm(x, (4,)), lambda x: F.group_norm(x, 2)):
        assert on_fake_cuda(lambda call=call: call(cuda(4, 4))) is FP32
    listed = resolve("rms_norm") in fold(TORCH["cuda"])     # by torch since 2.12
    assert on_fake_cuda(lambda: F.rms_norm(cuda(4, 4), (4,))) is (FP32 if listed else FP16)


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic", "nearest-exact"])
def test_interpolation(mode):
    """float32, bilinear and nearest."""
    assert on_fake_cuda(lambda: F.interpolate(cuda(1, 1, 4, 4), scale_factor=2.0, mode=mode)) is FP32


def test_powers():
    """float32 on both sides of the operator; in place they stay half."""
    assert on_fake_cuda(lambda: 2 ** cuda(4)) is FP32
    assert on_fake_cuda(lambda: cuda(4) ** 2) is FP32
    assert on_fake_cuda(lambda: cuda(4) ** cuda(4)) is FP32
    assert on_fake_cuda(lambda: cuda(4).pow_(2)) is FP16


def test_promotion_that_torch_does_by_itself():
    """add, mul and cat of mixed dtypes are float32 by torch's own promotion."""
    for call in (torch.add, torch.mul, torch.div, lambda a, b: torch.cat([a, b]), lambda a, b: torch.stack([a, b])):
        assert on_fake_cuda(lambda call=call: call(cuda(4), cuda(4, dtype=FP32))) is FP32
        assert on_fake_cuda(lambda call=call: call(cuda(4), cuda(4))) is FP16


def test_default_policy_adds_to_the_list_of_torch():
    """`exp2`, `logaddexp`, `lerp` and their kin, which torch.amp forgets on CUDA."""
    with FakeTensorMode(), autocast("cuda:0"):
        assert torch.exp2(cuda(4)).dtype is FP32
        assert torch.logaddexp(cuda(4), cuda(4)).dtype is FP32
        assert torch.lerp(cuda(4), cuda(4, dtype=FP32), 0.5).dtype is FP32
        assert torch.mm(cuda(4, 4, dtype=FP32), cuda(4, 4)).dtype is FP16


@pytest.mark.gpu
@halves
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_cudnn_layers(layer, dtype):
    """Gradients match a cast by hand, in the region's dtype, where torch.amp always casts to float16."""
    torch.manual_seed(0)
    module, x = layer(16, 16, num_layers=2).cuda(), torch.randn(5, 3, 16, device="cuda")
    with torch.autocast("cuda", dtype):
        assert module(x)[0].dtype is FP16
    with autocast("cuda", dtype):
        result = module(x)[0]
    assert result.dtype is dtype
    result.float().sum().backward()
    control = layer(16, 16, num_layers=2).cuda()
    control.load_state_dict(module.state_dict())
    control.to(dtype)(x.to(dtype))[0].float().sum().backward()
    for mine, theirs in zip(module.parameters(), control.parameters(), strict=True):
        assert mine.grad.dtype is FP32
        torch.testing.assert_close(mine.grad, theirs.grad.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@halves
def test_cudnn_convolutions(dtype):
    """Forward and transposed, in the region's dtype."""
    x, weight = torch.randn(1, 4, 8, 8, device="cuda"), torch.randn(4, 4, 3, 3, device="cuda")
    with autocast("cuda", dtype):
        forward = torch.cudnn_convolution(x, weight, (1, 1), (1, 1), (1, 1), 1, False, False, True)
        transpose = torch.cudnn_convolution_transpose(
            x, weight, (1, 1), (0, 0), (1, 1), (1, 1), 1, False, False, True
        )
    assert forward.dtype is transpose.dtype is dtype


@pytest.mark.gpu
@halves
def test_promotion_equals_torch_on_the_device(dtype):
    """dot, index_put, grid_sampler and scatter_add."""
    index = torch.tensor([0, 2], device="cuda")
    x, y = torch.randn(4, device="cuda"), torch.randn(4, device="cuda", dtype=dtype)
    grid = torch.rand(1, 2, 2, 2, device="cuda", dtype=dtype)
    calls = (
        lambda: torch.dot(x, y),
        lambda: torch.index_put(x, (index,), y[:2]),
        lambda: torch.scatter_add(x, 0, index, y[:2]),
        lambda: torch.grid_sampler(x.reshape(1, 1, 2, 2), grid, 0, 0, False),
    )
    for call in calls:
        with torch.autocast("cuda", dtype):
            theirs = call()
        with autocast("cuda", dtype, policy=Policy.torch("cuda")):
            ours = call()
        assert ours.dtype is theirs.dtype is FP32
        assert torch.equal(ours, theirs)
