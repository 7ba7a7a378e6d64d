"""A training script as a user writes it, typed strictly: every public name, and what its results are known to be.

A test runs it, and another has pyright check it in strict mode; `assert_type` is what pyright must have inferred.
"""

from collections.abc import Callable, Iterator
from typing import Any, assert_type

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler as TorchScaler

import ampkit
from ampkit import (
    DynamicLossScale,
    FP16Optimizer,
    GradScaler,
    MasterWeights,
    NoOpLossScale,
    Policy,
    Rule,
    StaticLossScale,
    TimesMedian,
    WeightCache,
    amp,
    autocast,
    check_half,
    clear_autocast_cache,
    custom_bwd,
    custom_fwd,
    debugging,
    half,
    optim,
    record_casts,
    register_op,
    unwrap_forward,
    wrap_forward,
)
from ampkit.debugging.report import NonFiniteReport, PrecisionReport
from ampkit.policy.policy import Explanation
from ampkit.region.cast_record import CastRecord, RecordedCall
from ampkit.region.weight_cache import CacheInfo
from ampkit.scaler.grad_scaler import LossScaleStuckError
from ampkit.scaler.history import ScalerStats
from ampkit.scaler.overflow_report import OverflowReport
from ampkit.whole_model.check_half import HalfReport

CONFIGURATION = {"dtype": "bfloat16", "policy": "torch"}


class Net(nn.Module):
    """A model whose forward is decorated."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.head = nn.Linear(8, 2)

    @autocast("cpu", torch.bfloat16)
    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.head(self.body(x)) * scale


@autocast("cpu", CONFIGURATION["dtype"], policy=CONFIGURATION["policy"])
def loss_of(output: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """A decorated function keeps its signature."""
    return nn.functional.cross_entropy(output, target, reduction=reduction)


@autocast("cpu")
def batches(n: int) -> Iterator[tuple[Tensor, Tensor]]:
    """And so does a generator."""
    for _ in range(n):
        yield torch.randn(16, 4), torch.randint(2, (16,))


class Double(torch.autograd.Function):
    """A function of the user's own."""

    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


@amp.half_function
def mixed(x: Tensor, times: int = 2) -> Tensor:
    """One of Apex's decorators."""
    return x * times


def policies(model: Net) -> Policy:
    """Rules, read and changed."""
    policy = Policy.default("cpu").with_rules({"aten::gelu": Rule.FLOAT32}).for_modules(model, {"head": "float32"})
    assert_type(policy, Policy)
    assert_type(policy.explain(torch.softmax), Explanation)
    assert_type(policy.explain("aten::linear").rule, Rule)
    assert_type(policy.rule_for(torch.ops.aten.mm), Rule)
    assert_type(str(policy.check()), str)
    assert_type(Policy.from_dict(policy.to_dict(), model), Policy)
    register_op("aten::frobenius_norm", "float32")
    return policy


def train() -> GradScaler:
    """The loop, with everything that a scaler can do."""
    model = Net()
    cache = WeightCache()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    rule, limit = DynamicLossScale(init_scale=2.0**8), TimesMedian(10.0)
    scaler = GradScaler("cpu", loss_scale=rule, on_stuck="raise", skip_above=limit)
    policy = policies(model)
    x = torch.ones(())
    try:
        for x, target in batches(3):
            assert_type(x, Tensor)
            optimizer.zero_grad()
            with autocast("cpu", torch.float16, policy=policy, cache=cache) as region:
                assert_type(region, autocast)
                loss = loss_of(model(x, scale=1.0), target)
            assert_type(scaler.scale(loss), Tensor)
            scaler.scale(loss).backward()  # pyright: ignore[reportUnknownMemberType]  torch types it so
            assert_type(scaler.scale(model(x)), Tensor)     # of what nobody has typed, a model's output
            assert_type(scaler.clip_grad_norm_(optimizer, 1.0), Tensor)
            scaler.clip_grad_value_(optimizer, 0.5)
            assert_type(scaler.step(optimizer), float | None)
            scaler.update()
            assert_type(scaler.stepped(optimizer), bool)
            assert_type(scaler.found_inf(optimizer), Tensor)
            assert_type(scaler.stepped(optimizer), bool)
            schedule.step()
    except LossScaleStuckError:
        raise
    assert_type(scaler.scale([torch.ones((), requires_grad=True)]), list[Tensor])
    assert_type(scaler.scale({"a": (torch.ones((), requires_grad=True), x)}), dict[str, tuple[Tensor, Tensor]])
    scaler.update(2.0**8)
    assert_type(scaler.stats(), ScalerStats)
    assert_type(scaler.get_scale(), float)
    assert_type(scaler.overflow_report(model), OverflowReport)
    assert_type(scaler.state_dict(), dict[str, Any])
    assert_type(cache.info(), CacheInfo)
    torch_scaler: TorchScaler = scaler
    scaler.check_ranks()
    for strategy in (StaticLossScale(2.0), NoOpLossScale()):
        GradScaler("cpu", loss_scale=strategy).load_state_dict(GradScaler("cpu", loss_scale=strategy).state_dict())
    assert_type(optimizer.step(), None)
    assert_type(optimizer.step(lambda: torch.ones(())), Tensor)
    assert_type(optim.SGD(model.parameters(), lr=0.1).step(), None)
    return scaler if torch_scaler.is_enabled() else GradScaler("cpu")


