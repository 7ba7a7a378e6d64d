"""Scalers under hostile use: broken checkpoints, and calls in any order beside torch.amp."""

import copy
import pickle
import random
import warnings
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from ampkit import DynamicLossScale, GradScaler, NoOpLossScale, StaticLossScale
from tests.hostile.budget import rounds

# Broken checkpoints

CASES = 600
STRANGE: list[Any] = [
    None, [], {}, (), "", "1.0", "dynamic", b"2", True, False, object, torch.float32, [1], {"scale": 1.0}, 1j,
    Decimal(2), -1, 0, 1, 3, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**400, Fraction(1, 3),
    0.0, -0.0, 1e-46, 2.5, -2.5, 3.0, 1e39, 1e308, float("inf"), -float("inf"), float("nan"),
    torch.tensor(2.0), torch.tensor([1.0, 2.0]), torch.tensor(float("nan")), torch.tensor(3), torch.tensor([]),
    np.float32(2.0), np.int64(4), np.array([1.0]),
]
STRANGE_KEYS: list[Any] = ["flavour", "hysteresis", "kind", "updates", "version", "ampkit", "", 0, None, ("scale",)]
RULES: list[Callable[[], Any]] = [
    DynamicLossScale,
    lambda: DynamicLossScale(2.0**10, growth_interval=2, hysteresis=2, hysteresis_refill="clean", tolerance=0.25),
    lambda: DynamicLossScale(2.0**4, min_scale=2.0, max_scale=2.0**6),
    lambda: StaticLossScale(128.0),
    NoOpLossScale,
]


def silent(_: object) -> None:
    """For `on_stuck`: scales collapse here."""


def made(rule: Any, iterations: int) -> GradScaler:
    """A scaler that has lived through some iterations, every third of them with an overflow."""
    scaler = GradScaler("cpu", loss_scale=rule, on_stuck=silent)
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


def places(state: Any) -> Iterator[tuple[dict[Any, Any], Any]]:
    """Every entry of nested dicts: the dict and the key."""
    for key, value in state.items():
        yield state, key
        if isinstance(value, dict):
            yield from places(value)


def mutate(state: dict[str, Any], rng: random.Random) -> None:
    """Break one entry."""
    where, key = rng.choice(list(places(state)))
    match rng.randrange(6):
        case 0:
            del where[key]
        case 1:
            where[rng.choice(STRANGE_KEYS)] = rng.choice(STRANGE)
        case 2:
            other, elsewhere = rng.choice(list(places(state)))
            where[key] = copy.deepcopy(other[elsewhere])
        case _:
            where[key] = rng.choice(STRANGE)


def everything(scaler: GradScaler) -> tuple[Any, ...]:
    """All that a load may change."""
    initial = (scaler._init_scale, scaler._init_growth_tracker, scaler._init_counters, scaler._init_totals)
    return scaler.loss_scale, *initial, id(scaler._scale), scaler.state_dict()


def refusal(scaler: GradScaler, state: Any) -> str | None:
    """What a load is refused with; None where it is not."""
    try:
        scaler.load_state_dict(state)
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        return str(error)
    return None


@pytest.mark.filterwarnings("ignore:ignored unknown entries:UserWarning", "ignore:the checkpoint was saved:UserWarning")
def test_a_checkpoint_loads_as_a_whole_or_not_at_all() -> None:
    """Refused with a sentence of ours and nothing changed; or loaded, and then training goes on and saves."""
    for rng in rounds("checkpoints", 0.5):
        sources = [made(rule(), age).state_dict() for rule in RULES for age in (0, 4)]
        sources.append(torch.amp.GradScaler("cpu", 8.0).state_dict())
        receivers: dict[tuple[int, int], GradScaler] = {}
        refused = 0
        for _ in range(CASES):
            state = copy.deepcopy(rng.choice(sources))
            for _ in range(rng.choice((1, 1, 2, 3))):
                if state:
                    mutate(state, rng)
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


# Calls in any order

PROGRAMS = 80
CALLS = 40
OPTIMIZERS: list[Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = [
    lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.5),
    lambda params: torch.optim.AdamW(params, lr=0.01),
    lambda params: torch.optim.Adam(params, lr=0.01, fused=True),
]


