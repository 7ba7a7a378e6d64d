"""ampkit's scaler and torch's, driven side by side by the same calls in any order, sensible or not.

After every call everything is equal to the bit: what it returned, or the class of what it raised; parameters,
gradients, optimizer state, scale, counter and what is saved.
"""

import copy
import math
import os
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from ampkit.scaler.grad_scaler import GradScaler
from tests.helpers.scaler_tools import alike, clip

OPTIMIZERS: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "adam_fused": lambda params: torch.optim.Adam(params, lr=0.01, fused=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
}
# fused optimizers on the CPU take one dtype in a call; these are clipped too, where torch adds in another order for an
# empty gradient
SHAPES = {True: [(3,), (2, 3), (4,), (5, 1)], False: [(3,), (2, 3), (0,), (5, 1)]}
DTYPES = {True: [torch.float32] * 4, False: [torch.float32, torch.bfloat16, torch.float32, torch.float64]}
FAULTS = [1.0, 1.0, 1.0, 1.0, math.inf, -math.inf, math.nan]


class Run:
    """A scaler and what it trains."""

    def __init__(self, cls: type, names: list[str], arguments: tuple[float, ...]) -> None:
        self.cls = cls
        self.scaler: Any = self.new(*arguments)
        self.params: list[list[torch.nn.Parameter]] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.held: dict[str, Any] = {}
        for name in names:
            generator = torch.Generator().manual_seed(len(self.params))
            shapes, dtypes = SHAPES["fused" in name], DTYPES["fused" in name]
            self.params.append(
                [
                    torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
                    for shape, dtype in zip(shapes, dtypes, strict=True)
                ]
            )
            for param in self.params[-1]:
                param.grad = torch.zeros_like(param)
            self.optimizers.append(OPTIMIZERS[name](self.params[-1]))

    def new(self, *arguments: float) -> Any:
        return self.cls("cpu", *arguments)

    def backward(self, which: int, seed: int, fault: float, zero: bool | None, missing: bool) -> None:
        """Add random gradients, or put them (`zero`); the first parameter may stay without one."""
        if zero is not None:
            self.optimizers[which].zero_grad(set_to_none=zero)
        generator = torch.Generator().manual_seed(seed)
        loss = torch.zeros(())
        for i, param in enumerate(self.params[which]):
            noise = torch.randn(param.shape, generator=generator).to(param.dtype)
            if not (missing and i == 0):
                loss = loss + (param * noise * (fault if i == 1 else 1.0)).sum()
        self.scaler.scale(loss).backward()

    def clip(self, which: int, limit: float, by: str) -> Any:
        return clip(self.scaler, self.optimizers[which], limit, by=by)

    def maybe_step(self, which: int, flag: float | None) -> Any:
        found = {} if flag is None else {torch.device("cpu"): torch.tensor(flag)}
        record = {"stage": OptState.UNSCALED, "found_inf_per_device": found}
        return self.scaler._maybe_opt_step(self.optimizers[which], record)

    def record(self, which: int) -> Any:
        """torch's record of an optimizer, held from then on: what becomes of it counts."""
        self.held = self.scaler._per_optimizer_states[id(self.optimizers[which])]
        return self.held

    def replace_records(self) -> None:
        """As Composer, fairscale and torch's own `update` begin an iteration."""
        self.scaler._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)

    def copied(self, how: Callable[[Any], Any]) -> None:
        self.scaler = how(self.scaler)

    def everything(self) -> list[Any]:
        saved = self.scaler.state_dict()
        saved.pop("ampkit", None)
        grads = [[param.grad for param in params] for params in self.params]
        states = [[dict(each.state[param]) for param in each.param_groups[0]["params"]] for each in self.optimizers]
        return [self.params, grads, states, saved, self.held]


CALLS: dict[str, Callable[[Run, int, Any], Any]] = {
    "unscale_": lambda run, which, _: run.scaler.unscale_(run.optimizers[which]),
    "step": lambda run, which, _: run.scaler.step(run.optimizers[which]),
    "update": lambda run, which, _: run.scaler.update(),
    "set the scale": lambda run, which, number: run.scaler.update([2.0, 2.0**10, torch.tensor(12345.0)][number]),
    "scale": lambda run, which, _: run.scaler.scale(
        [
            torch.ones(2),
            (torch.ones((), dtype=torch.float16), [torch.ones((), dtype=torch.float64)]),
        ]
    ),
    "scale lazily": lambda run, which, _: list(run.scaler.scale(torch.ones(()) for _ in range(2))),
    "scale no tensors": lambda run, which, number: run.scaler.scale([3.0, None, [1.0]][number]),
    "set no scale": lambda run, which, number: run.scaler.update(
        [torch.ones(2), torch.ones((), requires_grad=True), torch.ones((), device="meta")][number]
    ),
    "set_growth_factor": lambda run, which, number: run.scaler.set_growth_factor([2.0, 3.0, 1.5][number]),
    "set_backoff_factor": lambda run, which, number: run.scaler.set_backoff_factor([0.5, 0.25, 0.75][number]),
    "set_growth_interval": lambda run, which, number: run.scaler.set_growth_interval(number + 1),
    "pickle": lambda run, which, _: run.copied(lambda scaler: pickle.loads(pickle.dumps(scaler))),
    "deepcopy": lambda run, which, _: run.copied(copy.deepcopy),
    "_unscale_grads_": lambda run, which, _: run.scaler._unscale_grads_(
        run.optimizers[which], torch.tensor(0.5), torch.zeros(()), True
    ),
    "_check_inf_per_device": lambda run, which, _: run.scaler._check_inf_per_device(run.optimizers[which]),
    "_found_inf_per_device": lambda run, which, _: run.scaler._found_inf_per_device(run.optimizers[which]),
    "_maybe_opt_step": lambda run, which, number: run.maybe_step(which, [None, 0.0, 1.0][number]),
    "_per_optimizer_states": lambda run, which, _: run.record(which),
    "replace the records": lambda run, which, _: run.replace_records(),
    "drop a record": lambda run, which, _: run.scaler._per_optimizer_states.pop(id(run.optimizers[which]), None),
    "set the stage": lambda run, which, _: run.record(which).update(stage=OptState.READY, found_inf_per_device={}),
    "_get_scale_async": lambda run, which, _: run.scaler._get_scale_async(),
}
WHICH = st.integers(0, 1)
BACKWARD = st.tuples(
    st.integers(0, 10_000), st.sampled_from(FAULTS), st.sampled_from([None, False, True]), st.booleans()
)


