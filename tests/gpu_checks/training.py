"""Training on CUDA beside torch.amp: a convolutional network and a small GPT in float16, and a captured iteration.

The modules' backward adds in a fixed order, because bits are compared.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ampkit import GradScaler, Policy, TimesMedian, autocast
from ampkit.optim import AdamW
from benchmarks.workloads import Decoder
from tests.gpu_checks.tools import Registry, same

CHECKS = Registry()
check = CHECKS.add
STEPS = 30
Batch = tuple[Tensor, Tensor]


def gpt(device: torch.device) -> tuple[nn.Module, list[Batch]]:
    """Token prediction over 64 symbols."""
    tokens = torch.randint(0, 64, (STEPS, 2, 8, 32), device=device)
    return Decoder(64, 64, 4, 2, 32).to(device), [(inputs, targets.flatten()) for inputs, targets in tokens]


def cnn(device: torch.device) -> tuple[nn.Module, list[Batch]]:
    """Two strided convolutions with batch norm and a classifier."""
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1, stride=2),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 64),
    )
    images = torch.randn(STEPS, 16, 3, 16, 16, device=device)
    return model.to(device), [*zip(images, torch.randint(0, 64, (STEPS, 16), device=device), strict=True)]


def iteration(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, region: Any, batch: Batch, factor: float = 1.0
) -> Tensor:
    """A training step; returns its loss."""
    optimizer.zero_grad()
    with region():
        loss = nn.functional.cross_entropy(model(batch[0]).reshape(-1, 64), batch[1])
    scaler.scale(loss * factor).backward()
    if isinstance(scaler, GradScaler):
        scaler.clip_grad_norm_(optimizer, 1.0)
    else:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    return loss.detach().clone()


def losses_and_scales(make: Any, device: torch.device, region: Any, scaler_class: Any, optimizer: Any) -> list[Tensor]:
    """Loss and scale of every step; the third batch's loss overflows."""
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    torch.manual_seed(0)
    model, batches = make(device)
    scaler = scaler_class(device.type, init_scale=2.0**12)
    parts = model, optimizer(model.parameters(), lr=1e-3), scaler, functools.partial(region, device.type, torch.float16)
    rows = []
    with sdpa_kernel(SDPBackend.MATH):
        for i, batch in enumerate(batches):
            loss = iteration(*parts, batch, float("inf") if i == 2 else 1.0)
            rows.append(torch.tensor([loss.item(), scaler.get_scale()]))
    return rows


@check
def losses_and_scales_are_torch_amps(device: torch.device) -> None:
    """To the bit; with ampkit's AdamW, whose steps round differently, within bounds."""
    like_torch = functools.partial(autocast, policy=Policy.torch(device.type))
    for make in (cnn, gpt):
        want = losses_and_scales(make, device, torch.autocast, torch.amp.GradScaler, torch.optim.AdamW)
        same(losses_and_scales(make, device, like_torch, GradScaler, torch.optim.AdamW), want, make.__name__)
    for (loss, scale), (expected, its_scale) in zip(
        losses_and_scales(gpt, device, like_torch, GradScaler, AdamW), want, strict=True
    ):
        assert scale == its_scale
        assert abs(loss - expected) <= 0.02 * expected


@check
def a_captured_iteration_replays(device: torch.device) -> None:
    region = functools.partial(torch.autocast, device.type, torch.float16, cache_enabled=False)

    def build() -> tuple[list[Batch], Any]:
        torch.manual_seed(0)
        model, batches = gpt(device)
        scaler = GradScaler(device.type, init_scale=2.0**10, skip_above=TimesMedian(1e6, window=8))
        lr = torch.tensor(1e-3, device=device)  # a captured step warns of one that the host holds
        parts = model, AdamW(model.parameters(), lr=lr), scaler, region
        return batches, functools.partial(iteration, *parts)

    batches, eager = build()
    want = [eager(batch).item() for batch in batches]
    _, step = build()
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        got = [step(batch).item() for batch in batches[:3]]
    torch.cuda.current_stream(device).wait_stream(side)
    step.args[1].zero_grad()  # so that the capture does not free gradients of the side stream
    inputs, targets = (part.clone() for part in batches[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step((inputs, targets))
    for batch in batches[3:]:
        inputs.copy_(batch[0])
        targets.copy_(batch[1])
        graph.replay()
        got.append(loss.item())
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert abs(a - b) <= 0.02 * abs(b), f"step {i}: replayed loss {a}, eager {b}"
    assert got[-1] < got[0]
