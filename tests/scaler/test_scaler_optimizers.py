"""Every optimizer of torch.optim, in every implementation it has, under both scalers."""

import math

import pytest
import torch

import ampkit.optim
from ampkit.scaler.grad_scaler import GradScaler
from tests.helpers.scaler_tools import equal_bits, started, with_grads

LR = {"lr": 0.05}
CASES: dict[str, list[dict]] = {
    "Adadelta": [{"foreach": True}, {"foreach": False}, {"capturable": False}],
    "Adafactor": [{}],
    "Adagrad": [{"foreach": True}, {"foreach": False}, {"fused": True}],
    "Adam": [{"foreach": True}, {"foreach": False}, {"fused": True}, {"amsgrad": True}],
    "AdamW": [{"foreach": True}, {"foreach": False}, {"fused": True}, {"fused": True, "amsgrad": True}],
    "Adamax": [{"foreach": True}, {"foreach": False}],
    "ASGD": [{"foreach": True}, {"foreach": False}],
    "Muon": [{}],
    "NAdam": [{"foreach": True}, {"foreach": False}],
    "RAdam": [{"foreach": True}, {"foreach": False}],
    "RMSprop": [{"foreach": True}, {"foreach": False}, {"momentum": 0.9, "centered": True}],
    "Rprop": [{"foreach": True}, {"foreach": False}],
    "SGD": [
        {"foreach": True, "momentum": 0.9},
        {"foreach": False},
        {"fused": True, "momentum": 0.9, "nesterov": True},
        {"fused": True, "momentum": 0.9, "dampening": 0.1},
    ],
}
PARAMETERS = [(name, options) for name, cases in CASES.items() for options in cases]


def test_no_optimizer_of_torch_is_forgotten() -> None:
    """LBFGS is tested among the closures, SparseAdam below."""
    everyone = {
        name
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
    }
    assert everyone - set(CASES) == {"LBFGS", "SparseAdam"}


def assert_alike(make_ours, make_theirs, shapes, faults, clip: bool) -> None:
    """Train under both scalers, with a fault in some steps: scales and parameters must be equal to the bit throughout.

    State too, where both optimizers keep the same.
    """
    runs = []
    for cls, make in ((GradScaler, make_ours), (torch.amp.GradScaler, make_theirs)):
        params = with_grads([torch.ones(shape) for shape in shapes])
        runs.append((started(cls, growth_interval=2), params, make(params)))
    for step, bad in enumerate(faults):
        noise = [torch.randn(shape) for shape in shapes]
        for scaler, params, optimizer in runs:
            for param, grad in zip(params, noise, strict=True):
                param.grad = grad * scaler.get_scale()
            if bad:
                params[step % 2].grad.view(-1)[0] = float(bad)
            if clip and isinstance(scaler, GradScaler):
                scaler.clip_grad_norm_(optimizer, 0.5)
            elif clip:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(params, 0.5)
            scaler.step(optimizer)
            scaler.update()
        (ours, mine, my_optimizer), (theirs, others, other_optimizer) = runs
        assert ours.get_scale() == theirs.get_scale()
        assert bool(ours.found_inf(my_optimizer)) == bool(bad)
        for a, b in zip(mine, others, strict=True):
            assert equal_bits(a.detach(), b.detach())
            left, right = my_optimizer.state[a], other_optimizer.state[b]
            assert make_ours is not make_theirs or left.keys() == right.keys()
            for key in left.keys() & right.keys():
                value = torch.as_tensor(left[key])
                assert equal_bits(value, torch.as_tensor(right[key], dtype=value.dtype)), key


@pytest.mark.parametrize("clip", [False, True], ids=["plain", "clipped"])
@pytest.mark.parametrize(("name", "options"), PARAMETERS, ids=[f"{n}-{'-'.join(o) or 'plain'}" for n, o in PARAMETERS])
def test_steps_and_skips_equal_torchs(name, options, clip) -> None:
    """The overflow does not come first, because torch's fused SGD does not survive that."""
    shapes = [(4, 3), (2, 5)] if name == "Muon" else [(4, 3), (5,)]

    def make(params):
        return getattr(torch.optim, name)(params, **LR, **options)

    assert_alike(make, make, shapes, [None, None, "inf", None, "nan", "nan", None], clip)