class Lockstep(RuleBasedStateMachine):
    """Two runs that may never differ."""

    @initialize(
        names=st.lists(st.sampled_from(sorted(OPTIMIZERS)), min_size=2, max_size=2),
        init=st.sampled_from([1.0, 2.0**4, 2.0**16, 2.0**60, 3000.0]),
        growth=st.sampled_from([2.0, 1.5, 4.0]),
        backoff=st.sampled_from([0.5, 0.25, 0.75]),
        interval=st.integers(1, 4),
    )
    def begin(self, names: list[str], init: float, growth: float, backoff: float, interval: int) -> None:
        self.names = names
        self.runs = [Run(cls, names, (init, growth, backoff, interval)) for cls in (GradScaler, torch.amp.GradScaler)]

    def both(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """What both runs return, or both raise."""
        ours, theirs = (outcome(call, run, *arguments) for run in self.runs)
        assert alike(ours, theirs), (ours, theirs)
        return ours

    @rule(which=WHICH, name=st.sampled_from([*CALLS, "step", "update", "unscale_"]), number=st.integers(0, 2))
    def call(self, which: int, name: str, number: int) -> None:
        self.both(CALLS[name], which, number)

    @rule(which=WHICH, one=BACKWARD)
    def backward(self, which: int, one: Any) -> None:
        self.both(Run.backward, which, *one)

    @rule(swap=st.booleans(), fresh=st.booleans())
    def save_and_load(self, swap: bool, fresh: bool) -> None:
        states = [run.scaler.state_dict() for run in self.runs]
        for run, state in zip(self.runs, reversed(states) if swap else states, strict=True):
            if fresh:
                run.scaler = run.new()
            run.scaler.load_state_dict(state)

    @rule(
        micro_batches=st.lists(BACKWARD, min_size=1, max_size=2),
        how=st.lists(st.sampled_from(["step", "unscale", "clip", "clip_value"]), min_size=2, max_size=2),
        limit=st.sampled_from([1e-3, 0.5, 1e4]),
    )
    def iterate(self, micro_batches: list[Any], how: list[str], limit: float) -> None:
        """One whole iteration as users write it."""
        for run in self.runs:
            run.scaler._per_optimizer_states.clear()  # whatever was begun
        for which, name in enumerate(self.names):
            for i, (seed, fault, zero, missing) in enumerate(micro_batches):
                self.both(Run.backward, which, seed, fault, bool(zero) if i == 0 else None, missing)
            scale, params = self.runs[0].scaler.get_scale(), self.runs[0].params[which]
            finite = all(param.grad is None or bool(param.grad.isfinite().all()) for param in params)
            exact = math.log2(scale).is_integer() and scale >= 1.0  # one rounding less elsewhere
            if how[which] == "unscale":
                self.both(CALLS["unscale_"], which, 0)
            elif how[which] == "clip" and finite and exact and "fused" in name:
                self.both(Run.clip, which, limit, "norm")
            elif how[which] == "clip_value":
                self.both(Run.clip, which, limit, "value")
            before = [param.detach().clone() for param in params]
            assert self.both(CALLS["step"], which, 0) is None
            scaler, optimizer = self.runs[0].scaler, self.runs[0].optimizers[which]
            assert bool(scaler.found_inf(optimizer)) is not finite
            assert scaler.stepped(optimizer) is finite
            assert finite or alike(before, params)
        self.both(CALLS["update"], 0, 0)

    @invariant()
    def equal_in_everything(self) -> None:
        if hasattr(self, "runs"):
            assert alike(*(run.everything() for run in self.runs))


def outcome(call: Callable[..., Any], *arguments: Any) -> Any:
    """What a call returned or raised."""
    try:
        return call(*arguments)
    except Exception as error:
        return error


Lockstep.TestCase.settings = settings(
    max_examples=int(os.environ.get("AMPKIT_LOCKSTEP_EXAMPLES", "100")),
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow],
)
TestLockstep = pytest.mark.filterwarnings("ignore:the loss scale has fallen")(Lockstep.TestCase)
