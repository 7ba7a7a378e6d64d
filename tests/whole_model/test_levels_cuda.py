"""Levels on a GPU."""

import pytest
import torch
import torch.nn.functional as F

from ampkit import Policy
from ampkit.amp import (
    initialize,
    loss_scalers,
    master_params,
)
from ampkit.containers import SIXTEEN_BIT
from ampkit.optim import SGD
from tests.helpers.levels import (
    backward,
    batches,
    ids,
    make,
    sgd,
)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", SIXTEEN_BIT, **ids)
@pytest.mark.parametrize("opt_level", ["O1", "O2", "O3"])
def test_on_cuda_levels_train_without_waiting_for_the_device(opt_level: str, dtype: torch.dtype) -> None:
    """With an optimizer that skips on the device, an overflow among the steps included."""
    model = make().cuda()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = initialize(model, optimizer, opt_level, dtype=dtype, loss_scale="dynamic", verbosity=0)
    data = [(x.cuda(), y.cuda()) for x, y in batches(1) * 12]
    losses = []
    for index, (x, y) in enumerate(data):
        torch.cuda.set_sync_debug_mode("error" if index > 1 else "default")     # the first steps allocate and compile
        try:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            backward(loss * (torch.inf if index == 4 else 1.0), optimizer)
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        losses.append(loss.detach())
    assert losses[-1] < losses[0] / 2
    stats = loss_scalers(optimizer)[0].stats()
    assert (stats.steps, stats.skips) == (11, 1)
    if opt_level == "O2":
        assert torch.equal(model.head.weight, list(master_params(optimizer))[-2].to(dtype))


@pytest.mark.gpu
def test_on_cuda_o1_is_torchs_autocast_and_scaler_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    plain, model = make().cuda(), make().cuda()
    plain_optimizer, scaler = sgd(plain), torch.amp.GradScaler("cuda")
    model, optimizer = initialize(model, sgd(model), "O1", policy=Policy.torch("cuda"), verbosity=0)
    for x, y in batches(8):
        plain_optimizer.zero_grad()
        with torch.autocast("cuda"):
            expected = F.cross_entropy(plain(x.cuda()), y.cuda())
        scaler.scale(expected).backward()
        scaler.step(plain_optimizer)
        scaler.update()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.cuda()), y.cuda())
        backward(loss, optimizer)
        optimizer.step()
        assert torch.equal(loss, expected)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p, q)
