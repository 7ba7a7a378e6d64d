"""The search names what was planted, proves it, and is quick about it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampkit import Policy, Rule, autocast
from ampkit.debugging import search_policy
from ampkit.debugging.search import SearchResult
from ampkit.debugging.search_units import Unit, policy_with
from tests.debugging.ddmin import ddmin
from tests.debugging.plants import PLANTS, Plant, build, error_of, passes

DEFAULT = Policy.default("cpu")
PROTOCOL = 3        # the policy as it is, and float32 twice


def searched(plant: Plant, **options: Any) -> tuple[SearchResult, set[str], Callable[[Policy], float], nn.Module]:
    model, batch, culprits = build(plant)
    evaluate = error_of(model, batch, plant.dtype)
    return search_policy(evaluate, model, passes=passes(plant.dtype), **options), culprits, evaluate, model


@pytest.mark.parametrize("plant", PLANTS, ids=str)
def test_what_was_planted_is_found_and_nothing_can_be_dropped(plant: Plant) -> None:
    result, culprits, evaluate, model = searched(plant)
    passing = passes(plant.dtype)
    assert result.status == "found"
    assert {one.name for one in result.units} == culprits
    assert result.policy is not None
    assert passing(evaluate(result.policy))
    for dropped in result.units:
        fewer = policy_with(DEFAULT, [one for one in result.units if one != dropped], model)
        assert not passing(evaluate(fewer))
    assert result.noise == 0.0
    assert not passing(result.before)


@pytest.mark.parametrize("plant", [one for one in PLANTS if one.n_blocks <= 8], ids=str)
def test_no_smaller_set_of_blocks_passes(plant: Plant) -> None:
    result, _, evaluate, model = searched(plant)
    passing = passes(plant.dtype)
    blocks = [Unit(str(i)) for i in range(plant.n_blocks)]
    smaller = itertools.chain.from_iterable(
        itertools.combinations(blocks, n) for n in range(1, len(result.units))
    )
    assert not any(passing(evaluate(policy_with(DEFAULT, some, model))) for some in smaller)


def test_at_most_half_of_the_evaluations_of_delta_debugging() -> None:
    ours = theirs = 0
    for plant in PLANTS:
        result, _, evaluate, model = searched(plant)
        ours += len(result.evaluations) - PROTOCOL
        known: dict[frozenset[Unit], bool] = {}

        def test(
            units: list[Unit], known: dict[frozenset[Unit], bool] = known,
            evaluate: Callable[[Policy], float] = evaluate, plant: Plant = plant, model: nn.Module = model,
        ) -> bool:
            key = frozenset(units)
            if key not in known:
                known[key] = passes(plant.dtype)(evaluate(policy_with(DEFAULT, units, model)))
            return known[key]

        ddmin(sorted(result.evaluations[1].units, key=lambda one: one.name), test)
        theirs += len(known)
    assert ours <= theirs / 2


# --- other ways to fail


class Head(nn.Module):
    """Its scores are computed in its own forward, by one of two operators."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        near = torch.addmm(torch.zeros(6, 6), x, x.t()) * 0.01
        z = x - x.mean(-1, keepdim=True) + 40.0
        far = torch.matmul(z, z.t()).softmax(-1)
        return torch.matmul(near.float() + far.float(), y.float())


def head(depth: int) -> tuple[nn.Module, Callable[[Policy], float]]:
    torch.manual_seed(1)
    model: nn.Module = Head()
    for _ in range(depth):
        model = nn.Sequential(model)
    return model, error_of(model, torch.randn(6, 8), torch.bfloat16)


def test_operators_that_belong_to_no_module_are_units_too() -> None:
    model, evaluate = head(0)
    result = search_policy(evaluate, model, passes=lambda error: error < 0.1)
    assert [one.name for one in result.units] == ["aten::matmul"]
    assert result.code == 'policy = Policy.default("cpu").with_rules({"aten::matmul": Rule.FLOAT32})'
    assert result.policy == DEFAULT.with_rules({"aten::matmul": Rule.FLOAT32})
    assert result.diff() == "+ aten::matmul: float32"


def test_operators_inside_a_module() -> None:
    model, evaluate = head(1)
    whole = search_policy(evaluate, model, passes=lambda error: error < 0.1)
    assert [one.name for one in whole.units] == ["0"]
    result = search_policy(evaluate, model, passes=lambda error: error < 0.1, scope="operators")
    assert [one.name for one in result.units] == ["0: aten::matmul"]
    assert result.code == (
        'policy = Policy.default("cpu").for_modules(model, '
        '{"0": Policy.default("cpu").with_rules({"aten::matmul": Rule.FLOAT32})})'
    )
    assert result.policy == eval(result.code.removeprefix("policy = "))     # the names are imported here
    assert evaluate(result.policy) < 0.1


