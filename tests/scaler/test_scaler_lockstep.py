"""ampkit's scaler and torch's, driven side by side by the same random iterations, compared bit for bit."""

import math
import os

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ampkit.scaler.grad_scaler import GradScaler

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "adam_fused": lambda params: torch.optim.Adam(params, lr=0.01, fused=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
}
SHAPES = [(3,), (2, 3), (0,), (5, 1)]
DTYPES = [torch.float32, torch.bfloat16, torch.float32, torch.float64]
FAULTS = [None, None, None, None, "inf", "-inf", "nan"]


def make(cls: type, *arguments: float) -> torch.amp.GradScaler:
    """A scaler on the CPU; a collapsing scale is expected here."""
    return cls("cpu", *arguments, **({"on_stuck": lambda _: None} if cls is GradScaler else {}))


class Run:
    """One scaler with the optimizers and parameters that it trains."""

    def __init__(self, scaler: torch.amp.GradScaler, names: list[str]) -> None:
        self.scaler = scaler
        self.names = names
        self.optimizers = []
        for name in names:
            # fused optimizers on the CPU want one dtype per call less than they want mixed ones
            dtypes = [torch.float32] * len(SHAPES) if "fused" in name else DTYPES
            # These are clipped: torch's norm counts an empty gradient as a zero, and adds in another order for it.
            shapes = [shape if shape != (0,) else (4,) for shape in SHAPES] if "fused" in name else SHAPES
            generator = torch.Generator().manual_seed(len(self.optimizers))
            params = [
                torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
                for shape, dtype in zip(shapes, dtypes, strict=True)
            ]
            self.optimizers.append(OPTIMIZERS[name](params))

    def params(self, which: int) -> list[torch.nn.Parameter]:
        return self.optimizers[which].param_groups[0]["params"]

    def backward(self, which: int, seed: int, fault: str | None, missing: bool) -> None:
        """Accumulate random scaled gradients; the first parameter may stay without one."""
        self.scaler.scale(torch.ones((), requires_grad=True))
        scale = self.scaler._scale
        generator = torch.Generator().manual_seed(seed)
        for i, param in enumerate(self.params(which)):
            noise = torch.randn(param.shape, generator=generator)
            if missing and i == 0:
                continue
            grad = (noise * scale).to(param.dtype)
            if fault and i == 1:
                grad.view(-1)[seed % grad.numel()] = float(fault)
            param.grad = grad if param.grad is None else param.grad + grad

    def clip(self, which: int, max_norm: float) -> torch.Tensor:
        if isinstance(self.scaler, GradScaler):
            return self.scaler.clip_grad_norm_(self.optimizers[which], max_norm)
        self.scaler.unscale_(self.optimizers[which])
        return torch.nn.utils.clip_grad_norm_(self.params(which), max_norm)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(nan=12345.0), b.nan_to_num(nan=12345.0))


