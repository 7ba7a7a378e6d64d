"""What the scaler does to gradients."""

import functools
import gc
import weakref

import pytest
import torch

from ampkit.optim import AdamW
from ampkit.scaler import scaler_base
from ampkit.scaler.grad_scaler import GradScaler
from ampkit.torch_private import ready_record
from tests.helpers.scaler_tools import BOTH, alike, one_parameter, started


@BOTH
def test_fp16_gradients_are_refused_untouched(cls) -> None:
    scaler, (a, _), (b, _) = started(cls), one_parameter(grad=8.0), one_parameter(grad=8.0, dtype=torch.float16)
    optimizer = torch.optim.SGD([("body.weight", a), ("head.weight", b)], lr=1.0)
    for use in [scaler.unscale_] + [lambda each: scaler.clip_grad_norm_(each, 1.0)] * (cls is GradScaler):
        with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients") as caught:
            use(optimizer)
        assert (a.grad.item(), b.grad.item()) == (8.0, 8.0)
        assert scaler._per_optimizer_states[id(optimizer)]["stage"].name == "READY"
        assert cls is not GradScaler or "float16 gradients of head.weight;" in str(caught.value)
    if cls is GradScaler:
        scaler.allow_fp16 = True  # for optimizers that keep float32 masters
        scaler.unscale_(optimizer)
        assert (a.grad.item(), b.grad.item()) == (2.0**-13, 2.0**-13)
    b.grad = torch.ones_like(b)
    started(cls).step(torch.optim.Adam([b], lr=0.1, fused=True))  # amp-aware ones need no leave


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_with_a_graph_are_written_in_place() -> None:
    scaler, (param, _) = started(GradScaler, 4.0), one_parameter()
    for use in (scaler.unscale_, lambda o: scaler.clip_grad_norm_(o, 1e9), lambda o: scaler.clip_grad_value_(o, 1e9)):
        param.grad = None
        scaler.scale((param**3).sum()).backward(create_graph=True)
        use(torch.optim.SGD([param], lr=1.0))
        assert param.grad.item() == 3.0
    param.grad = None  # breaks the reference cycle that create_graph makes


@BOTH
def test_the_check_looks_once_and_leaves_version_counters_alone(cls) -> None:
    """What code does to gradients after unscale_ is its own business."""
    scaler, (param, optimizer) = started(cls), one_parameter(grad=1.0)
    version = param.grad._version
    scaler.unscale_(optimizer)
    assert param.grad._version == version
    param.grad.fill_(float("nan"))
    scaler.step(optimizer)
    assert param.isnan().all()


# Several optimizers in one iteration


@BOTH
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("scaled", ["between", "zeroed", "kept", "ahead", "together"])
def test_gradients_computed_again_between_two_steps_are_unscaled_again(cls, scaled, fused) -> None:
    """A GAN without an update between its phases: the second optimizer's gradients are new, though shared.

    Also where they are written to the same tensor: one that is zeroed, or one that DDP keeps for its bucket.
    """
    shared = torch.nn.Parameter(torch.ones(2))
    optimizers = [torch.optim.SGD([shared], lr=0.5, fused=fused) for _ in range(2)]
    scaler = cls("cpu", 2.0**8)
    losses = [shared.sum(), shared.sum()] if scaled in ("ahead", "together") else []
    kept = torch.zeros(2)
    losses = scaler.scale(losses) if scaled == "together" else [scaler.scale(loss) for loss in losses]
    for i, optimizer in enumerate(optimizers):
        optimizer.zero_grad(set_to_none=scaled != "zeroed")
        (losses[i] if losses else scaler.scale(shared.sum())).backward()
        if scaled == "kept":
            shared.grad = kept.copy_(shared.grad)
        if not losses:
            scaler.scale(torch.ones(()))  # another loss, which does not reach it
        scaler.step(optimizer)
    scaler.update()
    assert shared.tolist() == [0.0, 0.0]


class Wrapper:
    def __init__(self, inner):
        self.inner, self.param_groups, self.step = inner, inner.param_groups, inner.step