def regions() -> None:
    """Regions, and what carries them."""
    x = torch.randn(4, 4)
    with autocast("cpu", enabled=False) as region:
        assert_type(region, autocast)
        assert_type(mixed(x, times=3), Tensor)
        clear_autocast_cache()
    assert_type(loss_of(x, torch.zeros(4, dtype=torch.int64), "sum"), Tensor)
    as_given: Callable[[int], Iterator[tuple[Tensor, Tensor]]] = batches
    assert callable(as_given)
    wrapped = wrap_forward(nn.Linear(4, 4), "cpu", "bfloat16", policy="torch", cast_outputs="float32")
    assert_type(wrapped, nn.Linear)
    assert_type(unwrap_forward(wrapped), nn.Linear)
    with record_casts() as record, autocast("cpu"):
        wrapped(x)
    assert_type(record, CastRecord)
    assert_type(record.calls, list[RecordedCall])


def whole_models() -> None:
    """Levels, masters and half models."""
    model, optimizer = amp.initialize(Net(), torch.optim.SGD(Net().parameters(), lr=0.1), "O1", enabled=False)
    assert_type(model, Net)
    assert_type(optimizer, torch.optim.SGD)
    net = Net()
    models, optimizers = amp.initialize(
        [net], [optim.SGD(net.parameters(), lr=0.1)], opt_level="O2", dtype="bfloat16", verbosity=0, loss_scale=2.0
    )
    assert_type(models, list[Net])
    assert_type(optimizers, list[optim.SGD])
    assert_type(amp.initialize(nn.Linear(1, 1), opt_level="O3", dtype=torch.bfloat16, verbosity=0), nn.Linear)
    with amp.scale_loss(models[0](torch.randn(2, 4)).float().mean(), optimizers) as scaled:
        assert_type(scaled, Tensor)
        scaled.backward()  # pyright: ignore[reportUnknownMemberType]
    assert_type(amp.master_params(optimizers[0]), Iterator[Tensor])
    assert_type(amp.loss_scalers(optimizers[0])[0].stats(), ScalerStats)
    amp.load_state_dict(amp.state_dict(optimizers[0]), optimizers[0])
    optimizers[0].step()
    with amp.disable_casts():
        assert_type(amp.float_function(mixed)(torch.ones(1)), Tensor)
        assert_type(amp.promote_function(mixed)(torch.ones(1), times=1), Tensor)
    owner = type("Owner", (), {"double": staticmethod(lambda x: x + x)})  # pyright: ignore
    for register in (amp.register_half_function, amp.register_float_function, amp.register_promote_function):
        register(owner, "double")
    assert_type(half(Net(), "bfloat16", keep_fp32=["head"]), Net)
    assert_type(check_half(nn.Linear(4, 4), torch.randn(1, 4)), HalfReport)
    small = half(nn.Linear(4, 1), torch.bfloat16)
    masters = MasterWeights(torch.optim.SGD(small.parameters(), lr=0.1))
    assert_type(masters.model_parameters(), list[Tensor])
    fp16 = FP16Optimizer(torch.optim.SGD(half(nn.Linear(4, 1), torch.bfloat16).parameters(), lr=0.1))
    assert_type(fp16.loss_scale, float)


def faults(model: Net) -> None:
    """When numbers go wrong."""
    x = torch.randn(16, 4)

    def step() -> Tensor:
        model.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()  # pyright: ignore[reportUnknownMemberType]
        return loss

    with ampkit.debugging.detect_nonfinite(model) as report:
        step()
    assert_type(report, NonFiniteReport)
    assert_type(debugging.find_nonfinite(step, model), NonFiniteReport)
    assert_type(debugging.compare_precision(step, model), PrecisionReport)
    assert_type(ampkit.integrations.__all__, list[str])
    assert_type(ampkit.__version__, str)


def main() -> None:
    """All of it."""
    train()
    regions()
    whole_models()
    faults(Net())
    x = torch.ones(1, requires_grad=True)
    Double.apply(x)  # pyright: ignore[reportUnknownMemberType]
