"""autocast and GradScaler together against torch.amp's pair: losses, gradients, parameters, scales, to the
bit.
"""

import pytest
import torch
from torch import nn

from ampkit.policy.policy import Policy
from ampkit.region.autocast import autocast
from ampkit.scaler.grad_scaler import GradScaler
from tests.helpers.scaler_tools import equal_bits


class Reader(nn.Module):
    """A small classifier with the layers that matter: embedding, convolution, attention, norms, dropout,
    loss.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.conv(self.embed(tokens).transpose(1, 2)).transpose(1, 2)
        logits = self.head(self.block(torch.relu(hidden)).mean(1))
        return nn.functional.cross_entropy(logits, targets)


def make_run(ours: bool, fused: bool):
    torch.manual_seed(0)
    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    # grows into overflow and falls back, many times in fifty steps
    scaler = (GradScaler if ours else torch.amp.GradScaler)("cpu", 2.0**18, growth_interval=3)
    return model, optimizer, scaler


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("fused", "clip"), [(False, False), (False, True), (True, False), (True, True)])
def test_fifty_steps_of_a_model(dtype, fused, clip) -> None:
    runs = {ours: make_run(ours, fused) for ours in (True, False)}
    batches = torch.Generator().manual_seed(1)
    skips = 0
    for step in range(50):
        tokens = torch.randint(20, (4, 6), generator=batches)
        targets = torch.randint(5, (4,), generator=batches)
        losses = {}
        for ours, (model, optimizer, scaler) in runs.items():
            torch.manual_seed(step)  # the same dropout
            region = autocast("cpu", dtype, policy=Policy.torch("cpu")) if ours else torch.autocast("cpu", dtype)
            optimizer.zero_grad()
            with region:
                losses[ours] = model(tokens, targets)
            scaler.scale(losses[ours]).backward()
            if clip and ours:
                scaler.clip_grad_norm_(optimizer, 1.0)
            elif clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        (mine, optimizer, ours), (theirs, _, torchs) = runs[True], runs[False]
        skipped = bool(ours.found_inf(optimizer))
        skips += skipped
        assert equal_bits(losses[True], losses[False]), step
        for (name, a), b in zip(mine.named_parameters(), theirs.parameters(), strict=True):
            assert equal_bits(a.detach(), b.detach()), (step, name)
            # where a step is skipped the two may leave gradients scaled or unscaled; otherwise nothing may
            # differ
            assert skipped or equal_bits(a.grad, b.grad), (step, name)
        assert (ours.get_scale(), ours._get_growth_tracker()) == (torchs.get_scale(), torchs._get_growth_tracker())
    assert skips > 0 if dtype is torch.float16 else skips == 0
