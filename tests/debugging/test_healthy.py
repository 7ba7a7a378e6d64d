"""Healthy steps are no findings: masks, poles that are absorbed, missing data, optimizers of every kind, scalers."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ampkit import autocast
from ampkit.debugging import detect_nonfinite

WIDTH, LENGTH = 16, 6
INF = math.inf
MASK = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


class Attention(nn.Module):
    """Attention with a mask of the user's making."""

    def __init__(self, masked: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.masked = masked

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = self.masked(q @ k.transpose(-1, -2) / WIDTH**0.5)
        return scores.softmax(-1).to(v.dtype) @ v   # type: ignore[no-any-return]


class Function(nn.Module):
    """A linear layer, then a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


def limit(scores: Tensor) -> float:
    return torch.finfo(scores.dtype).min


def alibi(scores: Tensor) -> Tensor:
    distance = torch.arange(LENGTH)[None] - torch.arange(LENGTH)[:, None]
    return scores + torch.where(distance > 0, -INF, distance * 0.5).to(scores.dtype)


def logged(scores: Tensor) -> Tensor:
    return scores + (~MASK).to(scores.dtype).log()


def double_where(y: Tensor) -> Tensor:
    safe = torch.where(y > 0, y, 1.0)
    return torch.where(y > 0, safe.log(), 0.0)


def logsumexp_by_hand(y: Tensor) -> Tensor:
    best = torch.full(y.shape[:-1], -INF, dtype=y.dtype)
    for i in range(y.shape[-1]):
        best = torch.logaddexp(best, y[..., i])
    return best


def top_k(y: Tensor) -> Tensor:
    kept = torch.full_like(y, -INF).scatter(-1, y.topk(3).indices, y.topk(3).values)
    return kept.softmax(-1)


def in_place_mask(y: Tensor) -> Tensor:
    scores = y @ y.transpose(-1, -2)
    scores = scores.clone()
    scores[..., MASK] = -INF
    return scores.softmax(-1)


def slices(y: Tensor) -> Tensor:
    out = torch.empty(y.shape, dtype=y.dtype)
    for i in range(y.shape[1]):
        out[:, i] = y[:, i] * i
    return out


def scattered(y: Tensor) -> Tensor:
    out = torch.empty(y.shape, dtype=y.dtype)
    out.index_copy_(1, torch.arange(LENGTH), y)
    return out


def missing(y: Tensor) -> Tensor:
    """NaN marks what is missing, and nanmean passes over it."""
    gaps = torch.where(torch.arange(WIDTH) % 5 == 0, math.nan, 1.0)
    return y * torch.nanmean(gaps)


def online_softmax(y: Tensor) -> Tensor:
    """Attention in blocks, as a fused kernel does it: the running maximum begins at -inf."""
    y = y.float()
    best, total, out = torch.full(y.shape[:2], -INF), torch.zeros(y.shape[:2]), torch.zeros_like(y)
    for block in y.split(2, 1):
        scores = y @ block.transpose(-1, -2)
        new = torch.maximum(best, scores.amax(-1))
        weights, old = (scores - new[..., None]).exp(), (best - new).exp()
        total = total * old + weights.sum(-1)
        out = out * old[..., None] + weights @ block
        best = new
    return out / total[..., None]


def forbidden_transitions(y: Tensor) -> Tensor:
    """The forward pass of a conditional random field."""
    transitions = torch.zeros(WIDTH, WIDTH)
    transitions[3] = -INF
    alpha = torch.full((y.shape[0], WIDTH), -INF)
    alpha[:, 0] = 0
    for t in range(y.shape[1]):
        alpha = torch.logsumexp(alpha[:, :, None] + transitions, 1) + y[:, t].float()
    return alpha.logsumexp(-1)


def beams(y: Tensor) -> Tensor:
    with torch.no_grad():
        scores = torch.full((y.shape[0], 3), -INF)
        scores[:, 0] = 0
        for t in range(3):
            scores = (scores[:, :, None] + y[:, t].float().log_softmax(-1)[:, None]).flatten(1).topk(3)[0]
    return y


def labels_with_gaps(y: Tensor) -> Tensor:
    labels = torch.zeros_like(y)
    labels[0] = math.nan
    there = ~labels.isnan()
    return (y - torch.where(there, labels, 0.0)) * there


FUNCTIONS: dict[str, Callable[[], nn.Module]] = {
    "masked_fill": lambda: Attention(lambda s: s.masked_fill(MASK, -INF)),
    "masked_fill by a tensor": lambda: Attention(lambda s: s.masked_fill(MASK, torch.tensor(-INF, dtype=s.dtype))),
    "masked_fill in place": lambda: Attention(lambda s: s.clone().masked_fill_(MASK, -INF)),
    "added mask": lambda: Attention(lambda s: s + torch.full((LENGTH, LENGTH), -INF).triu(1).to(s.dtype)),
    "where": lambda: Attention(lambda s: torch.where(MASK, -INF, s)),
    "least value": lambda: Attention(lambda s: s.masked_fill(MASK, limit(s))),
    "alibi": lambda: Attention(alibi),
    "log of a mask": lambda: Attention(logged),
    "masked products": lambda: Function(in_place_mask),
    "sdpa causal": lambda: Function(lambda y: F.scaled_dot_product_attention(y, y, y, is_causal=True)),
    "sdpa mask": lambda: Function(lambda y: F.scaled_dot_product_attention(y, y, y, attn_mask=~MASK)),
    "sigmoid by hand": lambda: Function(lambda y: 1 / (1 + (-60 * y.detach()).half().exp()) + y),
    "double where": lambda: Function(double_where),
    "logsumexp by hand": lambda: Function(logsumexp_by_hand),
    "top k": lambda: Function(top_k),
    "slices": lambda: Function(slices),
    "scattered into empty": lambda: Function(scattered),
    "nanmean": lambda: Function(missing),
    "clamp without bounds": lambda: Function(lambda y: y.clamp(min=-INF, max=INF)),
    "running least": lambda: Function(lambda y: torch.minimum(torch.full_like(y, INF), y)),
    "max pool": lambda: Function(lambda y: F.max_pool1d(y, 3, padding=1)),
    "gumbel": lambda: Function(lambda y: F.gumbel_softmax(y.float(), hard=True)),
    "norm": lambda: Function(lambda y: F.normalize(y.float())),
    "log_softmax of a mask": lambda: Function(lambda y: y.masked_fill(torch.arange(WIDTH) == 2, -INF)
                                              .log_softmax(-1)[..., 3:]),
    "softmax in blocks": lambda: Function(online_softmax),
    "random field": lambda: Function(forbidden_transitions),
    "beam search": lambda: Function(beams),
    "labels with gaps": lambda: Function(labels_with_gaps),
    "greatest of a group": lambda: Function(lambda y: torch.full((3, WIDTH), -INF).scatter_reduce(
        0, (torch.arange(LENGTH) % 3)[:, None].expand(LENGTH, WIDTH), y[0].float(), "amax")),
    "inf sorted last": lambda: Function(lambda y: y.float().masked_fill(y < 0, INF).sort(-1)[0].clamp(max=1.0)),
    "checkpoint": lambda: Function(lambda y: checkpoint(
        lambda z: (1 / (1 + (-60 * z.detach()).half().exp()) + z), y, use_reentrant=False)),    # type: ignore[arg-type]
    "reentrant checkpoint": lambda: Function(lambda y: checkpoint(in_place_mask, y, use_reentrant=True)),   # type: ignore[arg-type]
    "dropout": lambda: Function(nn.Dropout(0.5)),
    "batch norm": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(LENGTH)),
    "encoder": lambda: Padded(),
}


class Padded(nn.Module):
    """torch's own encoder, with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[:, -2:] = True
        return self.layer(x, src_key_padding_mask=padding)  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_healthy_model(name: str, dtype: torch.dtype) -> None:
    """Two steps with an optimizer: nothing found, and the same bits as without the tool."""
    def train(watched: bool) -> list[Tensor]:
        torch.manual_seed(1)
        model = FUNCTIONS[name]()
        optimizer = torch.optim.AdamW(model.parameters())

        def steps() -> None:
            for _ in range(2):
                optimizer.zero_grad()
                with autocast("cpu", dtype=dtype):
                    loss = model(torch.randn(2, LENGTH, WIDTH)).float().square().mean()
                loss.backward()
                optimizer.step()

        if watched:
            with detect_nonfinite(model):
                steps()
        else:
            steps()
        return [*(value for value in model.state_dict().values()), torch.get_rng_state()]

    for one, other in zip(train(True), train(False), strict=True):
        assert torch.equal(one, other)


