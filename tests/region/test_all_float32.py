"""Regions in float32 compute everything in float32: what no list names, and whatever comes in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ampkit import Policy, Rule, autocast, float32_region, record_casts
from ampkit.torch_internals import unlisted
from tests.helpers.regions import BF16, FP16, FP32

COMPUTE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mul": lambda h: h * h,
    "add a number": lambda h: h + 1,
    "number minus": lambda h: 1 - h,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "dropout": functional.dropout,
    "where": lambda h: torch.where(h > 0, h, 0),
    "maximum": lambda h: torch.maximum(h, h),
    "mean": lambda h: h.mean(),
    "cat": lambda h: torch.cat([h, h]),
    "stack": lambda h: torch.stack([h, h]),
    "reshape": lambda h: h.reshape(-1) * 2,
    "linear": lambda h: functional.linear(h, h),
    "softmax": lambda h: torch.softmax(h, -1),
    "einsum": lambda h: torch.einsum("ij,kj->ik", h, h),
    "var": lambda h: h.var(),
    "topk": lambda h: h.topk(2).values,
    "embedding": lambda h: functional.embedding(torch.tensor([0, 1]), h),
    "pool": lambda h: functional.avg_pool2d(h[None], 2),
    "view of a product": lambda h: (h * h).t(),
}
AS_THEY_ARE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "view": lambda h: h.view(-1),
    "transpose": lambda h: h.t(),
    "slice": lambda h: h[1:, ::2],
    "detach": lambda h: h.detach(),
    "clone": lambda h: h.clone(),
    "conversion": lambda h: (h * h).to(h.dtype),
    "dtype asked for": lambda h: h.sum(dtype=h.dtype),
    "in place": lambda h: h.detach().clone().mul_(2),
    "into out": lambda h: torch.mul(h.detach(), 2, out=torch.empty(0, dtype=h.dtype)),
}


def low(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(4, 4).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("name", COMPUTE)
def test_operators_compute_in_float32(name: str, dtype: torch.dtype) -> None:
    """With the results and gradients of inputs that were cast by hand."""
    h = low(dtype)
    torch.manual_seed(0)
    with float32_region("cpu"):
        got = COMPUTE[name](h)
    torch.manual_seed(0)
    want = COMPUTE[name](h.float())
    assert got.dtype is FP32
    assert torch.equal(got, want)
    (gradient,) = torch.autograd.grad(got.sum(), h)
    assert gradient.dtype is dtype
    torch.testing.assert_close(gradient, torch.autograd.grad(want.sum(), h)[0])


@pytest.mark.parametrize("op", ["mul", "add", "sub", "div"])
def test_operators_that_another_policy_lists_compute_in_float32(op: str) -> None:
    """They have a kernel from then on, which passes on what this region's policy does not list: numbers as well."""
    h, call = low(FP16), getattr(torch, op)
    with autocast("cpu", policy=Policy.default("cpu").with_rules({f"aten::{op}.Tensor": Rule.LOWER})):
        assert call(h, 2).dtype is BF16
    with float32_region("cpu"):
        assert call(h, 2).dtype is call(h, h).dtype is FP32
        assert torch.equal(call(h, 2), call(h.float(), 2))
        with autocast("cpu", enabled=False):
            assert call(h, 2).dtype is FP16


@pytest.mark.parametrize("name", AS_THEY_ARE)
def test_what_computes_nothing_or_says_its_dtype_keeps_it(name: str) -> None:
    h = low(FP16)
    with float32_region("cpu"):
        assert AS_THEY_ARE[name](h).dtype is FP16


def test_other_dtypes_are_left_alone() -> None:
    with float32_region("cpu"):
        assert (torch.ones(2, dtype=torch.float64) * 2).dtype is torch.float64
        assert (torch.ones(2, dtype=torch.int64) + 1).dtype is torch.int64
        assert torch.ones(2, dtype=torch.bool).logical_not().dtype is torch.bool


