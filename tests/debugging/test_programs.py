"""Nothing is found in healthy training programs, and they compute the same bits."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ampkit import GradGuard, GradScaler
from ampkit.debugging import Examination
from ampkit.optim import AdamW
from tests.debugging.models import MODELS, Middle, cnn, loss_of, make, mlp
from tests.debugging.planted import B16, F16, F32, Step, by_name, region
from tests.helpers.ranks import on_ranks

Program = Callable[[], tuple[nn.Module, Step]]  # a model, and a step that trains it
INF = math.inf
PROGRAMS: dict[str, Program] = {}


def trained(
    model: nn.Module, loss: Callable[[], Tensor], dtype: torch.dtype = B16, kind: str = "ampkit", scales: bool = True
) -> tuple[nn.Module, Step]:
    """The loop that most programs have; with float16 it scales."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    cls: Any = GradScaler if kind == "ampkit" else torch.amp.GradScaler
    scaler = cls("cpu", enabled=scales and dtype == F16)

    def step() -> None:
        optimizer.zero_grad()
        with region("none" if dtype == F32 else kind, dtype):
            value = loss()
        scaler.scale(value).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return model, step


def program(build: Program) -> Program:
    """A function that makes a program."""
    PROGRAMS[build.__name__] = build
    return build


def losing(model: Callable[[], nn.Module], *dtypes: torch.dtype, scales: bool = True) -> Callable[..., Any]:
    """A function of the model that returns the loss of one step; a program for each dtype, bfloat16 unless said."""

    def add(loss: Callable[[Any], Tensor]) -> None:
        def build(dtype: torch.dtype) -> tuple[nn.Module, Step]:
            made = model()
            return trained(made, functools.partial(loss, made), dtype, scales=scales)

        for dtype in dtypes or (B16,):
            PROGRAMS[f"{loss.__name__} {dtype}"] = functools.partial(build, dtype)

    return add


# --- attention and sequences


@losing(lambda: nn.ModuleList([nn.Linear(8, 24), nn.Linear(8, 1)]), F16)
def attention_with_rows_masked_out(model: Any) -> Tensor:
    q, k, v = model[0](torch.randn(2, 6, 8)).chunk(3, -1)
    allowed = torch.ones(6, 6, dtype=torch.bool).tril() & (torch.arange(6) != 2)[:, None]
    weight = (q @ k.transpose(-1, -2)).masked_fill(~allowed, -INF).softmax(-1).nan_to_num(0.0)
    return model[1](weight.to(v.dtype) @ v).float().square().mean()


@program
def language_model() -> tuple[nn.Module, Step]:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2))
    ids = torch.randint(0, 32, (2, 8))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0  # padding on the left: rows without a key
    labels = ids.masked_fill(mask == 0, -100)
    return trained(model, lambda: model(ids, attention_mask=mask, labels=labels).loss, F16, kind="torch")


@losing(lambda: mlp(8, 16, 5), F16)
def speech_recognition(model: Any) -> Tensor:
    logs = model(torch.randn(6, 2, 8)).float().log_softmax(-1)
    lengths, targets = torch.tensor([6, 2]), torch.randint(1, 5, (2, 3))
    return F.ctc_loss(logs, targets, lengths, torch.tensor([3, 3]), zero_infinity=True)  # one is too short


@losing(lambda: nn.LSTM(4, 8, batch_first=True), F32)
def recurrence_over_padding(model: Any) -> Tensor:
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(2, 5, 4), torch.tensor([5, 2]), batch_first=True)
    out, _ = nn.utils.rnn.pad_packed_sequence(model(packed)[0], batch_first=True)
    return out.square().mean()


# --- representations


@losing(lambda: mlp(8, 16, 4))
def triplets(model: Any) -> Tensor:
    """The positive may be the anchor: a distance of 0."""
    x = torch.randn(4, 8)
    return F.triplet_margin_loss(model(x), model(x), model(x.flip(0)), margin=1.0)


