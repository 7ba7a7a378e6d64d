"""Train with torch.autocast and torch's scaler, and with ampkit under torch's list, and compare all bits.

A model is a function that builds it and one that draws a batch and returns its loss: `build` and `loss_of` of a `Case`.
"""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ampkit import GradScaler
from tests.helpers.regions import like_torch

Region = Callable[[], contextlib.AbstractContextManager[Any]]
native = functools.partial(torch.autocast, "cpu")


def train(
    build: Callable[[], nn.Module],
    loss_of: Callable[[Any], Tensor],
    region: Region,
    *,
    steps: int = 3,
    seed: int = 0,
    scaled: bool = False,
    backward_inside: bool = False,
    micro_batches: int = 1,
    scaler_class: Any = torch.amp.GradScaler,
) -> dict[str, Tensor]:
    """The losses and gradients of each step, and the final parameters and buffers; of a DTensor this rank's part.

    `seed` is for batches and dropout; models always start alike.
    """
    torch.manual_seed(0)
    model = build()
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = scaler_class("cpu", init_scale=2.0**10, enabled=scaled)
    found: dict[str, Any] = {}
    for step in range(steps):
        for part in range(micro_batches):
            with contextlib.ExitStack() as stack:
                stack.enter_context(region())
                loss = loss_of(model) / micro_batches
                if not backward_inside:
                    stack.close()
                scaler.scale(loss).backward()
            found[f"loss {step}.{part}"] = loss.detach().clone()
        scaler.unscale_(optimizer)
        found |= {f"{name} {step}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    losses = {name: loss.item() for name, loss in found.items() if name.startswith("loss")}
    assert {name: loss for name, loss in losses.items() if not math.isfinite(loss)} == {}
    found |= model.state_dict()
    return {name: value.to_local() if hasattr(value, "to_local") else value for name, value in found.items()}


def trains_as_torch(
    build: Callable[[], nn.Module],
    loss_of: Callable[[Any], Tensor],
    dtype: torch.dtype = torch.bfloat16,
    *,
    around: Region = contextlib.nullcontext,
    **settings: Any,
) -> None:
    """Assert that both trainings give the same names, dtypes and bits. 0.0 and -0.0 differ. `around`: ampkit's."""

    def bits(value: Tensor) -> Tensor:
        return value.detach().contiguous().reshape(-1).view(torch.uint8)

    expected = train(build, loss_of, lambda: native(dtype), **settings)
    with around():
        got = train(build, loss_of, lambda: like_torch(dtype), scaler_class=GradScaler, **settings)
    assert got.keys() == expected.keys()
    assert len(got) > 20
    different = [
        name
        for name, value in expected.items()
        if got[name].dtype is not value.dtype or not torch.equal(bits(got[name]), bits(value))
    ]
    assert not different, f"{len(different)} of {len(expected)} differ: {different[:8]}"