@pytest.mark.parametrize(("name", "options"), [("AdamW", {}), ("SGD", {"momentum": 0.9})])
@pytest.mark.parametrize("clip", [False, True])
def test_ampkits_own_equal_torchs(name, options, clip) -> None:
    ours, theirs = (
        lambda params, library=library: getattr(library, name)(params, **LR, **options)
        for library in (ampkit.optim, torch.optim)
    )
    assert_alike(ours, theirs, [(4, 3), (5,)], ["inf", None, None, "nan", None], clip)


def test_sparse_adam() -> None:
    tables = []
    for cls in (GradScaler, torch.amp.GradScaler):
        torch.manual_seed(0)
        table = torch.nn.Embedding(6, 3, sparse=True)
        optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
        scaler = cls("cpu", growth_interval=2)
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(table(torch.tensor([1, 1, step])).square().sum()).backward()
            if step == 1:
                table.weight.grad._values()[0, 0] = math.nan
            scaler.step(optimizer)
            scaler.update()
        tables.append(table.weight.detach())
    assert equal_bits(*tables)


def test_the_attribute_protocol_is_torchs() -> None:
    seen = []

    class Aware(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self):
            seen.append((self.grad_scale, self.found_inf.item()))

    (param,) = with_grads([torch.tensor([8.0])])
    for cls in (GradScaler, torch.amp.GradScaler):
        optimizer = Aware([param], lr=1.0)
        scaler = started(cls, 4.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.grad_scale = torch.tensor(3.0)  # a preset multiplies
        scaler.step(optimizer)
        scaler.update()
        optimizer.grad_scale = torch.tensor(3.0)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        assert not hasattr(optimizer, "grad_scale")
        assert not hasattr(optimizer, "found_inf")
    values = [(None if scale is None else float(scale), flag) for scale, flag in seen]
    assert values[:4] == values[4:] == [(4.0, 0.0), (12.0, 0.0), (3.0, 0.0), (None, 0.0)]


def test_optimizers_that_take_the_scaler_still_do() -> None:
    class Old(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, grad_scaler=None):
            return grad_scaler

    (param,) = with_grads([torch.ones(1)])
    for cls in (GradScaler, torch.amp.GradScaler):
        scaler = started(cls)
        with pytest.warns(FutureWarning, match="optimizer") as caught:
            assert scaler.step(Old([param], lr=0.1)) is scaler
        assert caught[0].filename == __file__


def test_fp16_parameters_with_leave() -> None:
    """allow_fp16 is for optimizers that keep float32 masters; the gradients are unscaled in place."""
    (param,) = with_grads([torch.tensor([8.0, 6e-8 * 4], dtype=torch.float16)])
    scaler = started(GradScaler, 4.0, allow_fp16=True)
    scaler.unscale_(torch.optim.SGD([param], lr=0.1))
    assert param.grad[0].item() == 2.0
    fused = torch.optim.Adam(with_grads([torch.tensor([8.0], dtype=torch.float16)]), lr=0.1, fused=True)
    started(GradScaler).step(fused)  # amp-aware optimizers need no leave, as in torch


@pytest.mark.parametrize("missing_group", [False, True])
def test_several_groups_and_missing_gradients(missing_group) -> None:
    runs = []
    for cls in (GradScaler, torch.amp.GradScaler):
        params = with_grads([torch.ones(2), torch.ones(3, dtype=torch.float64), torch.ones(1)])
        if missing_group:
            params[1].grad = None
        groups = [{"params": params[:1]}, {"params": params[1:2], "lr": 0.5}, {"params": params[2:]}]
        scaler = started(cls)
        optimizer = torch.optim.Adam(groups, lr=0.1)
        scaler.step(optimizer)
        scaler.update()
        runs.append(params)
    assert all(equal_bits(a.detach(), b.detach()) for a, b in zip(*runs, strict=True))
