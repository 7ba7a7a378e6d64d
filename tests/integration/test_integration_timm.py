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


def trained(scaler: Any, mode: str | None, *, named: bool, spoil: bool = False) -> list[torch.Tensor]:
    """Weights after six batches, two to a step; `named`: the scaler is given the parameters that it clips."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.1, fused=True)
    clip: Any = {"clip_grad": 0.1, "clip_mode": mode, "parameters": params if named else None} if mode else {}
    for step, batch in enumerate(torch.randn(6, 4, 6)):
        loss = model(batch).square().mean() * (torch.inf if spoil and step == 3 else 1.0)
        scaler(loss, optimizer, need_update=step % 2 == 1, **clip)
        if step % 2 == 1:
            optimizer.zero_grad()
    return [param.detach() for param in params]


@pytest.mark.parametrize("mode", ["norm", "value", "agc", None])
def test_it_steps_as_timms_own_to_the_bit(mode: str | None) -> None:
    """With and without clipping, with accumulated batches, one of them skipped; checkpoints go both ways."""
    theirs = timm.utils.NativeScaler("cpu")
    expected = trained(theirs, mode, named=True, spoil=True)
    ours = NativeScaler("cpu", scaler=GradScaler("cpu"))
    assert isinstance(ours, timm.utils.NativeScaler)
    torch.testing.assert_close(trained(ours, mode, named=mode == "agc", spoil=True), expected, rtol=0, atol=0)
    assert ours.scaler.stats().skips == 1
    again, back = NativeScaler("cpu"), timm.utils.NativeScaler("cpu")
    again.load_state_dict(theirs.state_dict())
    back.load_state_dict(ours.state_dict())
    assert again.scaler.get_scale() == back._scaler.get_scale() == 32768.0


def test_refusals() -> None:
    """Before anything has run."""
    with pytest.raises(TypeError, match="expected an ampkit"):
        NativeScaler("cpu", scaler=torch.amp.GradScaler("cpu"))  # pyright: ignore[reportArgumentType]
    param = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="clip_mode is 'agc' without parameters; expected 'norm' or 'value'"):
        NativeScaler("cpu")(param.sum(), torch.optim.SGD([param]), clip_grad=1.0, clip_mode="agc")
    assert param.grad is None
