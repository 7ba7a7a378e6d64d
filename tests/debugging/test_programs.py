"""Healthy training programs of every kind are no finding: of nothing that is inf or NaN, of the loop, of precision."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ampkit import GradScaler, autocast
from ampkit.debugging import compare_precision, detect_nonfinite
from tests.helpers.ranks import on_ranks

Run = Callable[[int], Any]      # a number of steps
Loss = Callable[[], Tensor]
F16, B16 = torch.float16, torch.bfloat16
INF = math.inf


def mlp(*widths: int) -> nn.Sequential:
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def region(dtype: torch.dtype | None, kind: str = "ampkit") -> Any:
    if dtype is None:
        return nullcontext()
    return autocast("cpu", dtype=dtype) if kind == "ampkit" else torch.autocast("cpu", dtype=dtype)


def trained(
    model: nn.Module, loss: Loss, dtype: torch.dtype | None = B16, *, kind: str = "ampkit", optimizer: Any = None,
) -> tuple[nn.Module, Run]:
    """The loop that most programs have; with float16 it scales and clips."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler: Any = (GradScaler if kind == "ampkit" else torch.amp.GradScaler)("cpu", enabled=dtype == F16)

    def run(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            with region(dtype, kind):
                value = loss()
            scaler.scale(value).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()

    return model, run


# --- attention and sequences


def attention_with_rows_masked_out() -> tuple[nn.Module, Run]:
    model = nn.ModuleList([nn.Linear(8, 24), nn.Linear(8, 1)])

    def loss() -> Tensor:
        q, k, v = model[0](torch.randn(2, 6, 8)).chunk(3, -1)
        allowed = torch.ones(6, 6, dtype=torch.bool).tril() & (torch.arange(6) != 2)[:, None]
        weight = (q @ k.transpose(-1, -2)).masked_fill(~allowed, -INF).softmax(-1).nan_to_num(0.0)
        return model[1](weight.to(v.dtype) @ v).float().square().mean()  # type: ignore[no-any-return]

    return trained(model, loss, F16)


def language_model() -> tuple[nn.Module, Run]:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2))
    ids = torch.randint(0, 32, (2, 8))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0     # padding on the left: rows without a key
    labels = ids.masked_fill(mask == 0, -100)
    return trained(model, lambda: model(ids, attention_mask=mask, labels=labels).loss, F16, kind="torch")


def speech_recognition() -> tuple[nn.Module, Run]:
    model = mlp(8, 16, 5)

    def loss() -> Tensor:
        logs = model(torch.randn(6, 2, 8)).float().log_softmax(-1)
        lengths, targets = torch.tensor([6, 2]), torch.randint(1, 5, (2, 3))
        return F.ctc_loss(logs, targets, lengths, torch.tensor([3, 3]), zero_infinity=True)     # one is too short

    return trained(model, loss, F16)


def recurrence_over_padding() -> tuple[nn.Module, Run]:
    model = nn.LSTM(4, 8, batch_first=True)

    def loss() -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(torch.randn(2, 5, 4), torch.tensor([5, 2]), batch_first=True)
        out, _ = nn.utils.rnn.pad_packed_sequence(model(packed)[0], batch_first=True)
        return out.square().mean()

    return trained(model, loss, None)


# --- representations


def triplets() -> tuple[nn.Module, Run]:
    """The positive may be the anchor: a distance of 0."""
    model = mlp(8, 16, 4)

    def loss() -> Tensor:
        x = torch.randn(4, 8)
        return F.triplet_margin_loss(model(x), model(x), model(x.flip(0)), margin=1.0)

    return trained(model, loss)


def adapters_of_low_rank() -> tuple[nn.Module, Run]:
    base, a, b = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
    nn.init.zeros_(b.weight)
    model = nn.ModuleList([base, a, b])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    def loss() -> Tensor:
        x = torch.randn(4, 8)
        return (base(x) + b(a(x)) * 2).float().square().mean()  # type: ignore[no-any-return]

    return trained(model, loss, F16, optimizer=optimizer)


# --- generative models


def adversaries() -> tuple[nn.Module, Run]:
    maker, critic = mlp(4, 8, 4), mlp(4, 8, 1)
    of_maker, of_critic = (torch.optim.Adam(one.parameters(), lr=1e-3) for one in (maker, critic))
    scaler = GradScaler("cpu")

    def run(steps: int) -> None:
        for _ in range(steps):
            fake = maker(torch.randn(4, 4))
            of_critic.zero_grad()
            with region(F16):
                loss = F.softplus(critic(fake.detach())).mean() + F.softplus(-critic(torch.randn(4, 4))).mean()
            scaler.scale(loss).backward()
            scaler.step(of_critic)
            of_maker.zero_grad()
            with region(F16):
                loss = F.softplus(-critic(fake)).mean()
            scaler.scale(loss).backward()
            scaler.step(of_maker)
            scaler.update()

    return nn.ModuleList([maker, critic]), run


