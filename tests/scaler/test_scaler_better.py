"""What ampkit's scaler gets right and torch's does not.

Each test here runs against torch's scaler too, which must fail it: the day it passes there, the mark says so.
"""

import math
from collections import defaultdict, namedtuple

import pytest
import torch

import ampkit.optim
from ampkit.scaler.grad_scaler import GradScaler
from tests.helpers.scaler_tools import iterate, one_parameter, started, with_grads

DIFFERS = pytest.mark.xfail(strict=True, reason="torch's scaler differs")
BETTER = pytest.mark.parametrize("cls", [GradScaler, pytest.param(torch.amp.GradScaler, marks=DIFFERS, id="torch")])


@BETTER
@pytest.mark.parametrize(
    ("scale", "grad"),
    [
        (2.0**-4, torch.tensor([1e38])),  # inf when it is divided
        (2.0**-4, torch.tensor([2e38], dtype=torch.bfloat16)),  # by its own range
        (1.0, torch.sparse_coo_tensor([[1, 1]], [3e38, 3e38], (3,), check_invariants=True)),  # inf when it is added up
        (1.0, torch.tensor([complex(0.0, math.nan)])),
    ],
    ids=["divided", "bfloat16", "sparse", "complex"],
)
def test_overflows_of_every_kind_are_found(cls, scale, grad) -> None:
    scaler, param = started(cls, scale), torch.nn.Parameter(torch.ones(grad.shape, dtype=grad.dtype))
    param.grad = grad.clone()
    iterate(scaler, torch.optim.SGD([param], lr=1.0))
    assert torch.equal(param.detach(), torch.ones_like(param))
    assert scaler.get_scale() == scale / 2


@BETTER
@pytest.mark.filterwarnings("ignore:the loss scale has fallen")
def test_the_scale_never_reaches_zero(cls) -> None:
    scaler = started(cls, 1.0)
    for _ in range(160):
        iterate(scaler, one_parameter()[1], math.inf)
    assert scaler.get_scale() > 0.0
    param, optimizer = one_parameter(grad=0.0)
    iterate(scaler, optimizer)
    assert param.item() == 1.0
    scaler.update(torch.tensor(0.0))
    assert scaler.get_scale() > 0.0


@BETTER
def test_an_optimizer_without_gradients_is_left_alone_and_stops_no_other(cls) -> None:
    scaler, (_, frozen), (param, moving) = started(cls), one_parameter(), one_parameter(grad=1.0)
    iterate(scaler, frozen)
    assert scaler.get_scale() == 2.0**16
    scaler.step(frozen)
    iterate(scaler, moving)
    assert param.item() < 1.0
    assert scaler._get_growth_tracker() == 1


@BETTER
def test_fused_sgd_momentum_survives_an_overflow_in_its_first_step(cls, monkeypatch) -> None:
    """torch leaves the momentum buffer uninitialized when the kernel returns early, and uses it afterwards."""
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(math.nan))  # poison
    params = []
    for make, fused in ((torch.optim.SGD, False), (torch.optim.SGD, True), (ampkit.optim.SGD, True)):
        scaler, param = started(cls), torch.nn.Parameter(torch.ones(2))
        optimizer = make([param], lr=1.0, fused=fused, momentum=0.9)
        for values in ([math.inf, 1.0], [math.nan, 1.0], [1.0, 2.0], [3.0, 4.0]):
            param.grad = torch.tensor(values) * scaler.get_scale()
            iterate(scaler, optimizer)
        params.append(param)
    assert torch.equal(params[0], params[1])
    assert torch.equal(params[0], params[2])


@BETTER
def test_attributes_are_gone_or_back_when_a_step_raises(cls) -> None:
    class Fails(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self):
            raise ValueError("out of luck")

    optimizer = Fails(with_grads([torch.ones(1)]), lr=1.0)
    optimizer.grad_scale = preset = torch.tensor(3.0)
    scaler = started(cls)
    for _ in range(2):  # still READY
        with pytest.raises(ValueError, match="out of luck"):
            scaler.step(optimizer)
        assert optimizer.grad_scale is preset
        assert not hasattr(optimizer, "found_inf")


@BETTER
def test_mappings_and_named_tuples_of_outputs(cls) -> None:
    """One whose constructor takes no mapping keeps its type too; a string is no collection of tensors."""
    Pair = namedtuple("Pair", "a b")
    one = torch.ones((), requires_grad=True)
    outputs = defaultdict(list, x=one, y=Pair(one, [one]))
    scaler = started(cls, 2.0)
    scaled = scaler.scale(outputs)
    assert (type(scaled), scaled.default_factory, type(scaled["y"])) == (defaultdict, list, Pair)
    assert (scaled["x"].item(), scaled["y"].a.item(), scaled["y"].b[0].item()) == (2.0, 2.0, 2.0)
    assert outputs["x"].item() == 1.0
    with pytest.raises(ValueError, match="got str"):
        scaler.scale("loss")


@BETTER
def test_the_scheduler_does_not_complain_about_a_skipped_first_step(cls) -> None:
    for grad in (math.inf, None):
        _, optimizer = one_parameter(grad=grad)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        iterate(started(cls), optimizer)
        schedule.step()


@BETTER
def test_fused_optimizers_see_exactly_one(cls) -> None:
    """Two devices that both overflow add up to 2 in torch, and fused kernels only skip on exactly 1."""
    scaler, (param,) = started(cls), with_grads([torch.ones(1)])
    optimizer = torch.optim.Adam([param], lr=1.0, fused=True)
    scaler.unscale_(optimizer)
    found = scaler._found_inf_per_device(optimizer)
    found.clear()
    for i in range(2):
        found[torch.device("meta", i)] = torch.tensor(1.0)  # stand-ins for the names of two devices
    scaler.step(optimizer)
    assert param.item() == 1.0
