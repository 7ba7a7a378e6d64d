"""Autograd and regions: where backward looks for its state, and in which thread."""

import contextlib
import threading

import pytest
import torch
import torch.nn.functional as F

from ampkit import Policy, autocast
from tests.helpers.regions import BF16, FP16, FP32, both, like_torch


def gradients(region, backward_region=None):
    """Gradients of two layers, backward outside or in another region."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    with region:
        loss = F.mse_loss(model(torch.randn(8, 16)), torch.zeros(8, 4))
    with backward_region or contextlib.nullcontext():
        loss.backward()
    return [p.grad for p in model.parameters()]


class Probe(torch.autograd.Function):
    """Notes the autocast state and the dtype of a product in backward."""

    seen: list[object] = []

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        product = torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype
        Probe.seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), product))
        return gradient


def backward_state(region, forward, backward):
    Probe.seen.clear()
    x = torch.ones(2, requires_grad=True)
    with region("cpu", **forward):
        y = Probe.apply(x)
    with region("cpu", **backward):
        y.sum().backward()
    return Probe.seen[-1]


@both
def test_backward_sees_the_state_of_its_caller(region):
    """Not that of the forward."""
    assert backward_state(region, {}, {"enabled": False}) == (False, BF16, FP32)
    assert backward_state(region, {"enabled": False}, {}) == (True, BF16, BF16)
    assert backward_state(region, {"dtype": BF16}, {"dtype": FP16}) == (True, FP16, FP16)


def test_backward_sees_the_policy_of_its_caller():
    keeps = Policy.default("cpu").with_rules({"aten::mm": "keep"})
    assert backward_state(autocast, {}, {"policy": keeps}) == (True, BF16, FP32)
    assert backward_state(autocast, {"policy": keeps}, {}) == (True, BF16, BF16)


def test_float32_forward_and_backward_in_a_region():
    """float32 in dtype, low in accuracy. Backward's own products are cast, as with torch.amp: call backward outside."""
    exact = gradients(torch.autocast("cpu", enabled=False))
    theirs = gradients(torch.autocast("cpu", enabled=False), torch.autocast("cpu"))
    ours = gradients(autocast("cpu", enabled=False), like_torch())
    assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))
    assert all(g.dtype is FP32 for g in ours)
    assert not all(torch.equal(a, b) for a, b in zip(exact, ours, strict=True))


@pytest.mark.gpu
def test_backward_threads_see_the_policy_of_their_caller():
    """On CUDA backward runs in a thread of its own."""
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append((torch.mm(ones, ones).dtype, threading.current_thread() is threading.main_thread()))
            return gradient

    seen, ones = [], torch.ones(2, 2, device="cuda")
    keeps = Policy.default("cuda").with_rules({"aten::mm": "keep"})
    for policy, expected in ((None, BF16), (keeps, FP32)):
        x = torch.ones(2, 2, device="cuda", requires_grad=True)
        with autocast("cuda", BF16, policy=policy):
            Product.apply(x).sum().backward()
        assert seen.pop() == (expected, False)
