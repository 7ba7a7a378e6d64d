"""Scalers that load damaged checkpoints. Calls in any order are in scaler/test_scaler_lockstep.py."""

import copy
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from ampkit import DynamicLossScale, GradScaler, NoOpLossScale, StaticLossScale
from tests.stress.budget import damage, rounds

CASES = 400
STRANGE: list[Any] = [
    None,
    [],
    {},
    (),
    "",
    "1.0",
    "dynamic",
    b"2",
    True,
    False,
    object,
    torch.float32,
    [1],
    {"scale": 1.0},
    1j,
    Decimal(2),
    -1,
    0,
    1,
    3,
    2**31 - 1,
    2**31,
    2**63 - 1,
    2**63,
    -(2**63),
    -(2**63) - 1,
    10**400,
    Fraction(1, 3),
    0.0,
    -0.0,
    1e-46,
    2.5,
    -2.5,
    3.0,
    1e39,
    1e308,
    float("inf"),
    -float("inf"),
    float("nan"),
    torch.tensor(2.0),
    torch.tensor([1.0, 2.0]),
    torch.tensor(float("nan")),
    torch.tensor(3),
    torch.tensor([]),
    np.float32(2.0),
    np.int64(4),
    np.array([1.0]),
    "flavour",
    "hysteresis",
    "kind",
    "updates",
    "version",
    "ampkit",
    ("scale",),
]
RULES: list[Callable[[], Any]] = [
    DynamicLossScale,
    lambda: DynamicLossScale(2.0**10, growth_interval=2, hysteresis=2),
    lambda: DynamicLossScale(2.0**4, min_scale=2.0, max_scale=2.0**6),
    lambda: StaticLossScale(128.0),
    NoOpLossScale,
]


def made(rule: Any, iterations: int) -> GradScaler:
    """A scaler after some iterations, every third of them with an overflow."""
    scaler = GradScaler("cpu", loss_scale=rule)
    iterate(scaler, iterations)
    return scaler


def iterate(scaler: torch.amp.GradScaler, iterations: int) -> None:
    """Train a parameter for some iterations."""
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=0.1)
    for index in range(iterations):
        optimizer.zero_grad()
        scaler.scale(param.sum() * (float("inf") if index % 3 == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()


def everything(scaler: GradScaler) -> tuple[Any, ...]:
    """All state that a load may change."""
    initial = (scaler._init_scale, scaler._init_growth_tracker, scaler._init_counters, scaler._init_totals)
    return scaler.loss_scale, *initial, id(scaler._scale), scaler.state_dict()


def refusal(scaler: GradScaler, state: Any) -> str | None:
    """The message with which a load is refused; None where it succeeds."""
    try:
        scaler.load_state_dict(state)
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        return str(error)
    return None


@pytest.mark.filterwarnings(
    "ignore:ignored unknown entries", "ignore:the checkpoint was saved", "ignore:the loss scale has fallen"
)
def test_a_checkpoint_loads_as_a_whole_or_not_at_all() -> None:
    """It is refused with a message and nothing changes, or it is loaded, and the scaler trains and saves again."""
    for rng in rounds("checkpoints", 1):
        sources = [made(rule(), age).state_dict() for rule in RULES for age in (0, 4)]
        sources.append(torch.amp.GradScaler("cpu", 8.0).state_dict())
        receivers: dict[tuple[int, int], GradScaler] = {}
        refused = 0
        for _ in range(CASES):
            state = copy.deepcopy(rng.choice(sources))
            damage(state, rng, STRANGE)
            kind = rng.randrange(len(RULES)), rng.choice((0, 4))
            if kind not in receivers:
                receivers[kind] = made(RULES[kind[0]](), kind[1])
            scaler = receivers[kind]
            before = everything(scaler)
            message = refusal(scaler, state)
            if message is not None:
                refused += 1
                assert any(word in message for word in ("expected", "source state dict")), (state, message)
                assert everything(scaler) == before, state
                continue
            del receivers[kind]
            scale = scaler.get_scale()
            assert scaler.loss_scale.min_scale <= scale <= scaler.loss_scale.max_scale, state
            iterate(scaler, 4)
            again = made(RULES[kind[0]](), 1)  # a scale on a device is rounded to float32
            again.load_state_dict(scaler.state_dict())
            assert again.state_dict() == scaler.state_dict(), state
        assert CASES / 4 < refused < CASES
