"""Every optimizer of torch.optim, in every implementation it has, and ampkit's own, under both scalers."""

import pytest
import torch

import ampkit.optim
from ampkit.scaler.grad_scaler import GradScaler
from tests.helpers.scaler_tools import alike, clip, iterate, started, with_grads

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
        {"foreach": True, "momentum": 0.9},
        PLAIN,
        {"fused": True, "momentum": 0.9, "nesterov": True},
        {"fused": True, "momentum": 0.9, "dampening": 0.1},
    ],
    "SparseAdam": [{}],
    "ampkit AdamW": [PLAIN, FUSED],
    "ampkit SGD": [{"momentum": 0.9}],
}
PARAMETERS = [  # torch clips no sparse gradients
    (name, options, clipped)
    for name, cases in CASES.items()
    for options in cases
    for clipped in (False, True)[: 1 if name == "SparseAdam" else 2]
]


def test_no_optimizer_of_torch_is_forgotten() -> None:
    """LBFGS steps by closures alone, which neither scaler takes."""
    everyone = {name for name, cls in vars(torch.optim).items() if isinstance(cls, type)} - {"Optimizer"}
    assert everyone - set(CASES) == {"LBFGS"}


@pytest.mark.parametrize(
    ("name", "options", "clipped"),
    PARAMETERS,
    ids=[f"{name}-{'-'.join(options) or 'plain'}-{'clipped' * clipped}" for name, options, clipped in PARAMETERS],
)
def test_steps_and_skips_equal_torchs(name: str, options: dict, clipped: bool) -> None:
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
        if bad:
            noise[step % 2].view(-1)[0] = float(bad)
        for scaler, params, optimizer in runs:
            for param, grad in zip(params, noise, strict=True):
                param.grad = grad * scaler.get_scale()
                if name == "SparseAdam":
                    rows = torch.tensor([[1, 1, 3, 0, 2]])[:, : len(grad)]
                    param.grad = torch.sparse_coo_tensor(rows, param.grad, param.shape, check_invariants=True)
            if clipped:
                clip(scaler, optimizer, 0.5)
            iterate(scaler, optimizer)
        for scaler, params, optimizer in runs:
            assert scaler.get_scale() == runs[0][0].get_scale()
            assert alike(params, runs[0][1])
            assert alike([*optimizer.state.values()], [*runs[0][2].state.values()])
        assert bool(runs[0][0].found_inf(runs[0][2])) == bool(bad)


def test_the_attribute_protocol_is_torchs() -> None:
    seen = []

    class Aware(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self):
            seen.append((self.grad_scale, self.found_inf.item()))

    optimizer = Aware(with_grads([torch.tensor([8.0])]), lr=1.0)
    for cls in (GradScaler, torch.amp.GradScaler):
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
    assert values == [(4.0, 0.0), (12.0, 0.0), (3.0, 0.0), (None, 0.0)] * 2


def test_optimizers_that_take_the_scaler_still_do() -> None:
    """As Apex's FusedAdam."""

    class Old(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, grad_scaler=None):
            return grad_scaler

    for cls in (GradScaler, torch.amp.GradScaler):
        scaler = started(cls)
        with pytest.warns(FutureWarning, match="optimizer") as caught:
            assert scaler.step(Old(with_grads([torch.ones(1)]), lr=0.1)) is scaler
        assert caught[0].filename == __file__