def test_a_metric_of_training_with_backward_and_optimizer() -> None:
    """Gradients of a small loss underflow in one layer's backward."""
    torch.manual_seed(0)
    batch = torch.randn(16, 8)

    def make() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1))
        model[2].weight.data.mul_(1e-9)     # type: ignore[operator]
        model[2].bias.data.mul_(1e-9)       # type: ignore[operator]
        model[3].eps = 1e-30
        return model

    def train(policy: Policy) -> list[float]:
        fresh = make()
        model.load_state_dict(fresh.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        losses = []
        for _ in range(3):
            with autocast("cpu", dtype=torch.float16, policy=policy):
                loss = (model(batch).float() - batch[:, :1]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    model = make()
    exact = train(DEFAULT.for_modules(model, {str(i): torch.float32 for i in range(5)}))
    result = search_policy(
        train, model, passes=lambda losses: all(abs(a - b) < 0.02 for a, b in zip(losses, exact, strict=True))
    )
    assert result.status == "found"
    assert [one.name for one in result.units] == ["2"]
    assert result.noise is None     # no number


def test_a_policy_that_has_rules_keeps_them() -> None:
    plant = PLANTS[1]
    model, batch, culprits = build(plant)
    first, second = sorted(culprits)
    policy = DEFAULT.for_modules(model, {first: torch.float32}).with_rules({"aten::gelu": Rule.FLOAT32})
    result = search_policy(error_of(model, batch, plant.dtype), model, policy=policy, passes=passes(plant.dtype))
    assert [one.name for one in result.units] == [second]
    assert result.policy == policy.for_modules(model, {second: torch.float32})
    assert result.code == f'policy = policy.for_modules(model, {{"{second}": torch.float32}})'


# --- the protocol


def test_nothing_to_do_where_the_policy_passes() -> None:
    model, batch, _ = build(PLANTS[0])
    result = search_policy(error_of(model, batch, torch.float16), model, passes=lambda error: True)
    assert (result.status, result.policy, len(result.evaluations)) == ("passes already", DEFAULT, 1)
    assert "nothing to do" in str(result)


def test_inconclusive_where_float32_fails() -> None:
    values = iter([3.0, 2.0, 2.5])
    model, batch, _ = build(PLANTS[0])
    inner = error_of(model, batch, torch.float16)

    def evaluate(policy: Policy) -> float:
        inner(policy)
        return next(values)

    result = search_policy(evaluate, model, passes=lambda value: value < 1)
    assert (result.status, result.policy, result.noise) == ("float32 fails", None, 0.5)
    assert "precision is not what is wrong" in str(result)


def test_a_metric_whose_noise_decides_is_inconclusive() -> None:
    answers = iter([False, True, False])
    model, batch, _ = build(PLANTS[0])
    inner = error_of(model, batch, torch.float16)
    result = search_policy(inner, model, passes=lambda value: next(answers))
    assert result.status == "float32 fails"


def test_a_budget_that_is_spent_leaves_the_best_so_far() -> None:
    result, culprits, evaluate, _ = searched(PLANTS[3], max_evaluations=9)
    assert result.status == "budget spent"
    assert len(result.evaluations) == 9
    assert result.policy is not None
    assert passes(PLANTS[3].dtype)(evaluate(result.policy))
    assert len(result.units) >= len(culprits)
    assert "not minimal: the budget of 9 evaluations is spent" in str(result)


def test_progress_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    searched(PLANTS[0], progress=True)
    shown = capsys.readouterr().err
    assert "] 4 of at most 100 evaluations; 1 of" in shown
    assert shown.endswith("\n")
    searched(PLANTS[0])
    assert capsys.readouterr().err == ""


def test_bad_input() -> None:
    model, batch, _ = build(PLANTS[0])
    evaluate = error_of(model, batch, torch.float16)
    with pytest.raises(ValueError, match="scope is 'lines'; expected 'modules' or 'operators'"):
        search_policy(evaluate, model, scope="lines")       # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_evaluations is 3; expected 4 or more"):
        search_policy(evaluate, model, max_evaluations=3)
    with pytest.raises(TypeError, match=r"model is NoneType; expected a torch\.nn\.Module"):
        search_policy(evaluate, None)       # type: ignore[arg-type]