@program
def adapters_of_low_rank() -> tuple[nn.Module, Step]:
    base, a, b = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
    nn.init.zeros_(b.weight)

    def loss() -> Tensor:
        x = torch.randn(4, 8)
        return (base(x) + b(a(x)) * 2).float().square().mean()

    return trained(nn.ModuleList([base, a, b]), loss, F16)


@program
def float32_gradients_of_bfloat16_weights() -> tuple[nn.Module, Step]:
    model = mlp(8, 16, 1).bfloat16()
    for param in model.parameters():
        param.grad_dtype = torch.float32
    optimizer, guard = AdamW(model.parameters(), lr=1e-2, masters="remainder"), GradGuard("cpu")

    def step() -> None:
        optimizer.zero_grad()
        with region("ampkit", B16):
            loss = model(torch.randn(4, 8)).float().square().mean()
        guard.backward_and_step(loss, optimizer, max_norm=1.0)

    return model, step


# --- generative models


@program
def adversaries() -> tuple[nn.Module, Step]:
    maker, critic = mlp(4, 8, 4), mlp(4, 8, 1)
    of_maker, of_critic = (torch.optim.Adam(network.parameters(), lr=1e-3) for network in (maker, critic))
    scaler = GradScaler("cpu")

    def step() -> None:
        fake = maker(torch.randn(4, 4))
        of_critic.zero_grad()
        with region("ampkit", F16):
            loss = F.softplus(critic(fake.detach())).mean() + F.softplus(-critic(torch.randn(4, 4))).mean()
        scaler.scale(loss).backward()
        scaler.step(of_critic)
        of_maker.zero_grad()
        with region("ampkit", F16):
            loss = F.softplus(-critic(fake)).mean()
        scaler.scale(loss).backward()
        scaler.step(of_maker)
        scaler.update()

    return nn.ModuleList([maker, critic]), step


@losing(lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 1)))
def critic_with_a_penalty(model: Any) -> Tensor:
    x = torch.randn(4, 4, requires_grad=True)
    value = model(x).float().mean()
    (gradient,) = torch.autograd.grad(value, x, create_graph=True)
    return value + ((gradient.square().sum(-1) + 1e-12).sqrt() - 1).square().mean()


# --- reinforcement learning


