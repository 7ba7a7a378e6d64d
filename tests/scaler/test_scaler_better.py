"""What ampkit's scaler gets right and torch's does not.

Each test here runs against torch's scaler too, which must fail it: the day it passes there, the mark says so.
"""

import math
from collections import defaultdict, namedtuple

import pytest
import torch

from ampkit.scaler.grad_scaler import GradScaler
from tests.helpers.scaler_tools import started

BETTER = pytest.mark.parametrize(
    "cls",
    [
        GradScaler,
        pytest.param(torch.amp.GradScaler, marks=pytest.mark.xfail(strict=True, reason="torch's scaler differs")),
    ],
    ids=["ampkit", "torch"],
)


def with_grad(grad: torch.Tensor) -> torch.nn.Parameter:
    param = torch.nn.Parameter(torch.ones(grad.shape, dtype=grad.dtype))
    param.grad = grad
    return param


def sgd(*params: torch.Tensor, **options) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr=1.0, **options)


def iterate(scaler, optimizer) -> None:
    scaler.step(optimizer)
    scaler.update()


@BETTER
def test_overflow_made_by_unscaling_is_found(cls) -> None:
    """With a scale below 1 a finite gradient can turn into inf when it is divided."""
    scaler = started(cls, 2.0**-4)
    param = with_grad(torch.tensor([1e38]))
    iterate(scaler, sgd(param))
    assert param.item() == 1.0
    assert scaler.get_scale() == 2.0**-5


@BETTER
def test_bfloat16_and_float16_count_by_their_own_range(cls) -> None:
    scaler = started(cls, 2.0**-4)
    param = with_grad(torch.tensor([2e38], dtype=torch.bfloat16))
    iterate(scaler, sgd(param))
    assert param.item() == 1.0


@BETTER
@pytest.mark.filterwarnings("ignore:the loss scale has fallen")
def test_the_scale_never_reaches_zero(cls) -> None:
    scaler = started(cls, 1.0)
    for _ in range(160):
        iterate(scaler, sgd(with_grad(torch.tensor([math.inf]))))
    assert scaler.get_scale() > 0.0
    param = with_grad(torch.tensor([0.0]))
    iterate(scaler, sgd(param))
    assert param.item() == 1.0


@BETTER
def test_an_optimizer_without_gradients_is_left_alone(cls) -> None:
    scaler = started(cls)
    param = torch.nn.Parameter(torch.ones(1))
    iterate(scaler, sgd(param))
    assert scaler.get_scale() == 2.0**16


@BETTER
def test_a_frozen_phase_does_not_stop_the_other_optimizer(cls) -> None:
    scaler = started(cls)
    frozen, moving = torch.nn.Parameter(torch.ones(1)), with_grad(torch.ones(1))
    scaler.step(sgd(frozen))
    iterate(scaler, sgd(moving))
    assert moving.item() < 1.0
    assert scaler._get_growth_tracker() == 1


@BETTER
def test_a_parameter_of_two_optimizers_is_unscaled_once(cls) -> None:
    scaler = started(cls, 4.0)
    shared, own = with_grad(torch.tensor([8.0])), with_grad(torch.tensor([8.0]))
    scaler.unscale_(sgd(shared))
    scaler.unscale_(sgd(shared, own))
    assert (shared.grad.item(), own.grad.item()) == (2.0, 2.0)


@BETTER
def test_a_wrapper_steps_what_was_unscaled_inside_it(cls) -> None:
    class Wrapper:
        def __init__(self, inner):
            self.inner, self.param_groups, self.step = inner, inner.param_groups, inner.step

    scaler = started(cls, 4.0)
    param = with_grad(torch.tensor([8.0]))
    inner = sgd(param)
    scaler.unscale_(inner)
    scaler.step(Wrapper(inner))
    assert param.item() == -1.0


@BETTER
def test_complex_gradients(cls) -> None:
    scaler = started(cls, 4.0)
    param = with_grad(torch.tensor([8 - 4j]))
    scaler.unscale_(sgd(param))
    assert param.grad.item() == 2 - 1j
    scaler.update()
    bad = with_grad(torch.tensor([complex(0.0, math.nan)]))
    iterate(scaler, sgd(bad))
    assert bad.item() == 1.0


@BETTER
def test_expanded_gradients(cls) -> None:
    scaler = started(cls, 4.0)
    param = with_grad(torch.tensor([8.0]).expand(3))
    scaler.unscale_(sgd(param))
    assert param.grad.tolist() == [2.0, 2.0, 2.0]


