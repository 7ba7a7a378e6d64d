"""The search finds the modules that were planted, and what it says of its result was evaluated."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampkit import Policy, Rule, autocast
from ampkit.debugging import search_policy

DEFAULT = Policy.default("cpu")
LIMIT = {torch.float16: 0.02, torch.bfloat16: 0.1}


class Block(nn.Module):
    """A residual block whose norm hides what its first layer does to magnitudes, and not what it does to precision."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * torch.tanh(self.outer(self.norm(self.inner(x)))).float()


class Scores(nn.Module):
    """Attention in plain products: scores are alike and large, and bfloat16 loses their differences."""

    def forward(self, x: Tensor) -> Tensor:
        near = torch.addmm(torch.zeros(6, 6), x, x.t()) * 0.01
        y = x - x.mean(-1, keepdim=True) + 20.0
        return torch.matmul((torch.matmul(y, y.t()).softmax(-1) + near.float()), x).float()


def build(kind: str, planted_at: tuple[int, ...], n_blocks: int) -> tuple[nn.Module, set[str]]:
    """A model, and the paths of its modules that need more precision."""
    torch.manual_seed(sum(planted_at))
    blocks: list[Any] = [Block() for _ in range(n_blocks)]
    with torch.no_grad():
        for i in planted_at:
            block = blocks[i]
            if kind == "overflow":
                block.inner.weight.mul_(1e6)
            elif kind == "underflow":
                block.inner.weight.mul_(1e-9)
                block.inner.bias.mul_(1e-9)
                block.norm.eps = 1e-30
            elif kind == "cancellation":
                block.inner.bias.add_(300.0)
            else:
                blocks[i] = Scores()
    return nn.Sequential(*blocks).eval(), {f"{i}" if kind == "scores" else f"{i}.inner" for i in planted_at}


def error_of(model: nn.Module, dtype: torch.dtype) -> Callable[[Policy], float]:
    """The metric: the largest distance of the output from that of float32."""
    batch = torch.randn(6, 16)
    with torch.no_grad():
        exact = model(batch)

    def evaluate(policy: Policy) -> float:
        with torch.no_grad(), autocast("cpu", dtype=dtype, policy=policy):
            return float((model(batch).float() - exact).abs().max())

    return evaluate


def names(result: Any) -> set[str]:
    return set(map(str, result.kept))


@pytest.mark.parametrize(("kind", "dtype", "planted_at", "n_blocks"), [
    ("overflow", torch.float16, (3,), 8), ("overflow", torch.float16, (2, 3, 7, 8), 10),
    ("underflow", torch.float16, (2, 3), 6), ("underflow", torch.float16, (1, 5, 6), 8),
    ("cancellation", torch.bfloat16, (0,), 6), ("cancellation", torch.bfloat16, (1, 2, 4), 6),
    ("scores", torch.bfloat16, (2,), 4),
])
def test_planted_modules_are_found_and_none_can_be_dropped(
    kind: str, dtype: torch.dtype, planted_at: tuple[int, ...], n_blocks: int
) -> None:
    model, planted = build(kind, planted_at, n_blocks)
    evaluate = error_of(model, dtype)
    result = search_policy(evaluate, model, lambda error: error < LIMIT[dtype])
    assert result.status == "found"
    assert names(result) == planted
    assert len(result.evaluations) <= 3 + 6 * len(planted)
    assert result.policy == eval(result.code.removeprefix("policy = "))
    assert evaluate(result.policy) == result.value < LIMIT[dtype]
    for fewer in itertools.combinations(sorted(planted), len(planted) - 1):
        assert not evaluate(DEFAULT.for_modules(model, dict.fromkeys(fewer, torch.float32))) < LIMIT[dtype]


def test_operators_where_modules_do_not_do() -> None:
    model = build("scores", (0,), 1)[0]
    evaluate = error_of(model[0], torch.bfloat16)       # type: ignore[index]
    result = search_policy(evaluate, model[0], lambda error: error < 0.1)       # type: ignore[index]
    assert result.code == 'policy = Policy.default("cpu").with_rules({"aten::matmul": Rule.FLOAT32})'
    assert result.policy == DEFAULT.with_rules({"aten::matmul": Rule.FLOAT32})
    evaluate = error_of(model, torch.bfloat16)
    assert names(search_policy(evaluate, model, lambda error: error < 0.1)) == {"0"}


def test_modules_are_named_from_the_model_also_where_another_module_calls_it() -> None:
    model, planted = build("overflow", (1,), 3)
    result = search_policy(error_of(nn.Sequential(nn.Identity(), model), torch.float16), model, lambda e: e < 0.02)
    assert names(result) == planted


def test_a_policy_that_has_rules_keeps_them() -> None:
    model, _ = build("cancellation", (2, 4), 6)
    evaluate = error_of(model, torch.bfloat16)
    policy = DEFAULT.for_modules(model, {"2.inner": torch.float32}).with_rules({"aten::gelu": Rule.FLOAT32})
    result = search_policy(evaluate, model, lambda error: error < 0.1, policy=policy)
    assert result.policy == policy.for_modules(model, {"4.inner": torch.float32})
    assert result.code == 'policy = policy.for_modules(model, {"4.inner": torch.float32})'
    by_class = DEFAULT.for_modules(model, {nn.Linear: torch.bfloat16})      # so that no block is kept as a whole
    result = search_policy(evaluate, model, lambda error: error < 0.1, policy=by_class)
    assert names(result) == {"2.inner", "4.inner"}


def test_training_as_a_metric_starts_from_the_same_state_each_time() -> None:
    """Gradients of a small output underflow in one layer's backward; the metric resets nothing itself."""
    torch.manual_seed(0)
    batch = torch.randn(16, 8)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1))
    model[2].weight.data.mul_(1e-9)     # type: ignore[operator]
    model[2].bias.data.mul_(1e-9)       # type: ignore[operator]
    model[3].eps = 1e-30
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def train(policy: Policy) -> list[float]:
        losses = []
        for _ in range(3):
            with autocast("cpu", dtype=torch.float16, policy=policy):
                loss = (model(batch + 1e-3 * torch.randn(8)).float() - batch[:, :1]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    exact = train(DEFAULT.for_modules(model, {"*": torch.float32}))
    model.load_state_dict(before)
    optimizer.state.clear()
    torch.set_rng_state(random)
    result = search_policy(train, model, lambda losses: abs(Tensor(losses) - Tensor(exact)).max() < 0.02)
    assert names(result) == {"2"}
    assert result.evaluations[1].value == exact
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), random)


def test_nothing_to_do_and_inconclusive() -> None:
    model, _ = build("overflow", (1, 2, 4), 6)
    evaluate = error_of(model, torch.float16)
    result = search_policy(evaluate, model, lambda error: True)
    assert (result.status, result.policy, len(result.evaluations)) == ("passes already", DEFAULT, 1)
    assert "nothing to do" in str(result)
    for answers in ((False, False, False), (False, True, False)):      # the last: noise decides
        given = iter(answers)
        result = search_policy(evaluate, model, lambda error, given=given: next(given))
        assert (result.status, result.policy, result.code) == ("inconclusive", None, "")
        assert "fails in float32 too: precision is not the only cause" in str(result)


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"model": None}, TypeError, r"model is NoneType; expected a torch\.nn\.Module"),
    ({"policy": "default"}, TypeError, "policy is str; expected a Policy"),
])
def test_bad_input(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        search_policy(**{"evaluate": lambda policy: 1.0, "model": nn.Linear(2, 2), **options})
