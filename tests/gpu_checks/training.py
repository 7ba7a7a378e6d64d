"""Training on CUDA in step with torch.amp: a convolutional network and a small GPT in fp16, and a captured loop."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.gpu_checks.tools import Registry

CHECKS = Registry()
check = CHECKS.add
STEPS = 30


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        # Written out: the fused attention's backward adds up in no fixed order, and bits are compared here.
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """Token prediction over 64 symbols."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens))).flatten(0, 1)


def cnn() -> nn.Module:
    """Two strided convolutions with batch norm and a classifier: nothing whose backward is not deterministic."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1, stride=2), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Flatten(), nn.Linear(64 * 4 * 4, 64),
    )


def _batches(kind: str, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator(device).manual_seed(1)

    def integers(*shape: int) -> Tensor:
        return torch.randint(0, 64, shape, device=device, generator=generator)

    if kind == "gpt":
        return [(integers(8, 32), integers(8 * 32)) for _ in range(STEPS)]
    images = [torch.randn(16, 3, 16, 16, device=device, generator=generator) for _ in range(STEPS)]
    return [(image, integers(16)) for image in images]


def _train(
    model: nn.Module,
    batches: list[tuple[Tensor, Tensor]],
    region: Callable[[], object],
    scaler: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
) -> tuple[list[Tensor], list[Tensor]]:
    """Losses and scales of every step; the third batch's loss overflows."""
    losses, scales = [], []
    for i, (inputs, targets) in enumerate(batches):
        optimizer.zero_grad()
        with region():  # type: ignore[attr-defined]
            loss = nn.functional.cross_entropy(model(inputs), targets)
        scaler.scale(loss * (float("inf") if i == 2 else 1.0)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach().clone())
        scales.append(torch.tensor(scaler.get_scale()))
    return losses, scales


def _lockstep(kind: str, device: torch.device, exact: bool) -> None:
    from ampkit import GradScaler, Policy, autocast
    from ampkit.optim import AdamW

    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    make = GPT if kind == "gpt" else cnn
    results = []
    for ours in (True, False):
        torch.manual_seed(0)
        model = make().to(device)
        if ours:
            region = functools.partial(autocast, device.type, torch.float16, policy=Policy.torch(device.type))
            optimizer = (torch.optim.AdamW if exact else AdamW)(model.parameters(), lr=1e-3)
            scaler = GradScaler(device.type, init_scale=2.0**12)
        else:
            region = functools.partial(torch.autocast, device.type, torch.float16)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            scaler = torch.amp.GradScaler(device.type, init_scale=2.0**12)

        results.append(_train(model, _batches(kind, device), region, scaler, optimizer))
    (losses, scales), (want, want_scales) = results
    assert [s.item() for s in scales] == [s.item() for s in want_scales]
    for i, (loss, other) in enumerate(zip(losses, want, strict=True)):
        if exact:
            assert torch.equal(loss, other), (
                f"step {i}: loss {loss.item()} against torch.amp's {other.item()}"
            )
        else:
            assert abs(loss.item() - other.item()) <= 0.02 * abs(other.item()), f"step {i}: {loss}, {other}"


@check
def cnn_has_torch_amps_losses(device: torch.device) -> None:
    _lockstep("cnn", device, exact=True)


@check
def gpt_has_torch_amps_losses(device: torch.device) -> None:
    _lockstep("gpt", device, exact=True)


@check
def gpt_with_our_optimizer_trains_alike(device: torch.device) -> None:
    _lockstep("gpt", device, exact=False)


@check
def a_captured_iteration_replays(device: torch.device) -> None:
    from ampkit import GradScaler
    from ampkit.optim import AdamW

    batches = _batches("gpt", device)

    def build() -> tuple[nn.Module, AdamW, GradScaler]:
        torch.manual_seed(0)
        model = GPT().to(device)
        return model, AdamW(model.parameters(), lr=1e-3), GradScaler(device.type, init_scale=2.0**10)

    def iteration(
        model: nn.Module, optimizer: AdamW, scaler: GradScaler, inputs: Tensor, targets: Tensor
    ) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.float16, cache_enabled=False):
            loss = nn.functional.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss

    eager = build()
    want = [iteration(*eager, *batch).item() for batch in batches]
    parts = build()
    inputs, targets = (part.clone() for part in batches[0])
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    got = []
    with torch.cuda.stream(side):
        for batch in batches[:3]:
            got.append(iteration(*parts, *batch).item())
    torch.cuda.current_stream(device).wait_stream(side)
    parts[1].zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = iteration(*parts, inputs, targets)
    for batch in batches[3:]:
        inputs.copy_(batch[0])
        targets.copy_(batch[1])
        graph.replay()
        got.append(loss.item())
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert abs(a - b) <= 0.02 * abs(b), f"step {i}: replayed loss {a}, eager {b}"
    assert got[-1] < got[0]