def critic_with_a_penalty() -> tuple[nn.Module, Run]:
    critic = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 8))
    model = nn.Sequential(critic, nn.Tanh(), nn.Linear(8, 1))

    def loss() -> Tensor:
        x = torch.randn(4, 4, requires_grad=True)
        value = model(x).float().mean()
        gradient, = torch.autograd.grad(value, x, create_graph=True)
        return value + ((gradient.square().sum(-1) + 1e-12).sqrt() - 1).square().mean()

    return trained(model, loss)


# --- reinforcement learning


def proximal_policy() -> tuple[nn.Module, Run]:
    """Actions that are not allowed have -inf; several passes over the same samples."""
    model = mlp(8, 16, 5)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x, forbidden, action = torch.randn(6, 8), torch.arange(5) == 3, torch.tensor([0, 1, 2, 4, 0, 1])
    with torch.no_grad():
        old = model(x).masked_fill(forbidden, -INF).log_softmax(-1).gather(-1, action[:, None])

    def run(steps: int) -> None:
        for _ in range(steps):
            for rows in (slice(0, 3), slice(3, 6)):
                with region(B16):
                    logits = model(x[rows]).float().masked_fill(forbidden, -INF)
                choice = torch.distributions.Categorical(logits=logits)
                ratio = (choice.log_prob(action[rows])[:, None] - old[rows]).exp()
                advantage = F.layer_norm(torch.randn(3, 1), (1,))
                gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                optimizer.zero_grad()
                (-gain.mean() - 0.01 * choice.entropy().mean()).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()

    return model, run


def values_with_a_target_network() -> tuple[nn.Module, Run]:
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


def messages_in_a_graph() -> tuple[nn.Module, Run]:
    """A node without a neighbor, the softmax over incoming edges by scatter."""
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(8, 1)])
    source, target = torch.tensor([0, 1, 2, 2]), torch.tensor([1, 2, 0, 1])

    def loss() -> Tensor:
        x = model[0](torch.randn(4, 4)).float()
        score = model[1](torch.cat([x[source], x[target]], -1)).float()[:, 0]
        best = torch.full((4,), -INF).scatter_reduce(0, target, score.detach(), "amax")
        weight = (score - best[target]).exp()
        total = torch.zeros(4).index_add(0, target, weight)[target]
        count = torch.bincount(target, minlength=4).clamp_min(1)[:, None]
        return (torch.zeros(4, 4).index_add(0, target, x[source] * (weight / total)[:, None]) / count).square().mean()

    return trained(model, loss)


def experts_without_tokens() -> tuple[nn.Module, Run]:
    model = nn.ModuleDict({"router": nn.Linear(8, 4), "experts": nn.ModuleList([mlp(8, 8) for _ in range(4)])})
    experts: Any = model["experts"]

    def loss() -> Tensor:
        x = torch.randn(3, 8)
        p = model["router"](x).float().softmax(-1)
        weight, chosen = p.topk(1, -1)
        out = torch.zeros(3, 8)
        for i, expert in enumerate(experts):
            rows, = torch.where(chosen[:, 0] == i)
            out = out.index_add(0, rows, (weight[rows] * expert(x[rows])).float())
        balance = (p.mean(0) * torch.bincount(chosen[:, 0], minlength=4) / 3).sum()
        return out.square().mean() + 0.01 * balance

    return trained(model, loss, F16)


def tables_with_padding() -> tuple[nn.Module, Run]:
    """A bag without words, and words that are padding."""
    bag, table = nn.EmbeddingBag(16, 8, mode="mean"), nn.Embedding(16, 8, padding_idx=0, max_norm=1.0)
    model = nn.ModuleList([bag, table, nn.Linear(8, 1)])

    def loss() -> Tensor:
        words = bag(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 2]))
        words = words + table(torch.tensor([[0, 0], [1, 0], [2, 3]])).sum(1)
        return model[2](words).float().square().mean()  # type: ignore[no-any-return]

    return trained(model, loss)


def sparse_gradients() -> tuple[nn.Module, Run]:
    model = nn.Embedding(16, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=1e-3)

    def run(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randint(0, 16, (5,))).square().mean().backward()
            optimizer.step()

    return model, run


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
    **{function.__name__: function for function in (
        boxes, collapsed, dice, equal_rewards, focal, noise_of_the_last_step, uncertain)},
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


def network(loss: Callable[[Tensor], Tensor], dtype: torch.dtype) -> tuple[nn.Module, Run]:
    model = mlp(8, 16, 6)
    return trained(model, lambda: loss(model(torch.randn(4, 8))), dtype)


# --- loops of other shapes


def accumulation() -> tuple[nn.Module, Run]:
    """And a schedule that waits where the scaler skips."""
    model = mlp(8, 16, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)

    def run(steps: int) -> None:
        for _ in range(steps):
            for _ in range(4):
                with region(F16, "torch"):
                    loss = model(torch.randn(2, 8)).float().square().mean() / 4
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            before = scaler.get_scale()
            scaler.update()
            if scaler.get_scale() >= before:
                schedule.step()
            optimizer.zero_grad()

    return model, run