@program
def proximal_policy() -> tuple[nn.Module, Step]:
    """Actions that are not allowed have -inf; several passes over the same samples."""
    model = mlp(8, 16, 5)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x, forbidden, action = torch.randn(6, 8), torch.arange(5) == 3, torch.tensor([0, 1, 2, 4, 0, 1])
    with torch.no_grad():
        old = model(x).masked_fill(forbidden, -INF).log_softmax(-1).gather(-1, action[:, None])

    def step() -> None:
        for rows in (slice(0, 3), slice(3, 6)):
            with region("ampkit", B16):
                logits = model(x[rows]).float().masked_fill(forbidden, -INF)
            choice = torch.distributions.Categorical(logits=logits)
            ratio = (choice.log_prob(action[rows])[:, None] - old[rows]).exp()
            advantage = F.layer_norm(torch.randn(3, 1), (1,))
            gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            optimizer.zero_grad()
            (-gain.mean() - 0.01 * choice.entropy().mean()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()

    return model, step


@program
def values_with_a_target_network() -> tuple[nn.Module, Step]:
    model = mlp(8, 16, 3)
    target = copy.deepcopy(model).requires_grad_(False)

    def loss() -> Tensor:
        with torch.no_grad():
            best = 1 + 0.9 * target(torch.randn(4, 8)).amax(-1) * torch.tensor([1.0, 0.0, 1.0, 1.0])
            for mean, p in zip(target.parameters(), model.parameters(), strict=True):
                mean.lerp_(p, 0.01)
        return F.smooth_l1_loss(model(torch.randn(4, 8))[:, 1].float(), best.float())

    return trained(model, loss)


# --- graphs, experts, tables


@losing(lambda: nn.ModuleList([nn.Linear(4, 4), nn.Linear(8, 1)]))
def messages_in_a_graph(model: Any) -> Tensor:
    """A node without a neighbor, the softmax over incoming edges by scatter."""
    source, target = torch.tensor([0, 1, 2, 2]), torch.tensor([1, 2, 0, 1])
    x = model[0](torch.randn(4, 4)).float()
    score = model[1](torch.cat([x[source], x[target]], -1)).float()[:, 0]
    best = torch.full((4,), -INF).scatter_reduce(0, target, score.detach(), "amax")
    weight = (score - best[target]).exp()
    total = torch.zeros(4).index_add(0, target, weight)[target]
    count = torch.bincount(target, minlength=4).clamp_min(1)[:, None]
    return (torch.zeros(4, 4).index_add(0, target, x[source] * (weight / total)[:, None]) / count).square().mean()


@losing(lambda: nn.ModuleDict({"router": nn.Linear(8, 4), "experts": nn.ModuleList(mlp(8, 8) for _ in range(4))}), F16)
def experts_without_tokens(model: Any) -> Tensor:
    x = torch.randn(3, 8)
    p = model["router"](x).float().softmax(-1)
    weight, chosen = p.topk(1, -1)
    out = torch.zeros(3, 8)
    for i, expert in enumerate(model["experts"]):
        (rows,) = torch.where(chosen[:, 0] == i)
        out = out.index_add(0, rows, (weight[rows] * expert(x[rows])).float())
    balance = (p.mean(0) * torch.bincount(chosen[:, 0], minlength=4) / 3).sum()
    return out.square().mean() + 0.01 * balance


@losing(
    lambda: nn.ModuleList(
        [
            nn.EmbeddingBag(16, 8, mode="mean"),
            nn.Embedding(16, 8, padding_idx=0, max_norm=1.0),
            nn.Linear(8, 1),
        ]
    )
)
def tables_with_padding(model: Any) -> Tensor:
    """A bag without words, and words that are padding."""
    words = model[0](torch.tensor([1, 2, 3]), torch.tensor([0, 2, 2]))
    words = words + model[1](torch.tensor([[0, 0], [1, 0], [2, 3]])).sum(1)
    return model[2](words).float().square().mean()


@program
def sparse_gradients() -> tuple[nn.Module, Step]:
    model = nn.Embedding(16, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randint(0, 16, (5,))).square().mean().backward()
        optimizer.step()

    return model, step


# --- losses of one network


def uncertain(y: Tensor) -> Tensor:
    """Of a variational autoencoder, a flow and an actor: exponentials of what the network returns, and samples."""
    mean, spread = y.float().chunk(2, -1)
    logvar = spread.clamp(-30, 10)
    divergence = -0.5 * (1 + logvar - mean.square() - logvar.exp()).sum(-1)
    flowed = (mean * torch.tanh(spread).exp()).square().sum(-1) / 2 - torch.tanh(spread).sum(-1)
    choice = torch.distributions.Normal(mean, spread.clamp(-20, 2).exp())
    raw = choice.rsample()
    squashed = choice.log_prob(raw) - 2 * (math.log(2) - raw - F.softplus(-2 * raw))
    return (divergence + flowed + squashed.sum(-1)).mean()


def boxes(y: Tensor) -> Tensor:
    """Boxes that do not overlap, and one without an area."""
    corner, size = y[:, :4].float().chunk(2, -1)
    end, other = corner + size.exp(), torch.tensor([[0.0, 0.0, 0.0, 0.0], [5, 5, 9, 9], [0, 0, 1, 1], [0, 0, 2, 1]])
    shared = (torch.minimum(end, other[:, 2:]) - torch.maximum(corner, other[:, :2])).clamp_min(0).prod(-1)
    union = size.exp().prod(-1) + (other[:, 2:] - other[:, :2]).prod(-1) - shared
    return (1 - shared / union.clamp_min(1e-7)).mean()


def noise_of_the_last_step(y: Tensor) -> Tensor:
    """There, diffusion has no signal at all."""
    share = torch.linspace(1 - 1e-4, 0, 4)[:, None]
    weight = (share / (1 - share)).clamp(max=5) / (share / (1 - share) + 1)
    return (weight * (share.sqrt() * y.float() - (1 - share).sqrt() * torch.randn(4, 6)).square()).mean()


def equal_rewards(y: Tensor) -> Tensor:
    reward = torch.tensor([[1.0, 1.0, 1.0], [0.0, 1.0, 0.0]]).repeat(2, 2)
    advantage = (reward - reward.mean(-1, keepdim=True)) / (reward[:, :3].std(-1, keepdim=True) + 1e-4)
    logs = y.float().log_softmax(-1)
    return -((logs - logs.detach()).exp() * advantage).mean()


def collapsed(y: Tensor) -> Tensor:
    """A dimension without variance, and samples that are not their own negatives."""
    z = y.float() * (torch.arange(6) > 0)
    unit = F.normalize(z, dim=-1)
    logits = (unit @ unit.t() / 0.1).masked_fill(torch.eye(4, dtype=torch.bool), -INF)
    return F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean() + F.cross_entropy(logits, torch.tensor([1, 0, 3, 2]))


def dice(y: Tensor) -> Tensor:
    """Of a class that no pixel has, and pixels that are ignored."""
    p, target, known = y.float().softmax(-1), F.one_hot(LABELS, 6), torch.tensor([1, 0, 1, 1])[:, None]
    overlap = (p * target * known).sum(0)
    return (1 - 2 * overlap / ((p + target) * known).sum(0).clamp_min(1e-6)).mean()


def focal(y: Tensor) -> Tensor:
    entropy = F.binary_cross_entropy_with_logits(y.float(), (y.detach() > 0).float(), reduction="none")
    return ((1 - torch.exp(-entropy)) ** 2 * entropy).mean()


LABELS = torch.tensor([0, 1, 4, 4])
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    **by_name(boxes, collapsed, dice, equal_rewards, focal, noise_of_the_last_step, uncertain),
    "adaptive step": lambda y: (y * min(2.0, 0.1 / max(float((y - y).detach().norm()), 1e-8))).float().square().mean(),
    "distillation": lambda y: F.kl_div((y / 2).log_softmax(-1), (torch.randn(4, 6) * 60).softmax(-1), reduction="sum"),
    "ignored words": lambda y: F.cross_entropy(y, torch.tensor([-100, 1, -100, -100])),
    "label smoothing": lambda y: F.cross_entropy(y, torch.tensor([0, 1, -100, 4]), label_smoothing=0.1),
    "mixup": lambda y: 0.3 * F.cross_entropy(y, LABELS) + 0.7 * F.cross_entropy(y, LABELS.flip(0)),
    "preferences": lambda y: -F.logsigmoid(0.1 * (y[:2] - y[2:]).float()).mean(),
    "quantiles": lambda y: torch.maximum(0.9 * (1 - y.float()), -0.1 * (1 - y.float())).mean(),
    "rotary": lambda y: (y.float() * (torch.arange(600, 606) * 0.1).cos()).square().mean(),
    "uncertain tasks": lambda y: torch.exp(-y[0, 0].float()) * y[:, 1:].float().square().mean() + y[0, 0].float(),
}