class Run:
    """A scaler and what it trains."""

    def __init__(self, cls: type, kinds: list[int], arguments: tuple[Any, ...]) -> None:
        self.cls = cls
        self.scaler = self.new(*arguments)
        self.params = [
            [torch.nn.Parameter(torch.arange(3.0) + 1), torch.nn.Parameter(torch.ones(2, 2))] for _ in kinds
        ]
        for params in self.params:
            for param in params:
                param.grad = torch.zeros_like(param)
        self.optimizers = [OPTIMIZERS[kind](params) for kind, params in zip(kinds, self.params, strict=True)]

    def new(self, *arguments: Any) -> Any:
        return self.cls("cpu", *arguments, **({"on_stuck": silent} if self.cls is GradScaler else {}))

    def backward(self, which: int, fault: float) -> Any:
        loss = sum((param * param).sum() for param in self.params[which]) * fault
        self.scaler.scale(loss).backward()

    def restored(self) -> None:
        self.scaler, state = self.new(), self.scaler.state_dict()
        self.scaler.load_state_dict(state)

    def replaced(self, copied: Callable[[Any], Any]) -> None:
        self.scaler = copied(self.scaler)

    def unscale_by(self, which: int, factor: float) -> Any:
        return self.scaler._unscale_grads_(self.optimizers[which], torch.tensor(factor), torch.zeros(()), True)

    def step_if(self, which: int, flag: float | None) -> Any:
        found = {} if flag is None else {torch.device("cpu"): torch.tensor(flag)}
        state = {"stage": torch.amp.grad_scaler.OptState.UNSCALED, "found_inf_per_device": found}
        return self.scaler._maybe_opt_step(self.optimizers[which], state)

    def known(self, which: int) -> Any:
        state = self.scaler._per_optimizer_states[id(self.optimizers[which])]
        return state["stage"], state["found_inf_per_device"]

    def values(self) -> list[Any]:
        tensors = [tensor for params in self.params for param in params for tensor in (param.detach(), param.grad)]
        scaler = self.scaler
        return [*tensors, scaler.get_scale(), scaler._get_growth_tracker(), scaler.get_growth_factor()]


def draw_call(rng: random.Random) -> tuple[str, Callable[[Run], Any]]:
    """One call, to be made on both runs."""
    which, fault = rng.randrange(2), rng.choice((1.0, 1.0, 1.0, 0.5, float("inf"), float("nan")))
    interval, factor = rng.choice((1, 2, 5)), rng.choice((2.0, 3.0))
    new = rng.choice((None, None, None, None, 2.0**10, 12345.0, torch.tensor(64.0)))
    set_to = rng.choice((None, 0.0, 1.0))
    calls: list[tuple[int, str, Callable[[Run], Any]]] = [
        (6, "backward", lambda run: run.backward(which, fault)),
        (1, "scale", lambda run: run.scaler.scale([torch.ones(2), (torch.ones((), dtype=torch.float16),)])),
        (3, "zero_grad", lambda run: run.optimizers[which].zero_grad(set_to_none=False)),
        (3, "unscale_", lambda run: run.scaler.unscale_(run.optimizers[which])),
        (6, "step", lambda run: run.scaler.step(run.optimizers[which])),
        (5, "update", lambda run: run.scaler.update(new)),
        (1, "set_growth_interval", lambda run: run.scaler.set_growth_interval(interval)),
        (1, "set_growth_factor", lambda run: run.scaler.set_growth_factor(factor)),
        (1, "set_backoff_factor", lambda run: run.scaler.set_backoff_factor(1 / factor)),
        (1, "save and load", lambda run: run.restored()),
        (1, "pickle", lambda run: run.replaced(lambda scaler: pickle.loads(pickle.dumps(scaler)))),
        (1, "deepcopy", lambda run: run.replaced(copy.deepcopy)),
        (1, "_unscale_grads_", lambda run: run.unscale_by(which, 0.5)),
        (1, "_check_inf_per_device", lambda run: run.scaler._check_inf_per_device(run.optimizers[which])),
        (1, "_found_inf_per_device", lambda run: run.scaler._found_inf_per_device(run.optimizers[which])),
        (1, "_maybe_opt_step", lambda run: run.step_if(which, set_to)),
        (1, "_per_optimizer_states", lambda run: run.known(which)),
        (1, "_get_scale_async", lambda run: run.scaler._get_scale_async()),
    ]
    weights, names, made_calls = zip(*calls, strict=True)
    at = rng.choices(range(len(calls)), weights)[0]
    return f"{names[at]}({which}, {fault}, {new})", made_calls[at]


def outcome(call: Callable[[Run], Any], run: Run) -> Any:
    """What a call returned or raised."""
    try:
        return call(run)
    except Exception as error:
        return error


def alike(ours: Any, theirs: Any) -> bool:
    """Equal to the bit, NaN equal to NaN, in nested containers; exceptions by their class."""
    if isinstance(ours, Exception) and isinstance(theirs, Exception):
        return type(ours) is type(theirs)
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        same = torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(ours.nan_to_num(), theirs.nan_to_num())
        return same and ours.dtype == theirs.dtype
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(alike(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(map(alike, ours, theirs))
    return ours == theirs


def test_calls_in_any_order_do_what_torch_does() -> None:
    """Public and private calls, sensible or not: the same values, or exceptions of the same class, as torch.amp."""
    for rng in rounds("calls", 0.5):
        for _ in range(PROGRAMS):
            kinds = [rng.randrange(len(OPTIMIZERS)) for _ in range(2)]
            arguments = (rng.choice((2.0**16, 2.0, 1000.0)), 2.0, 0.5, rng.choice((1, 2, 2000)))
            ours, theirs = (Run(cls, kinds, arguments) for cls in (GradScaler, torch.amp.GradScaler))
            program = []
            for _ in range(CALLS):
                name, call = draw_call(rng)
                program.append(name)
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "scale\\(\\) got a loss that does not require grad")
                    ended = [outcome(call, run) for run in (ours, theirs)]
                assert alike(*ended), f"{kinds} {arguments} {program} {ended}"
                assert alike(ours.values(), theirs.values()), f"{kinds} {arguments} {program}"