class Lockstep(RuleBasedStateMachine):
    """Random legal iterations; the two runs may never differ."""

    @initialize(
        names=st.lists(st.sampled_from(sorted(OPTIMIZERS)), min_size=1, max_size=2),
        init=st.sampled_from([1.0, 2.0**4, 2.0**16, 2.0**120, 3000.0]),
        growth=st.sampled_from([2.0, 1.5, 4.0]),
        backoff=st.sampled_from([0.5, 0.25, 0.75]),
        interval=st.integers(1, 4),
    )
    def begin(self, names: list[str], init: float, growth: float, backoff: float, interval: int) -> None:
        arguments = (init, growth, backoff, interval)
        self.ours = Run(make(GradScaler, *arguments), names)
        self.theirs = Run(make(torch.amp.GradScaler, *arguments), names)
        self.power_of_two = math.log2(init) % 1 == 0 and growth != 1.5 and backoff != 0.75
        self.steps = 0

    def runs(self) -> tuple[Run, Run]:
        return self.ours, self.theirs

    @rule(
        seed=st.integers(0, 10_000),
        faults=st.lists(st.sampled_from(FAULTS), min_size=2, max_size=2),
        missing=st.booleans(),
        micro_batches=st.integers(1, 2),
        how=st.lists(st.sampled_from(["step", "unscale", "clip", "clip_value"]), min_size=2, max_size=2),
        max_norm=st.sampled_from([1e-3, 1.0, 1e4]),
    )
    def iterate(self, seed, faults, missing, micro_batches, how, max_norm) -> None:
        for which, name in enumerate(self.ours.names):
            overflows = faults[which] is not None
            for run in self.runs():
                run.optimizers[which].zero_grad(set_to_none=bool(seed % 2))
                for micro in range(micro_batches):
                    run.backward(which, seed + micro, faults[which] if micro == 0 else None, missing)
            if how[which] == "unscale":
                for run in self.runs():
                    run.scaler.unscale_(run.optimizers[which])
                self.compare_grads(which)
            # one bfloat16 norm and one multiplication less make clipping equal only where all is float32
            elif how[which] == "clip" and "fused" in name and self.power_of_two:
                norms = [run.clip(which, max_norm) for run in self.runs()]
                if not overflows:
                    assert torch.equal(*norms), norms
                    self.compare_grads(which)
            elif how[which] == "clip_value":
                for run in self.runs():
                    if run is self.ours:
                        run.scaler.clip_grad_value_(run.optimizers[which], 0.5)
                    else:
                        run.scaler.unscale_(run.optimizers[which])
                        torch.nn.utils.clip_grad_value_(run.params(which), 0.5)
                self.compare_grads(which)
            before = [param.detach().clone() for param in self.ours.params(which)]
            results = [run.scaler.step(run.optimizers[which]) for run in self.runs()]
            assert results[0] is results[1] is None
            assert bool(self.ours.scaler.found_inf(self.ours.optimizers[which])) == overflows
            assert self.ours.scaler.stepped(self.ours.optimizers[which]) != overflows
            if overflows:
                assert all(map(equal, before, self.ours.params(which)))
        for run in self.runs():
            run.scaler.update()
        self.steps += 1

    @rule(new=st.sampled_from([2.0, 2.0**10, 12345.0]), as_tensor=st.booleans())
    @precondition(lambda self: self.ours.scaler._scale is not None)
    def set_scale(self, new: float, as_tensor: bool) -> None:
        self.power_of_two &= math.log2(new) % 1 == 0
        for run in self.runs():
            run.scaler.update(torch.tensor(new) if as_tensor else new)

    @rule(growth=st.sampled_from([2.0, 3.0]), backoff=st.sampled_from([0.5, 0.25]), interval=st.integers(1, 5))
    def change_rule(self, growth: float, backoff: float, interval: int) -> None:
        self.power_of_two &= growth == 2.0 and backoff == 0.5
        for run in self.runs():
            run.scaler.set_growth_factor(growth)
            run.scaler.set_backoff_factor(backoff)
            run.scaler.set_growth_interval(interval)

    @rule(swap=st.booleans(), fresh=st.booleans())
    def save_and_load(self, swap: bool, fresh: bool) -> None:
        states = [run.scaler.state_dict() for run in self.runs()]
        if swap:
            states.reverse()
        for run, state in zip(self.runs(), states, strict=True):
            if fresh:
                run.scaler = make(type(run.scaler))
            run.scaler.load_state_dict(state)

    def compare_grads(self, which: int) -> None:
        for ours, theirs in zip(self.ours.params(which), self.theirs.params(which), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            assert ours.grad is None or equal(ours.grad, theirs.grad)

    @invariant()
    def equal_in_everything(self) -> None:
        if not hasattr(self, "ours"):
            return
        ours, theirs = self.ours.scaler, self.theirs.scaler
        assert ours.get_scale() == theirs.get_scale()
        assert ours._get_growth_tracker() == theirs._get_growth_tracker()
        theirs_saved = theirs.state_dict()
        assert {key: ours.state_dict()[key] for key in theirs_saved} == theirs_saved
        for a, b in zip(self.ours.optimizers, self.theirs.optimizers, strict=True):
            for p, q in zip(a.param_groups[0]["params"], b.param_groups[0]["params"], strict=True):
                assert equal(p.detach(), q.detach())
                assert a.state[p].keys() == b.state[q].keys()
                for key, value in a.state[p].items():
                    assert torch.equal(torch.as_tensor(value), torch.as_tensor(b.state[q][key])), key


Lockstep.TestCase.settings = settings(
    max_examples=int(os.environ.get("AMPKIT_LOCKSTEP_EXAMPLES", "60")),
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow],
)
TestLockstep = Lockstep.TestCase
