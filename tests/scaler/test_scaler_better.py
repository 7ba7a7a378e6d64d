"""What ampkit's scaler gets right and torch's does not.

Each test here runs against torch's scaler too, which must fail it: the day it passes there, the mark says so.
"""

import math
from collections import defaultdict, namedtuple

import pytest
import torch

import ampkit.optim
from ampkit.scaler.grad_scaler import GradScaler
from tests.helpers.scaler_tools import iterate, started

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


def sparse(*values: float) -> torch.Tensor:
    """One element, in parts that are to be added up."""
    return torch.sparse_coo_tensor([[1] * len(values)], torch.tensor(values), (3,), check_invariants=True)


@BETTER
@pytest.mark.parametrize(
    ("scale", "grad"),
    [
        (2.0**-4, torch.tensor([1e38])),                            # inf when it is divided
        (2.0**-4, torch.tensor([2e38], dtype=torch.bfloat16)),      # by its own range
        (1.0, sparse(3e38, 3e38)),                                  # inf when it is added up
        (1.0, torch.tensor([complex(0.0, math.nan)])),
    ],
    ids=["divided", "bfloat16", "sparse", "complex"],
)
def test_overflows_of_every_kind_are_found(cls, scale, grad) -> None:
    scaler, param = started(cls, scale), with_grad(grad.clone())
    iterate(scaler, sgd(param))
    assert torch.equal(param.detach(), torch.ones_like(param))
    assert scaler.get_scale() == scale / 2


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
    scaler.update(torch.tensor(0.0))
    assert scaler.get_scale() > 0.0


@BETTER
def test_an_optimizer_without_gradients_is_left_alone_and_stops_no_other(cls) -> None:
    scaler = started(cls)
    frozen, moving = torch.nn.Parameter(torch.ones(1)), with_grad(torch.ones(1))
    iterate(scaler, sgd(frozen))
    assert scaler.get_scale() == 2.0**16
    scaler.step(sgd(frozen))
    iterate(scaler, sgd(moving))
    assert moving.item() < 1.0
    assert scaler._get_growth_tracker() == 1


@BETTER
def test_fused_sgd_momentum_survives_an_overflow_in_its_first_step(cls, monkeypatch) -> None:
    """torch leaves the momentum buffer uninitialised when the kernel returns early, and uses it afterwards."""
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(math.nan))  # poison
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizers = [
        sgd(params[0], fused=True, momentum=0.9), sgd(params[1], foreach=False, momentum=0.9),
        ampkit.optim.SGD(params[2:], lr=1.0, fused=True, momentum=0.9),
    ]
    scalers = [started(cls) for _ in params]
    for values in ([math.inf, 1.0], [math.nan, 1.0], [1.0, 2.0], [3.0, 4.0]):
        for param, optimizer, scaler in zip(params, optimizers, scalers, strict=True):
            param.grad = torch.tensor(values) * scaler.get_scale()
            iterate(scaler, optimizer)
    assert torch.equal(params[0], params[1])
    assert torch.equal(params[2], params[1])


@BETTER
def test_attributes_are_gone_or_back_when_a_step_raises(cls) -> None:
    class Fails(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self):
            raise ValueError("out of luck")

    optimizer = Fails([with_grad(torch.ones(1))], lr=1.0)
    optimizer.grad_scale = preset = torch.tensor(3.0)
    scaler = started(cls)
    for _ in range(2):      # still READY
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
    optimizer = sgd(with_grad(torch.tensor([math.inf])))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    iterate(started(cls), optimizer)
    schedule.step()


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