class Nested(nn.Module):
    """Takes tensors from within containers, by position and by name, and computes with unlisted operators."""

    def forward(self, batch: dict[str, Any], *, scale: torch.Tensor) -> torch.Tensor:
        first, (second, _) = batch["x"], batch["more"]
        return functional.gelu(first * second) + scale


@pytest.mark.parametrize("precision", [torch.float32, "float32"])
def test_a_module_in_float32_takes_any_input(precision: Any) -> None:
    net = nn.Sequential(nn.Linear(4, 4))
    net.inner = Nested()
    x = torch.randn(4, 4)
    seen: dict[str, torch.dtype] = {}
    with autocast("cpu", policy=Policy.default("cpu").for_modules(net, {net.inner: precision})):
        h = net[0](x)
        out = net.inner({"x": h, "more": (h, [h])}, scale=h)
        seen = {"in": h.dtype, "out": out.dtype, "after": (h * h).dtype}
    assert seen == {"in": BF16, "out": FP32, "after": BF16}


def test_regions_inside_have_their_own_precision() -> None:
    h = low(FP16)
    with float32_region("cpu"):
        with autocast("cpu", BF16):
            assert (h * h).dtype is FP16
            assert (h @ h).dtype is BF16
            with float32_region("cpu"):
                assert (h * h).dtype is FP32
        with torch.autocast("cpu", BF16):
            assert (h * h).dtype is FP16
        with autocast("cpu", enabled=False):
            assert (h * h).dtype is FP16
            assert torch.cat([h, h]).dtype is FP16
        assert (h * h).dtype is FP32
    with autocast("cpu", BF16):
        assert (h * h).dtype is FP16
        assert not unlisted.is_on()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_function_is_computed_again_in_float32(reentrant: bool) -> None:
    dtypes: list[torch.dtype] = []

    def run(h: torch.Tensor) -> torch.Tensor:
        squared = h * h
        dtypes.append(squared.dtype)        # a recompute ends early
        return functional.gelu(squared)

    h = low(FP16)

    def inside(h: torch.Tensor) -> torch.Tensor:
        with float32_region("cpu"):
            return run(h)

    checkpoint(inside, h, use_reentrant=reentrant).sum().backward()
    assert dtypes == [FP32, FP32]
    want = torch.autograd.grad(functional.gelu(h.float() * h.float()).sum(), h)[0]
    torch.testing.assert_close(h.grad, want)


def test_vmap_and_grad() -> None:
    h = low(FP16).detach()
    with float32_region("cpu"):
        rows = torch.func.vmap(lambda row: row * row + 1)(h)
        slope = torch.func.grad(lambda x: (x * x).sum())(h)
    assert rows.dtype is FP32
    assert torch.equal(rows, h.float() * h.float() + 1)
    assert torch.equal(slope.half(), 2 * h)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend: str) -> None:
    h = low(FP16).detach()

    @torch.compile(backend=backend, fullgraph=True)
    def run(h: torch.Tensor) -> torch.Tensor:
        with float32_region("cpu"):
            return functional.gelu(h * h)

    out = run(h)
    assert out.dtype is FP32
    torch.testing.assert_close(out, functional.gelu(h.float() * h.float()))
    assert (h * h).dtype is FP16


def test_backward_within_the_region() -> None:
    h = low(FP16)
    with float32_region("cpu"):
        (h * h).sum().backward()
    assert h.grad is not None
    assert h.grad.dtype is FP16
    assert torch.equal(h.grad, (2 * h).detach())


def test_listed_operators_are_recorded_as_ever() -> None:
    h = low(FP16)
    with record_casts() as record, float32_region("cpu"):
        _ = functional.gelu(h @ h)
    assert [call.op for call in record.calls] == ["aten::matmul"]


def test_an_error_in_the_region_leaves_nothing_on() -> None:
    with pytest.raises(RuntimeError), float32_region("cpu"):
        torch.maximum(torch.ones(2), torch.ones(3))
    assert not unlisted.is_on()
