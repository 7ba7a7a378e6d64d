"""Every optimizer of torch.optim, in every implementation it has, and ampkit's own, under both scalers."""

import math

import pytest
import torch

import ampkit.optim
from ampkit.scaler.grad_scaler import GradScaler
from tests.helpers.op_samples import same
from tests.helpers.scaler_tools import alike, iterate, started, with_grads

FOREACH, PLAIN, FUSED = {"foreach": True}, {"foreach": False}, {"fused": True}
CASES: dict[str, list[dict]] = {
    "Adadelta": [FOREACH, PLAIN],
    "Adafactor": [{}],
    "Adagrad": [FOREACH, PLAIN, FUSED],
    "Adam": [FOREACH, PLAIN, FUSED, {"amsgrad": True}],
    "AdamW": [FOREACH, PLAIN, FUSED, {"fused": True, "amsgrad": True}],
    "Adamax": [FOREACH, PLAIN],
    "ASGD": [FOREACH, PLAIN],
    "Muon": [{}],
    "NAdam": [FOREACH, PLAIN],
    "RAdam": [FOREACH, PLAIN],
    "RMSprop": [FOREACH, PLAIN, {"momentum": 0.9, "centered": True}],
    "Rprop": [FOREACH, PLAIN],
    "SGD": [
        {"foreach": True, "momentum": 0.9}, PLAIN, {"fused": True, "momentum": 0.9, "nesterov": True},
        {"fused": True, "momentum": 0.9, "dampening": 0.1},
    ],
    "ampkit AdamW": [{}],
    "ampkit SGD": [{"momentum": 0.9}],
}
PARAMETERS = [(name, options) for name, cases in CASES.items() for options in cases]


def test_no_optimizer_of_torch_is_forgotten() -> None:
    """LBFGS is tested among the closures, SparseAdam below."""
    everyone = {name for name, cls in vars(torch.optim).items() if isinstance(cls, type)} - {"Optimizer"}
    assert everyone - set(CASES) == {"LBFGS", "SparseAdam"}


@pytest.mark.parametrize("clip", [False, True], ids=["plain", "clipped"])
@pytest.mark.parametrize(("name", "options"), PARAMETERS, ids=[f"{n}-{'-'.join(o) or 'plain'}" for n, o in PARAMETERS])
def test_steps_and_skips_equal_torchs(name: str, options: dict, clip: bool) -> None:
    """The overflow does not come first, because torch's fused SGD does not survive that."""
    theirs = name.removeprefix("ampkit ")
    shapes = [(4, 3), (2, 5)] if name == "Muon" else [(4, 3), (5,)]
    own = torch.optim if theirs == name else ampkit.optim
    runs = []
    for cls, library in ((GradScaler, own), (torch.amp.GradScaler, torch.optim), (torch.amp.GradScaler, own)):
        params = with_grads([torch.ones(shape) for shape in shapes])
        groups = [{"params": params[:1]}, {"params": params[1:], "lr": 0.1}]
        runs.append((started(cls, growth_interval=2), params, getattr(library, theirs)(groups, lr=0.05, **options)))
    for step, bad in enumerate([None, None, "inf", None, "nan", "nan", None]):
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
            iterate(scaler, optimizer)
        for scaler, params, optimizer in runs:
            assert scaler.get_scale() == runs[0][0].get_scale()
            assert alike(params, runs[0][1])
            assert alike([*optimizer.state.values()], [*runs[0][2].state.values()])
        assert bool(runs[0][0].found_inf(runs[0][2])) == bool(bad)


def test_sparse_adam() -> None:
    tables = []
    for cls in (GradScaler, torch.amp.GradScaler):
        torch.manual_seed(0)
        table = torch.nn.Embedding(6, 3, sparse=True)
        optimizer, scaler = torch.optim.SparseAdam(table.parameters(), lr=0.1), cls("cpu", growth_interval=2)
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(table(torch.tensor([1, 1, step])).square().sum()).backward()
            if step == 1:
                table.weight.grad._values()[0, 0] = math.nan
            iterate(scaler, optimizer)
        tables.append(table.weight.detach())
    assert same(*tables)


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
        for preset, unscales in ((False, False), (True, False), (True, True), (False, True)):
            if preset:
                optimizer.grad_scale = torch.tensor(3.0)  # multiplies
            if unscales:
                scaler.unscale_(optimizer)
            iterate(scaler, optimizer)
            assert not hasattr(optimizer, "grad_scale")
            assert not hasattr(optimizer, "found_inf")
    values = [(None if scale is None else float(scale), flag) for scale, flag in seen]
    assert values[:4] == values[4:] == [(4.0, 0.0), (12.0, 0.0), (3.0, 0.0), (None, 0.0)]


def test_optimizers_that_take_the_scaler_still_do() -> None:
    """As Apex's FusedAdam."""
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
