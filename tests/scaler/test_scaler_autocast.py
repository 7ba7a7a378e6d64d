"""autocast and GradScaler together against torch.amp's pair: losses, gradients, parameters, scales, to the bit."""

import pytest
import torch

from ampkit import GradScaler
from tests.helpers.models import CASES
from tests.helpers.regions import like_torch
from tests.helpers.scaler_tools import alike


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("fused", "clip"), [(False, True), (True, False)])
def test_fifty_steps_of_a_model(dtype, fused, clip) -> None:
    case, runs = CASES["encoder"], []
    for region, cls in ((like_torch, GradScaler), (lambda dtype: torch.autocast("cpu", dtype), torch.amp.GradScaler)):
        torch.manual_seed(0)
        model, found, skips = case.build(), [], 0
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
        scaler = cls("cpu", 2.0**18, growth_interval=3)     # grows into overflow and falls back, many times
        for _ in range(50):
            optimizer.zero_grad()
            with region(dtype):
                loss = case.loss_of(model)
            scaler.scale(loss).backward()
            grads = [param.grad.clone() for param in model.parameters()]
            if clip and cls is GradScaler:
                scaler.clip_grad_norm_(optimizer, 1.0)
            elif clip:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scale = scaler.get_scale()
            scaler.update()
            skips += scaler.get_scale() < scale
            found.append([loss, grads, [param.detach().clone() for param in model.parameters()], scaler.state_dict()])
            found[-1][-1].pop("ampkit", None)
        runs.append(found)
        assert skips > 0 if dtype is torch.float16 else skips == 0
    assert alike(*runs)