@pytest.mark.parametrize("make", [torch.optim.SGD, functools.partial(torch.optim.SGD, fused=True), AdamW])
@pytest.mark.parametrize("first", ["unscale_", "clip_grad_norm_", "step"])
@pytest.mark.parametrize("second", ["unscale_", "clip_grad_norm_", "step"])
@pytest.mark.parametrize("scaled", [0, 1, 2])
def test_a_gradient_of_two_optimizers_is_refused(make, first, second, scaled) -> None:
    """Where torch divides it twice; a wrapper is an optimizer of its own. Losses scaled in between do not reach it."""
    shared, own = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    inner = make([shared], lr=0.5)
    for other in (make([own, shared], lr=0.5), Wrapper(inner)):
        scaler = GradScaler("cpu", 4.0)
        shared.grad = own.grad = None
        scaler.scale(shared.sum() + own.sum()).backward()
        getattr(scaler, first)(inner, *[1e9] * (first == "clip_grad_norm_"))
        for _ in range(scaled):
            scaler.scale(own.sum()).backward()
        seen = [(param.detach().clone(), param.grad.clone()) for param in (shared, own)]
        name, wraps = type(inner).__name__, isinstance(other, Wrapper)
        names = rf"{type(other).__name__} and {name} share a gradient .* since the last update"
        advice = f"Wrapper wraps {name}: pass one" if wraps else "Assign each parameter"
        with pytest.raises(RuntimeError, match=rf"{names}.* {advice}"):
            getattr(scaler, second)(other, *[1e9] * (second == "clip_grad_norm_"))
        assert alike(seen, [(param.detach(), param.grad) for param in (shared, own)])
        scaler.update()
        scaler.unscale_(other)  # the next iteration


def test_a_wrapper_may_come_first_and_what_it_wraps_second() -> None:
    """fairseq and others unscale the one and step the other; torch divides twice."""
    scaler, (param, inner) = started(GradScaler, 2.0), one_parameter(grad=4.0)
    outer = Wrapper(inner)
    scaler.unscale_(outer)
    with pytest.raises(RuntimeError, match=r"SGD and Wrapper share a gradient.* Wrapper wraps SGD: pass one"):
        scaler.step(inner)
    assert (param.item(), param.grad.item()) == (1.0, 2.0)
    scaler.step(outer)
    assert param.item() == -1.0


@pytest.mark.parametrize("use", ["unscale_", "step"])
def test_no_other_optimizers_record_is_read(use, monkeypatch) -> None:
    """With an optimizer for each layer an iteration takes time in proportion to their number, not to its square."""

    class Record(dict):
        reads = 0

        def __getitem__(self, name):
            Record.reads += 1
            return super().__getitem__(name)

    monkeypatch.setattr(scaler_base, "ready_record", lambda: Record(ready_record()))
    scaler, counts = started(GradScaler), []
    for _ in range(20):
        _, optimizer = one_parameter(grad=1.0)
        Record.reads = 0
        getattr(scaler, use)(optimizer)
        counts.append(Record.reads)
    assert min(counts) == max(counts) > 0


def test_no_optimizer_gets_the_record_of_one_that_has_died() -> None:
    """Within an iteration: Python gives its id to the next object of its size."""
    scaler, stages = started(GradScaler), []
    for _ in range(5):
        _, optimizer = one_parameter(grad=1.0)
        stages.append(scaler._per_optimizer_states[id(optimizer)]["stage"].name)
        scaler.unscale_(optimizer)
        del optimizer
        gc.collect()
    assert set(stages) == {"READY"}
    scaler.update()
    assert len(scaler._records) == 0


@pytest.mark.parametrize("kind", [torch.Tensor, torch.nn.Parameter])
def test_marks_on_gradients_keep_nothing_alive_and_may_be_saved(kind, tmp_path) -> None:
    param, optimizer = one_parameter()
    param.grad = kind(torch.full((1,), 4.0))
    started(GradScaler, 2.0).unscale_(optimizer)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    torch.save(param.grad, tmp_path / "gradient.pt")
    assert torch.load(tmp_path / "gradient.pt", weights_only=True).tolist() == [2.0]
