"""A strictly typed script of a user: every public name, and the types of its results.

Only pyright reads it, in strict mode; `assert_type` has the type that it must infer.
"""

from collections.abc import Iterator
from typing import Any, assert_type

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler as TorchScaler

import ampkit
from ampkit import (
    CastRecord,
    GradScaler,
    LossScaleStuckError,
    OverflowReport,
    Policy,
    Rule,
    ScalerStats,
    amp,
    autocast,
    custom_bwd,
    custom_fwd,
    debugging,
    half,
    matmul,
    optim,
)
from ampkit.debugging.finding import Report
from ampkit.debugging.rehearsal import RehearsalReport
from ampkit.half_precision.check_half import HalfReport
from ampkit.policy.policy import Explanation
from ampkit.records.cast_record import RecordedCall

CONFIGURATION = {"dtype": "bfloat16", "policy": "torch"}


class Net(nn.Module):
    """Its forward is decorated."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    @autocast("cpu", torch.bfloat16)
    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.head(x) * scale


@autocast("cpu", CONFIGURATION["dtype"], policy=CONFIGURATION["policy"])
def loss_of(output: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    return nn.functional.cross_entropy(output, target, reduction=reduction)


@autocast("cpu")
def batches(n: int) -> Iterator[tuple[Tensor, Tensor]]:
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
    return x * times


model, x = Net(), torch.randn(4, 4)

# Policies
policy = Policy.default("cpu").with_rules({"aten::gelu": Rule.FLOAT32}).for_modules(model, {"head": "float32"})
assert_type(policy, Policy)
assert_type(policy.explain(torch.softmax), Explanation)
assert_type(policy.explain("aten::linear").rule, Rule)
assert_type(policy.explain(torch.ops.aten.mm).rule, Rule)
assert_type(str(policy.check()), str)
assert_type(matmul.float8_layers(policy, model), list[str])
assert_type(Policy.from_dict(policy.to_dict(), model), Policy)
ampkit.register_op("aten::frobenius_norm", "float32")

# The loop, with everything that a scaler can do
optimizer = optim.AdamW(model.parameters(), lr=1e-2)
rule, limit = ampkit.DynamicLossScale(init_scale=2.0**8), ampkit.TimesMedian(10.0)
scaler = GradScaler("cpu", loss_scale=rule, on_stuck="raise", skip_above=limit)
for inputs, target in batches(3):
    assert_type(inputs, Tensor)
    with autocast("cpu", torch.float16, policy=policy) as region:
        assert_type(region, autocast)
        loss = loss_of(model(inputs, scale=1.0), target)
    assert_type(scaler.scale(loss), Tensor)
    scaler.scale(loss).backward()  # pyright: ignore[reportUnknownMemberType]  torch types it so
    assert_type(scaler.scale(model(inputs)), Tensor)  # a model's output has no type
    assert_type(scaler.clip_grad_norm_(optimizer, 1.0), Tensor)
    scaler.clip_grad_value_(optimizer, 0.5)
    try:
        assert_type(scaler.step(optimizer), float | None)
    except LossScaleStuckError:
        scaler.update(2.0**8)
    assert_type(scaler.stepped(optimizer), bool)
    assert_type(scaler.found_inf(optimizer), Tensor)
assert_type(scaler.scale([x]), list[Tensor])
assert_type(scaler.scale({"a": (x, x)}), dict[str, tuple[Tensor, Tensor]])
assert_type(scaler.stats(), ScalerStats)
assert_type(scaler.get_scale(), float)
assert_type(scaler.overflow_report(model), OverflowReport)
assert_type(scaler.state_dict(), dict[str, Any])
torch_scaler: TorchScaler = scaler
scaler.check_ranks()
for strategy in (ampkit.StaticLossScale(2.0), ampkit.NoOpLossScale()):
    GradScaler("cpu", loss_scale=strategy).load_state_dict(scaler.state_dict())
guard = ampkit.GradGuard("cpu", on_stuck="raise", skip_above=limit)
assert_type(guard.backward_and_step(x.sum(), optimizer, max_norm=1.0, accumulate=False), Tensor | None)
assert_type(optimizer.step(), None)
assert_type(optimizer.step(lambda: torch.ones(())), Tensor)
assert_type(optim.SGD(model.parameters(), lr=0.1).step(), None)

# Regions, and what carries them
ampkit.clear_autocast_cache()
assert_type(mixed(x, times=3), Tensor)
assert_type(loss_of(x, target=torch.zeros(4), reduction="sum"), Tensor)
assert_type(batches(1), Iterator[tuple[Tensor, Tensor]])
with ampkit.record_casts() as record:
    model(x)
assert_type(record, CastRecord)
assert_type(record.calls, list[RecordedCall])

# Whole models
net, sgd = amp.initialize(Net(), torch.optim.SGD(model.parameters(), lr=0.1), "O1", enabled=False)
assert_type(net, Net)
assert_type(sgd, torch.optim.SGD)
models, optimizers = amp.initialize(
    [model], [optim.SGD(model.parameters(), lr=0.1)], opt_level="O2", dtype="bfloat16", verbosity=0, loss_scale=2.0
)
assert_type(models, list[Net])
assert_type(optimizers, list[optim.SGD])
assert_type(amp.initialize(nn.Linear(1, 1), opt_level="O3", dtype=torch.bfloat16, verbosity=0), nn.Linear)
with amp.scale_loss(models[0](x).float().mean(), optimizers) as scaled:
    assert_type(scaled, Tensor)
assert_type(amp.master_params(optimizers[0]), Iterator[Tensor])
assert_type(amp.loss_scalers(optimizers[0])[0].stats(), ScalerStats)
amp.load_state_dict(amp.state_dict(optimizers[0]), optimizers[0])
with amp.disable_casts():
    assert_type(amp.float_function(mixed)(torch.ones(1)), Tensor)
    assert_type(amp.promote_function(mixed)(torch.ones(1), times=1), Tensor)
for register in (amp.register_half_function, amp.register_float_function, amp.register_promote_function):
    register(nn.functional, "relu")
assert_type(half(Net(), "bfloat16", keep_fp32=["head"]), Net)
assert_type(ampkit.check_half(nn.Linear(4, 4), torch.randn(1, 4)), HalfReport)
assert_type(ampkit.MasterWeights(sgd).model_parameters(), list[Tensor])
assert_type(ampkit.FP16Optimizer(sgd).loss_scale, float)


# When numbers go wrong
def step() -> Tensor:
    return model(x).float().square().mean()


with ampkit.debugging.Examination(model, on_nonfinite="raise") as report:
    step()
assert_type(report, Report)
assert_type(debugging.examine(step, model), Report)
assert_type(debugging.rehearse(lambda: iter([step()]), model), RehearsalReport)
assert_type(ampkit.integrations.__all__, list[str])
assert_type(ampkit.__version__, str)
