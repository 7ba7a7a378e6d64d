"""Corrections of the default policy: calls that raise under torch.amp, or differ between devices."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ampkit import Policy, Rule, autocast

BF16 = torch.bfloat16


def default() -> autocast:
    """A region with the default policy on CPU."""
    return autocast("cpu", BF16, policy=Policy.default("cpu"))


def _sparse_product(leaf: torch.Tensor) -> torch.Tensor:
    return torch.sparse.mm(torch.eye(3).to_sparse(), leaf)


@pytest.mark.parametrize("function", [_sparse_product, torch.linalg.pinv, torch.pinverse], ids=lambda f: f.__name__)
def test_casts_stay_out_of_kernels_that_have_one_derivative(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    leaf = torch.randn(3, 3, requires_grad=True)
    (want,) = torch.autograd.grad(function(leaf).sum(), leaf)
    if function is not torch.pinverse:  # torch lists that name, and not the one it forwards to
        with torch.autocast("cpu", BF16):
            result = function(leaf)
        assert result.dtype is BF16
        with pytest.raises(RuntimeError, match=r"dtype|scalar type"):
            result.sum().backward()
    with default():
        result = function(leaf)
    (got,) = torch.autograd.grad(result.sum(), leaf)
    assert result.dtype is torch.float32
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", ["linalg.det", "linalg.slogdet", "logdet", "linalg.lu", "linalg.pinv", "matrix_exp"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_linear_algebra_takes_half_precision(name: str, dtype: torch.dtype) -> None:
    function = torch
    for part in name.split("."):
        function = getattr(function, part)
    matrix = (torch.eye(4) + 0.1 * torch.ones(4, 4)).to(dtype)
    with autocast("cpu", dtype):
        got = function(matrix)
    want = function(matrix.float())
    for ours, exact in zip(*((x,) if isinstance(x, torch.Tensor) else x for x in (got, want)), strict=True):
        assert ours.dtype is exact.dtype is torch.float32
        torch.testing.assert_close(ours, exact)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_encoder_s_inference_path_takes_a_padding_mask() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    x, padding = torch.randn(2, 3, 8), torch.tensor([[False, False, True], [False, False, False]])
    with torch.no_grad():
        exact = encoder(x, src_key_padding_mask=padding)
        with torch.autocast("cpu", BF16), pytest.raises(RuntimeError, match="scalar type Float but found BFloat16"):
            encoder(x, src_key_padding_mask=padding)
        with default():
            got = encoder(x, src_key_padding_mask=padding)
    assert got.dtype is BF16
    torch.testing.assert_close(got.float()[1], exact[1], atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (BF16, torch.float32), (torch.float32, BF16)])
def test_experts_compute_in_the_dtype_of_the_region(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    x = torch.randn(32, 16, dtype=dtypes[0], requires_grad=True)
    weight = torch.randn(4, 16, 8, dtype=dtypes[1], requires_grad=True)
    ends, upstream = torch.tensor([8, 16, 24, 32], dtype=torch.int32), torch.randn(32, 8, dtype=BF16)
    want = nn.functional.grouped_mm(x.to(BF16), weight.to(BF16), offs=ends)
    want_grads = torch.autograd.grad(want, (x, weight), upstream)
    with default():
        got = nn.functional.grouped_mm(x, weight, offs=ends)
    got_grads = torch.autograd.grad(got, (x, weight), upstream)
    for ours, theirs in zip((got, *got_grads), (want, *want_grads), strict=True):
        assert ours.dtype is theirs.dtype
        assert torch.equal(ours, theirs)
    with autocast("cpu", BF16, policy=Policy.torch("cpu")):
        assert nn.functional.grouped_mm(x.float(), weight.float(), offs=ends).dtype is torch.float32


def test_the_function_of_experts_is_a_key_and_has_no_fp8_form() -> None:
    policy = Policy.default("cuda")
    assert policy.rule_for(nn.functional.grouped_mm) is policy.rule_for("aten::_grouped_mm") is Rule.LOWER
    with pytest.raises(ValueError, match=r"'aten::_grouped_mm' cannot follow FLOAT8_ROWWISE: it has no FP8 form; aten"):
        policy.with_rules({nn.functional.grouped_mm: Rule.FLOAT8_ROWWISE})