@BETTER
def test_float32_sparse_duplicates_that_overflow_when_added(cls) -> None:
    values = torch.tensor([3e38, 3e38])
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.sparse_coo_tensor([[1, 1]], values, (3,), check_invariants=True)
    scaler = started(cls, 1.0)
    iterate(scaler, sgd(param))
    assert param.tolist() == [1.0, 1.0, 1.0]


@BETTER
@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_fused_sgd_momentum_survives_an_overflow_in_its_first_step(cls, dampening, monkeypatch) -> None:
    """torch leaves the momentum buffer uninitialised when the kernel returns early, and uses it afterwards.
    """
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(math.nan))  # poison
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    options = {"momentum": 0.9, "dampening": dampening}
    fused, plain = sgd(params[0], fused=True, **options), sgd(params[1], foreach=False, **options)
    scalers = [started(cls), started(cls)]
    for values in ([math.inf, 1.0], [math.nan, 1.0], [1.0, 2.0], [3.0, 4.0]):
        for param, optimizer, scaler in zip(params, (fused, plain), scalers, strict=True):
            param.grad = torch.tensor(values) * scaler.get_scale()
            iterate(scaler, optimizer)
    assert torch.equal(params[0], params[1])


@BETTER
def test_attributes_are_gone_or_back_when_a_step_raises(cls) -> None:
    class Fails(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self):
            raise ValueError("out of luck")

    optimizer = Fails([with_grad(torch.ones(1))], lr=1.0)
    optimizer.grad_scale = preset = torch.tensor(3.0)
    scaler = started(cls)
    with pytest.raises(ValueError, match="out of luck"):
        scaler.step(optimizer)
    assert optimizer.grad_scale is preset
    assert not hasattr(optimizer, "found_inf")
    with pytest.raises(ValueError, match="out of luck"):
        scaler.step(optimizer)  # still READY


@BETTER
def test_mappings_and_named_tuples_of_outputs(cls) -> None:
    """One whose constructor takes no mapping keeps its type too."""
    Pair = namedtuple("Pair", "a b")
    one = torch.ones((), requires_grad=True)
    outputs = defaultdict(list, x=one, y=Pair(one, [one]))
    scaled = started(cls, 2.0).scale(outputs)
    assert (type(scaled), scaled.default_factory, type(scaled["y"])) == (defaultdict, list, Pair)
    assert (scaled["x"].item(), scaled["y"].a.item(), scaled["y"].b[0].item()) == (2.0, 2.0, 2.0)
    assert outputs["x"].item() == 1.0


@BETTER
def test_a_string_is_no_collection_of_tensors(cls) -> None:
    with pytest.raises(ValueError, match="got str"):
        started(cls).scale("loss")


@BETTER
def test_the_scheduler_does_not_complain_about_a_skipped_first_step(cls) -> None:
    param = with_grad(torch.tensor([math.inf]))
    optimizer = sgd(param)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    iterate(started(cls), optimizer)
    schedule.step()


@BETTER
def test_positional_closures_are_unscaled(cls) -> None:
    """torch lets them through, and the optimizer steps with gradients 65536 times too large."""
    param = torch.nn.Parameter(torch.ones(1))
    optimizer = sgd(param)
    scaler = started(cls)

    def closure():
        optimizer.zero_grad()
        loss = param.square().sum()
        scaler.scale(loss).backward()
        return loss

    param.grad = torch.ones(1)
    scaler.step(optimizer, closure)
    assert param.item() == -1.0


@BETTER
def test_one_gradient_in_two_places_is_divided_once(cls) -> None:
    scaler = started(cls, 4.0)
    a, b = with_grad(torch.tensor([8.0])), torch.nn.Parameter(torch.ones(1))
    b.grad = a.grad
    scaler.unscale_(sgd(a, b))
    assert a.grad.item() == 2.0


@BETTER
def test_a_bad_update_leaves_the_scale_usable(cls) -> None:
    scaler = started(cls)
    scaler.update(torch.tensor(0.0))
    assert scaler.get_scale() > 0


@BETTER
def test_fused_optimizers_see_exactly_one(cls) -> None:
    """Two devices that both overflow add up to 2 in torch, and fused kernels only skip on exactly 1."""
    scaler = started(cls)
    param = with_grad(torch.ones(1))
    optimizer = torch.optim.Adam([param], lr=1.0, fused=True)
    scaler.unscale_(optimizer)
    found = scaler._found_inf_per_device(optimizer)
    found.clear()
    for i in range(2):
        found[torch.device("meta", i)] = torch.tensor(1.0)  # stand-ins for the names of two devices
    scaler.step(optimizer)
    assert param.item() == 1.0
