"""`ampkit.integrations.timm` with the real library, where it can be imported."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from ampkit import GradScaler

if find_spec("timm") is None:
    pytest.skip("timm is not installed", allow_module_level=True)

# timm imports torchvision, whose builds on PyPI are for CUDA: under a CPU build of torch two operators are missing,
# which timm has no use for here.
OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
for name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, name):
        OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import timm.utils  # noqa: E402

from ampkit.integrations.timm import NativeScaler  # noqa: E402


def trained(scaler: Any, *, which: Any = torch.optim.SGD, spoil: bool = False, **clipping: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
    optimizer = which(model.parameters(), lr=0.1)
    for step, batch in enumerate(torch.randn(6, 4, 6)):
        loss = model(batch).square().mean()
        if step == 2 and spoil:
            loss = loss * torch.inf
        due = step % 2 == 1
        scaler(loss, optimizer, need_update=due or spoil, **clipping)
        if due or spoil:
            optimizer.zero_grad()
    return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("mode", ["norm", "value", "agc", None])
def test_it_steps_as_timms_own_to_the_bit(mode: str | None, fused: bool) -> None:
    """With and without clipping, with accumulated batches."""

    def optimizer(params: Any, lr: float) -> torch.optim.Optimizer:
        optimizer.params = list(params)     # type: ignore[attr-defined]
        return torch.optim.SGD(optimizer.params, lr=lr, fused=fused)    # type: ignore[attr-defined]

    class Clips:
        def __init__(self, scaler: Any, *, named: bool) -> None:
            self.scaler, self.named = scaler, named

        def __call__(self, loss: torch.Tensor, step: Any, **kwargs: Any) -> None:
            params = optimizer.params if self.named else None       # type: ignore[attr-defined]
            clip = {} if mode is None else {"clip_grad": 0.1, "clip_mode": mode, "parameters": params}
            self.scaler(loss, step, **clip, **kwargs)

    theirs = timm.utils.NativeScaler("cpu")
    plain = trained(Clips(theirs, named=True), which=optimizer)
    ours = NativeScaler("cpu")
    assert isinstance(ours, timm.utils.NativeScaler)
    assert all(map(torch.equal, trained(Clips(ours, named=mode == "agc"), which=optimizer), plain))
    assert ours.state_dict()["scale"] == theirs.state_dict()["scale"]


def test_the_scaler_is_the_one_given_and_its_state_goes_both_ways() -> None:
    """Skips are counted; timm's checkpoints load, and the other way round."""
    ours = NativeScaler("cpu", scaler=GradScaler("cpu", init_scale=256.0))
    trained(ours, spoil=True)
    assert ours.scaler.stats().skips == 1
    theirs = timm.utils.NativeScaler("cpu")
    theirs.load_state_dict(ours.state_dict())
    assert theirs._scaler.get_scale() == 128.0
    again = NativeScaler("cpu")
    again.load_state_dict(theirs.state_dict())
    assert again.scaler.get_scale() == 128.0
    assert NativeScaler.state_dict_key == "amp_scaler"


def test_refusals() -> None:
    """Before anything has run."""
    with pytest.raises(TypeError, match="expected an ampkit"):
        NativeScaler("cpu", scaler=torch.amp.GradScaler("cpu"))     # pyright: ignore[reportArgumentType]
    param = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="clip_mode is 'agc' without parameters; expected 'norm' or 'value'"):
        NativeScaler("cpu")(param.sum(), torch.optim.SGD([param]), clip_grad=1.0, clip_mode="agc")
    assert param.grad is None