def network(loss: Callable[[Tensor], Tensor], dtype: torch.dtype) -> tuple[nn.Module, Step]:
    model = mlp(8, 16, 6)
    return trained(model, lambda: loss(model(torch.randn(4, 8))), dtype)


# --- layers, each after a linear one


WIDTH, LENGTH = 16, 6
MASK = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


def alibi(scores: Tensor) -> Tensor:
    distance = torch.arange(LENGTH)[None] - torch.arange(LENGTH)[:, None]
    return scores + torch.where(distance > 0, -INF, distance * 0.5).to(scores.dtype)


def logsumexp_by_hand(y: Tensor) -> Tensor:
    best = torch.full(y.shape[:-1], -INF, dtype=y.dtype)
    for i in range(y.shape[-1]):
        best = torch.logaddexp(best, y[..., i])
    return best


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


def attention(masked: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """With a mask of the user's making."""
    return lambda y: masked(y @ y.transpose(-1, -2) / WIDTH**0.5).softmax(-1).to(y.dtype) @ y


LAYERS: dict[str, Callable[[Tensor], Tensor]] = {
    **by_name(beams, forbidden_transitions, in_place_mask, labels_with_gaps),
    **by_name(logsumexp_by_hand, online_softmax, slices),
    "masked_fill": attention(lambda s: s.masked_fill(MASK, -INF)),
    "masked_fill by a tensor": attention(lambda s: s.masked_fill(MASK, torch.tensor(-INF, dtype=s.dtype))),
    "masked_fill in place": attention(lambda s: s.clone().masked_fill_(MASK, -INF)),
    "added mask": attention(lambda s: s + torch.full((LENGTH, LENGTH), -INF).triu(1).to(s.dtype)),
    "where": attention(lambda s: torch.where(MASK, -INF, s)),
    "least value": attention(lambda s: s.masked_fill(MASK, torch.finfo(s.dtype).min)),
    "alibi": attention(alibi),
    "log of a mask": attention(lambda s: s + (~MASK).to(s.dtype).log()),
    "double where": lambda y: torch.where(y > 0, torch.where(y > 0, y, 1.0).log(), 0.0),
    "missing data": lambda y: y * torch.where(torch.arange(WIDTH) % 5 == 0, math.nan, 1.0).nanmean(),
    "top k": lambda y: torch.full_like(y, -INF).scatter(-1, y.topk(3).indices, y.topk(3).values).softmax(-1),
    "scattered": lambda y: torch.empty(y.shape, dtype=y.dtype).index_copy_(1, torch.arange(LENGTH), y),
    "sdpa causal": lambda y: F.scaled_dot_product_attention(y, y, y, is_causal=True),
    "sdpa mask": lambda y: F.scaled_dot_product_attention(y, y, y, attn_mask=~MASK),
    "sigmoid by hand": lambda y: 1 / (1 + (-60 * y.detach()).half().exp()) + y,
    "clamp without bounds": lambda y: y.clamp(min=-INF, max=INF),
    "sigmoid of -inf": lambda y: y.clone().masked_fill_(torch.arange(WIDTH) == 2, -INF).sigmoid(),
    "chosen of both": lambda y: torch.cat([torch.where(y > 0, y, -INF), torch.zeros_like(y)], -1).softmax(-1),
    "mask without effect": lambda y: y + torch.full((WIDTH,), -INF).clamp(min=0.0),
    "mask that is not read": lambda y: (torch.full((WIDTH,), -INF), y)[1],
    "best so far": lambda y: y * torch.minimum(torch.full((), INF), y.detach().float().mean()),
    "running least": lambda y: torch.minimum(torch.full_like(y, INF), y),
    "max pool": lambda y: F.max_pool1d(y, 3, padding=1),
    "gumbel": lambda y: F.gumbel_softmax(y.float(), hard=True),
    "norm": lambda y: F.normalize(y.float()),
    "log_softmax of a mask": lambda y: y.masked_fill(torch.arange(WIDTH) == 2, -INF).log_softmax(-1)[..., 3:],
    "greatest of a group": lambda y: torch.full((3, WIDTH), -INF).scatter_reduce(
        0, (torch.arange(LENGTH) % 3)[:, None].expand(LENGTH, WIDTH), y[0].float(), "amax"
    ),
    "inf sorted last": lambda y: y.float().masked_fill(y < 0, INF).sort(-1)[0].clamp(max=1.0),
    "checkpoint": lambda y: checkpoint(lambda z: 1 / (1 + (-60 * z.detach()).half().exp()) + z, y, use_reentrant=False),  # type: ignore[arg-type]
    "reentrant checkpoint": lambda y: checkpoint(in_place_mask, y, use_reentrant=True),  # type: ignore[arg-type]
    "dropout": lambda y: F.dropout(y, 0.5),
}


def layer(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> tuple[nn.Module, Step]:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Middle(function))
    return trained(model, lambda: model(torch.randn(2, LENGTH, WIDTH)).float().square().mean(), dtype, scales=False)


@losing(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(LENGTH)), F16, B16, scales=False)
def batch_norm(model: Any) -> Tensor:
    return model(torch.randn(2, LENGTH, WIDTH)).float().square().mean()


