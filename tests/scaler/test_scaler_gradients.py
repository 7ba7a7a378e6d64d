"""What the scaler does to gradients, shared ones included."""

import functools

import pytest
import torch

from ampkit.optim import AdamW
from ampkit.scaler.grad_scaler import GradScaler
from tests.helpers.scaler_tools import BOTH, one_parameter, started

# Gradients as torch takes them


@BOTH
def test_fp16_gradients_are_refused_untouched(cls) -> None:
    scaler = started(cls)
    a, _ = one_parameter(grad=8.0)
    b, _ = one_parameter(grad=8.0, dtype=torch.float16)
    optimizer = torch.optim.SGD([("body.weight", a), ("head.weight", b)], lr=1.0)
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients") as caught:
        scaler.unscale_(optimizer)
    assert (a.grad.item(), b.grad.item()) == (8.0, 8.0)
    assert scaler._per_optimizer_states[id(optimizer)]["stage"].name == "READY"
    if cls is GradScaler:
        assert "float16 gradients of head.weight;" in str(caught.value)
        with pytest.raises(ValueError, match="FP16 gradients"):
            scaler.clip_grad_norm_(optimizer, 1.0)
        assert a.grad.item() == 8.0


@BOTH
def test_sparse_gradients_are_unscaled_in_place(cls) -> None:
    scaler = started(cls, 4.0)
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    scaler.scale(embedding(torch.tensor([1, 1, 3])).sum()).backward()
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    scaler.unscale_(optimizer)
    assert not embedding.weight.grad.is_coalesced()
    assert embedding.weight.grad.to_dense()[1].tolist() == [2.0, 2.0]


@BOTH
def test_version_counters_are_left_alone(cls) -> None:
    scaler = started(cls)
    param, optimizer = one_parameter(grad=1.0)
    version = param.grad._version
    scaler.unscale_(optimizer)
    assert param.grad._version == version


@BOTH
def test_gradients_broken_after_unscale_reach_the_parameters(cls) -> None:
    """The check looks once, at unscale_: what code does to gradients afterwards is its own business."""
    scaler = started(cls)
    param, optimizer = one_parameter(grad=1.0)
    scaler.unscale_(optimizer)
    param.grad.fill_(float("nan"))
    scaler.step(optimizer)
    assert param.isnan().all()


# Several optimizers in one iteration


@BOTH
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_gradients_computed_again_between_two_steps_are_unscaled_again(cls, set_to_none, fused) -> None:
    """A GAN without an update between its phases: the second optimizer's gradients are new, though shared."""
    shared = torch.nn.Parameter(torch.ones(2))
    optimizers = [torch.optim.SGD([shared], lr=0.5, fused=fused) for _ in range(2)]
    scaler = cls("cpu", 2.0**8)
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=set_to_none)
        scaler.scale(shared.sum()).backward()
        scaler.step(optimizer)
    scaler.update()
    assert shared.tolist() == [0.0, 0.0]


@BOTH
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("apart", [True, False])
def test_losses_scaled_ahead_of_both_steps(cls, apart, fused, set_to_none) -> None:
    shared = torch.nn.Parameter(torch.ones(2))
    optimizers = [torch.optim.SGD([shared], lr=0.5, fused=fused) for _ in range(2)]
    scaler = cls("cpu", 2.0**8)
    losses = [shared.sum(), shared.sum()]
    losses = [scaler.scale(loss) for loss in losses] if apart else scaler.scale(losses)
    for optimizer, loss in zip(optimizers, losses, strict=True):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss.backward()
        scaler.step(optimizer)
    assert shared.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("make", [functools.partial(torch.optim.SGD, fused=True), torch.optim.SGD, AdamW])
@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize("steps", [True, False])
@pytest.mark.parametrize("ahead", [True, False])
def test_a_loss_that_does_not_reach_a_shared_gradient_leaves_it_unscaled(make, clips, steps, ahead) -> None:
    shared, own = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    first, second = make([shared], lr=0.0), torch.optim.SGD([shared, own], lr=0.0)
    scaler = GradScaler("cpu", 2.0**8)
    losses = [lambda: scaler.scale(shared.sum()), lambda: scaler.scale(own.sum())]
    if ahead:
        losses = [lambda loss=loss: loss for loss in [loss() for loss in losses]]
    losses[0]().backward()
    scaler.clip_grad_norm_(first, 1e9) if clips else scaler.unscale_(first)
    if steps:
        scaler.step(first)
    losses[1]().backward()
    scaler.unscale_(second)
    assert (shared.grad.tolist(), own.grad.tolist()) == ([1.0, 1.0], [1.0, 1.0])


def test_shared_gradients_may_be_clipped_in_between() -> None:
    shared = torch.nn.Parameter(torch.ones(1))
    shared.grad = torch.tensor([64.0])
    optimizers = [torch.optim.SGD([shared], lr=1.0) for _ in range(3)]
    scaler = started(GradScaler, 4.0)
    assert scaler.clip_grad_norm_(optimizers[0], 8.0).item() == 16.0
    assert scaler.clip_grad_norm_(optimizers[1], 1e9).item() == pytest.approx(8.0, rel=1e-5)
    scaler.unscale_(optimizers[2])
    assert shared.grad.item() == pytest.approx(8.0, rel=1e-5)


def test_marks_on_gradients_keep_nothing_alive() -> None:
    import gc
    import weakref

    param, optimizer = one_parameter(grad=1.0)
    scaler = started()
    scaler.step(optimizer)
    scaler.update()
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    assert param.grad is not None


def test_a_scale_in_the_place_of_the_device_is_told_apart():
    """torch.cuda.amp.GradScaler took `init_scale` first."""
    with pytest.raises(TypeError, match=r"device is \['cuda'\]; expected None, a torch.device, or a device type"):
        GradScaler(["cuda"])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"device is 65536.0; expected .* init_scale=65536.0: it comes second"):
        GradScaler(2.0**16)