def search_along_a_line() -> tuple[nn.Module, Run]:
    model, x = mlp(8, 8, 1), torch.randn(4, 8)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        return loss

    return model, lambda steps: [optimizer.step(closure) for _ in range(steps)]     # type: ignore[arg-type]


def sharpness_aware() -> tuple[nn.Module, Run]:
    model = mlp(8, 16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def gradients(x: Tensor) -> list[Tensor]:
        optimizer.zero_grad()
        with region(B16):
            loss = model(x).float().square().mean()
        loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    def run(steps: int) -> None:
        for _ in range(steps):
            x = torch.randn(4, 8)
            given = gradients(x)
            norm = torch.nn.utils.get_total_norm(given)
            moves = [0.05 * one / (norm + 1e-12) for one in given]
            with torch.no_grad():
                torch._foreach_add_(list(model.parameters()), moves)
            gradients(x)
            with torch.no_grad():
                torch._foreach_sub_(list(model.parameters()), moves)
            optimizer.step()

    return model, run


def learning_to_learn() -> tuple[nn.Module, Run]:
    model = mlp(4, 8, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def run(steps: int) -> None:
        def loss(parameters: Any, x: Tensor) -> Tensor:
            out: Tensor = torch.func.functional_call(model, parameters, (x,))
            return out.square().mean()

        for _ in range(steps):
            parameters = dict(model.named_parameters())
            moves = torch.func.grad(loss)(parameters, torch.randn(4, 4))
            adapted = {name: p - 0.1 * moves[name] for name, p in parameters.items()}
            optimizer.zero_grad()
            loss(adapted, torch.randn(4, 4)).backward()
            optimizer.step()

    return model, run


def moving_averages() -> tuple[nn.Module, Run]:
    """Of weights, by torch, and statistics that are computed again."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))
    model, train = trained(model, lambda: model(torch.randn(4, 8)).float().square().mean(), F16)

    def run(steps: int) -> None:
        train(steps)
        average.update_parameters(model)
        torch.optim.swa_utils.update_bn([torch.randn(4, 8)], average)
        average(torch.randn(4, 8))

    return model, run


def checkpoints_with_dropout() -> tuple[nn.Module, Run]:
    model = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.5)) for _ in range(2)])

    def loss() -> Tensor:
        x = torch.randn(4, 8, requires_grad=True)
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=False)   # type: ignore[assignment]
        return x.float().square().mean()

    return trained(model, loss, F16)


def compiled() -> tuple[nn.Module, Run]:
    model = mlp(8, 8, 1)
    fast = torch.compile(model, backend="eager")
    return trained(model, lambda: fast(torch.randn(4, 8)).float().square().mean())


PROGRAMS = [
    accumulation, adapters_of_low_rank, adversaries, attention_with_rows_masked_out, checkpoints_with_dropout,
    compiled, critic_with_a_penalty, experts_without_tokens, language_model, learning_to_learn, messages_in_a_graph,
    moving_averages, proximal_policy, recurrence_over_padding, search_along_a_line, sharpness_aware, sparse_gradients,
    speech_recognition, tables_with_padding, triplets, values_with_a_target_network,
]


ALL: dict[str, Callable[[], tuple[nn.Module, Run]]] = {
    **{program.__name__: program for program in PROGRAMS},
    **{f"{name} {dtype}": functools.partial(network, LOSSES[name], dtype) for name in LOSSES for dtype in (F16, B16)},
}


@pytest.mark.parametrize("program", ALL.values(), ids=list(ALL))
def test_a_healthy_program(program: Callable[[], tuple[nn.Module, Run]]) -> None:
    """Neither an inf or NaN, nor anything in the wrong order, nor a gradient that is off."""
    torch.manual_seed(0)
    model, run = program()
    precision = compare_precision(lambda: run(1), model)
    with detect_nonfinite(model, on_found="record") as report:
        run(3)
    assert report.status == "clean", str(report)
    assert report.steps >= 3
    assert precision.status == "clean", str(precision)
    assert precision.suggestion is None, str(precision)


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
    return torch.nested.as_nested_tensor([x[:1], x[1:]], layout=torch.jagged).values()     # type: ignore[no-any-return]


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
    """They are passed over, and nothing else is."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    for operator, status in ((torch.tanh, "clean"), (torch.log, "found")):
        def step(operator: Any = operator) -> None:
            model.zero_grad()
            operator(OTHERS[kind](model(torch.randn(4, 8))) * (0 if operator is torch.log else 1)).sum().backward()

        with detect_nonfinite(model, on_found="record") as report:
            step()
        assert report.status == status, str(report)
        compare_precision(step, model)


def sharded(rank: int, world: int) -> str:
    torch.manual_seed(0)
    model = mlp(8, 16, 1)
    fully_shard(model)
    _, run = trained(model, lambda: model(torch.randn(4, 8)).float().square().mean())
    with detect_nonfinite(model, on_found="record") as report:
        run(3)
    return str(report) if report.status != "clean" else ""


def test_a_healthy_program_on_two_ranks() -> None:
    assert on_ranks(sharded) == ["", ""]