@losing(cnn, F16, B16, scales=False)
def convolutions(model: Any) -> Tensor:
    return model(torch.randn(4, 3, 16, 16)).float().square().mean()


@losing(lambda: nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True), F16, B16, scales=False)
def encoder_with_padding(model: Any) -> Tensor:
    padding = (torch.arange(LENGTH) >= LENGTH - 2).expand(2, -1)
    return model(torch.randn(2, LENGTH, WIDTH), src_key_padding_mask=padding).float().square().mean()


# --- loops of other shapes


@program
def accumulation() -> tuple[nn.Module, Step]:
    """Gradient accumulation, and a schedule that does not step where the scaler skips."""
    model = mlp(8, 16, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)

    def step() -> None:
        for _ in range(4):
            with region("torch", F16):
                loss = model(torch.randn(2, 8)).float().square().mean() / 4
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() >= before:
            schedule.step()
        optimizer.zero_grad()

    return model, step


@program
def search_along_a_line() -> tuple[nn.Module, Step]:
    model, x = mlp(8, 8, 1), torch.randn(4, 8)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        return loss

    return model, lambda: optimizer.step(closure)  # type: ignore[arg-type]


@program
def sharpness_aware() -> tuple[nn.Module, Step]:
    model = mlp(8, 16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def gradients(x: Tensor) -> list[Tensor]:
        optimizer.zero_grad()
        with region("ampkit", B16):
            loss = model(x).float().square().mean()
        loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    def step() -> None:
        x = torch.randn(4, 8)
        grads = gradients(x)
        norm = torch.nn.utils.get_total_norm(grads)
        moves = [0.05 * grad / (norm + 1e-12) for grad in grads]
        with torch.no_grad():
            torch._foreach_add_(list(model.parameters()), moves)
        gradients(x)
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), moves)
        optimizer.step()

    return model, step


