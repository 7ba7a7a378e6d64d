"""Autograd through a region: gradients, saved tensors, where backward looks for its state."""

import threading

import pytest
import torch
import torch.nn.functional as F

from ampkit import Policy, autocast
from tests.helpers.regions import BF16, FP16, FP32, both, like_torch

lower = pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])


def step(region, dtype=BF16, backward_region=None):
    """Loss, output and gradients of two layers, backward outside or in another region."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    x = torch.randn(8, 16, requires_grad=True)
    with region("cpu", dtype):
        out = model(x)
        out.retain_grad()
        loss = F.mse_loss(out, torch.zeros(8, 4))
    if backward_region is None:
        loss.backward()
    else:
        with backward_region:
            loss.backward()
    return loss, out, [x.grad, *(p.grad for p in model.parameters())], out.grad


@lower
def test_gradients_have_the_dtype_of_what_they_belong_to(dtype):
    """A float32 leaf has a float32 gradient, a low-precision output a low-precision one."""
    theirs = step(torch.autocast, dtype)
    ours = step(lambda *args: like_torch(args[1]), dtype)
    assert ours[1].dtype is ours[3].dtype is dtype
    assert all(g.dtype is FP32 for g in ours[2])
    assert torch.equal(theirs[0], ours[0])
    assert torch.equal(theirs[3], ours[3])
    assert all(torch.equal(a, b) for a, b in zip(theirs[2], ours[2], strict=True))


@both
def test_saved_tensors_are_low(region):
    """A product saves the casts of its operands."""
    saved = []
    a, b = torch.rand(4, 4, requires_grad=True), torch.rand(4, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.dtype) or t, lambda t: t):
        with region("cpu"):
            torch.mm(a, b)
    assert saved == [BF16, BF16]


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


@pytest.mark.gpu
@both
def test_backward_threads_see_the_state_of_their_caller(region):
    """Enabled and dtype are those of whoever called backward. On CUDA backward runs in a thread of its own."""
    Probe.seen.clear()
    x = torch.ones(2, device="cuda", requires_grad=True)
    y = Probe.apply(x).sum()
    with region("cpu", FP16):
        y.backward()
    assert Probe.seen == [(True, FP16, FP16)]


@pytest.mark.gpu
def test_backward_threads_see_the_cuda_policy_of_their_caller():
    """With a policy: products in a backward that is called inside a region follow that region."""
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


def test_float32_forward_and_backward_in_a_region():
    """float32 in dtype, low in accuracy. Backward's own products are cast, as with torch.amp: call backward outside."""
    exact = step(lambda *_: torch.autocast("cpu", enabled=False))[2]
    theirs = step(lambda *_: torch.autocast("cpu", enabled=False), backward_region=torch.autocast("cpu"))[2]
    ours = step(lambda *_: autocast("cpu", enabled=False), backward_region=like_torch())[2]
    assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))
    assert all(g.dtype is FP32 for g in ours)
    assert not all(torch.equal(a, b) for a, b in zip(exact, ours, strict=True))


@both
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_backward_in_another_thread(region, where):
    """A thread that did not open the region computes the same gradients."""
    expected = step(region)[2]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    x = torch.randn(8, 16, requires_grad=True)
    with region("cpu", BF16):
        loss = F.mse_loss(model(x), torch.zeros(8, 4))
        thread = threading.Thread(target=loss.backward)
        if where == "inside":
            thread.start()
            thread.join()
    if where == "outside":
        thread.start()
        thread.join()
    gradients = [x.grad, *(p.grad for p in model.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(expected, gradients, strict=True))


