"""autocast and GradScaler together against torch.amp's pair: losses, gradients, parameters, scales, to the bit."""

import pytest
import torch

from ampkit import GradScaler, Policy, autocast
from tests.helpers.models import CASES
from tests.helpers.op_samples import same

CASE = CASES["encoder"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("fused", "clip"), [(False, True), (True, False)])
def test_fifty_steps_of_a_model(dtype, fused, clip) -> None:
    runs = []
    for scaler_of in (GradScaler, torch.amp.GradScaler):
        torch.manual_seed(0)
        model = CASE.build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
        # grows into overflow and falls back, many times in fifty steps
        runs.append((model, optimizer, scaler_of("cpu", 2.0**18, growth_interval=3)))
    skips = 0
    for step in range(50):
        losses = []
        for model, optimizer, scaler in runs:
            torch.manual_seed(step)     # the same batch and the same dropout
            inputs, targets = CASE.batch()
            ours = isinstance(scaler, GradScaler)
            optimizer.zero_grad()
            with autocast("cpu", dtype, policy=Policy.torch("cpu")) if ours else torch.autocast("cpu", dtype):
                losses.append(CASE.loss(model(inputs), targets))
            scaler.scale(losses[-1]).backward()
            if clip and ours:
                scaler.clip_grad_norm_(optimizer, 1.0)
            elif clip:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        (mine, optimizer, ours), (theirs, _, torchs) = runs
        skipped = bool(ours.found_inf(optimizer))
        skips += skipped
        assert same(*losses), step
        for (name, a), b in zip(mine.named_parameters(), theirs.parameters(), strict=True):
            assert same(a.detach(), b.detach()), (step, name)
            # after a skipped step either may have left its gradients scaled
            assert skipped or same(a.grad, b.grad), (step, name)
        assert (ours.get_scale(), ours._get_growth_tracker()) == (torchs.get_scale(), torchs._get_growth_tracker())
    assert skips > 0 if dtype is torch.float16 else skips == 0