@losing(lambda: mlp(4, 8, 1), F32)
def learning_to_learn(model: Any) -> Tensor:
    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().mean()

    parameters = dict(model.named_parameters())
    moves: Any = torch.func.grad(loss)(parameters, torch.randn(4, 4))
    return loss({name: p - 0.1 * moves[name] for name, p in parameters.items()}, torch.randn(4, 4))


@program
def moving_averages() -> tuple[nn.Module, Step]:
    """torch's moving averages of weights, and batch norm statistics that are computed again."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))
    model, train = trained(model, lambda: model(torch.randn(4, 8)).float().square().mean(), F16)

    def step() -> None:
        train()
        average.update_parameters(model)
        torch.optim.swa_utils.update_bn([torch.randn(4, 8)], average)
        average(torch.randn(4, 8))

    return model, step


@losing(lambda: nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.5)) for _ in range(2)]), F16)
def checkpoints_with_dropout(model: Any) -> Tensor:
    x: Any = torch.randn(4, 8, requires_grad=True)
    for layer in model:
        x = checkpoint(layer, x, use_reentrant=False)
    return x.float().square().mean()


@program
def compiled() -> tuple[nn.Module, Step]:
    model = mlp(8, 8, 1)
    fast = torch.compile(model, backend="eager")
    return trained(model, lambda: fast(torch.randn(4, 8)).float().square().mean())


def of_model(name: str, dtype: torch.dtype) -> tuple[nn.Module, Step]:
    model, batch = make(name)
    return trained(model, lambda: loss_of(model(batch)).float().square().mean(), dtype)


for dtype in (F16, F32):
    PROGRAMS |= {f"model {name} {dtype}": functools.partial(of_model, name, dtype) for name in MODELS}
for dtype in (F16, B16):
    PROGRAMS |= {f"{name} {dtype}": functools.partial(network, loss, dtype) for name, loss in LOSSES.items()}
    PROGRAMS |= {f"{name} {dtype}": functools.partial(layer, function, dtype) for name, function in LAYERS.items()}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_healthy_program(name: str) -> None:
    """Nothing is found, and the bits are the same."""

    def run(around: Callable[[nn.Module, Step], Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model, step = PROGRAMS[name]()
        around(model, step)
        return [*model.state_dict().values(), torch.get_rng_state()]

    def plain(model: nn.Module, step: Step) -> None:
        for _ in range(3):
            step()

    def examined(model: nn.Module, step: Step) -> None:
        with Examination(model) as report:
            plain(model, step)
        assert report.status == "clean", str(report)
        assert report.steps >= 3

    expected, values = run(plain), run(examined)
    changed = [i for i, value in enumerate(expected) if not torch.equal(values[i], value)]
    assert changed == [], "an examination changes parameters, buffers or random numbers"


def dual(x: Tensor) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        torch.autograd.forward_ad.unpack_dual(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)) * 2)
    return x


def fake(x: Tensor) -> Tensor:
    with FakeTensorMode():
        (torch.ones(3) @ torch.ones(3)).exp()
    return x


def nested(x: Tensor) -> Tensor:
    """torch's encoder makes a nested tensor of padding in evaluation."""
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    padding = torch.tensor([[False, False], [False, True]])
    with torch.no_grad():
        nn.TransformerEncoder(layer, 1).eval()(x.detach().view(2, 2, 8), src_key_padding_mask=padding)
    return torch.nested.as_nested_tensor([x[:1], x[1:]], layout=torch.jagged).values()  # type: ignore[no-any-return]


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "complex": lambda x: torch.fft.irfft(torch.fft.rfft(x) * torch.randn(5, dtype=torch.cfloat)),
    "dual": dual,
    "fake": fake,
    "float8": lambda x: x @ torch.eye(8).to(torch.float8_e4m3fn).float(),
    "integers": lambda x: x + torch.randint(0, 255, (4, 8), dtype=torch.uint8) / 255,
    "meta": lambda x: x * torch.empty(4, 8, device="meta").shape[0],
    "nested": nested,
    "sparse": lambda x: torch.sparse.mm(torch.eye(4).to_sparse(), x),
    "sparse rows": lambda x: torch.eye(4).to_sparse_csr() @ x,
    "vmapped": lambda x: torch.func.vmap(lambda row: row * row.sum())(x),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested", "ignore:Sparse CSR")
@pytest.mark.parametrize("kind", OTHERS)
def test_tensors_of_other_kinds(kind: str) -> None:
    """Operators on them are not observed; all others are."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    for operator, status in ((torch.tanh, "clean"), (torch.log, "found")):

        def step(operator: Any = operator) -> None:
            model.zero_grad()
            operator(OTHERS[kind](model(torch.randn(4, 8))) * (0 if operator is torch.log else 1)).sum().backward()

        with Examination(model) as report:
            step()
        assert report.status == status, str(report)


def sharded(rank: int, world: int) -> str:
    torch.manual_seed(0)
    model = mlp(8, 16, 1)
    fully_shard(model)
    _, step = trained(model, lambda: model(torch.randn(4, 8)).float().square().mean())
    torch.use_deterministic_algorithms(True)  # fills memory that is not written yet with NaN
    try:
        with Examination(model) as report:
            for _ in range(3):
                step()
    finally:
        torch.use_deterministic_algorithms(False)  # ranks are used again
    return str(report) if report.status != "clean" else ""


def test_a_healthy_program_on_two_ranks() -> None:
    assert on_ranks(sharded) == ["", ""]
