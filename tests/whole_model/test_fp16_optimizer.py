"""FP16Optimizer: the scripts that were written around one, against a scaler and masters by hand."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampkit import optim
from ampkit.containers import SIXTEEN_BIT
from ampkit.scaler.grad_scaler import GradScaler
from ampkit.scaler.loss_scale import DynamicLossScale
from ampkit.whole_model.fp16_optimizer import FP16Optimizer
from ampkit.whole_model.master_weights import MasterWeights

ids = {"ids": lambda value: str(value).removeprefix("torch.")}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "torch": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "ampkit": lambda params: optim.AdamW(params, lr=1e-2),
}


def model_of(dtype: torch.dtype = torch.float16) -> nn.Sequential:
    """Half linear layers around a float32 norm, as scripts of that time had them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 3)).to(dtype)
    model[2].float()
    return model


def batches(n: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(n)]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x.to(model[0].weight.dtype)).float(), y)  # type: ignore[index]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
@pytest.mark.parametrize("dtype", SIXTEEN_BIT, **ids)
def test_it_is_a_scaler_and_masters_to_the_bit(
    dtype: torch.dtype, make: Callable[[Any], Any], set_to_none: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Losses and weights of 12 steps of two micro-batches, with clipping and two overflows.

    Micro-batches are taken together or one by one, each with an update of the scale. The second overflow is dropped, as
    scripts for Apex have it: `if optimizer.overflow: continue`.
    """
    rule = {"init_scale": 2.0**12, "scale_window": 4}
    model = model_of(dtype)
    optimizer = FP16Optimizer(make(model.parameters()), dynamic_loss_scale=True, dynamic_loss_args=rule, verbose=True)
    reference = model_of(dtype)
    by_hand = make(reference.parameters())
    masters = MasterWeights(by_hand)
    scaler = GradScaler("cpu", loss_scale=DynamicLossScale(init_scale=2.0**12, growth_interval=4))
    for index, (x, y) in enumerate(batches(12)):
        factor, together = torch.inf if index in (5, 6) else 1.0, set_to_none and index % 2 == 1
        scale = optimizer.loss_scale
        optimizer.zero_grad(set_to_none)
        by_hand.zero_grad()
        for last, part in ((False, slice(0, 4)), (True, slice(4, 8))):
            loss = loss_of(model, x[part], y[part]) * factor
            optimizer.backward(loss, update_master_grads=not together)
            expected = loss_of(reference, x[part], y[part]) * factor
            scaler.scale(expected).backward()
            assert torch.equal(loss, expected)
            if together is last:
                masters.take_gradients_()
        if together:
            with pytest.raises(RuntimeError, match="gradients of a delayed backward are still scaled"):
                optimizer.step()
            optimizer.update_master_grads()
        scaler.unscale_(by_hand)
        norm = optimizer.clip_master_grads(0.5)
        torch.testing.assert_close(norm, scaler.clip_grad_norm_(by_hand, 0.5), rtol=0, atol=0, equal_nan=True)
        assert optimizer.overflow is (index in (5, 6))
        assert not optimizer.overflow or optimizer.loss_scale == scale / (2 if together else 4)
        if index != 6:
            optimizer.step()
        scaler.step(by_hand)
        scaler.update()
        assert all(map(torch.equal, optimizer.masters.masters(), masters.masters()))
        assert all(map(torch.equal, model.parameters(), reference.parameters()))
    stats = optimizer.scaler.stats()
    assert (stats.steps, stats.skips) == (10, 1)
    said = "" if "ampkit" in type(make([torch.ones(1)])).__module__ else "step skipped; the loss scale is"
    assert said in capsys.readouterr().out
    report = optimizer.scaler.overflow_report(model)        # the masters' gradients are gone by now
    assert {row.name for row in report} == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
def test_resuming_is_bit_for_bit(make: Callable[[Any], Any]) -> None:
    def start() -> tuple[nn.Module, FP16Optimizer]:
        model = model_of()
        args = {"init_scale": 2.0**14, "scale_window": 3}
        return model, FP16Optimizer(make(model.parameters()), dynamic_loss_scale=True, dynamic_loss_args=args)

    def train(run: tuple[nn.Module, FP16Optimizer], data: list[tuple[Tensor, Tensor]]) -> None:
        for x, y in data:
            run[1].zero_grad()
            run[1].backward(loss_of(run[0], x, y))
            run[1].step()

    straight, first, second = start(), start(), start()
    train(straight, batches(8))
    train(first, batches(8)[:4])
    file = io.BytesIO()
    torch.save([part.state_dict() for part in first], file)
    file.seek(0)
    for part, saved in zip(second, torch.load(file), strict=True):
        part.load_state_dict(saved)
    train(second, batches(8)[4:])
    assert second[1].loss_scale == straight[1].loss_scale > 2.0**14
    assert all(map(torch.equal, second[0].state_dict().values(), straight[0].state_dict().values()))


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("loss_scaler", {}, "source state dict is empty"),
        ("loss_scaler", None, "expected a dict"),
        ("fp32_from_fp16", [1.0, None], r"the saved masters are \[1.0, None\]; expected a list of tensors"),
        ("optimizer_state_dict", {"param_groups": [], "state": {}}, "different number of parameter groups"),
        ("fp32_from_fp16", "missing", r"\['fp32_from_fp16'\] missing"),
    ],
)
def test_a_state_loads_as_a_whole_or_not_at_all(entry: str, value: Any, message: str) -> None:
    def started(lr: float) -> FP16Optimizer:
        model = torch.nn.Linear(2, 1).half()
        optimizer = FP16Optimizer(torch.optim.SGD(model.parameters(), lr=lr), 0)
        optimizer.backward(model(torch.ones(1, 2).half()).sum())
        optimizer.step()
        return optimizer

    ours, saved = started(0.25), {**started(0.5).state_dict(), entry: value}
    if value == "missing":
        del saved[entry]
    before = copy.deepcopy(ours.state_dict())
    with pytest.raises((TypeError, ValueError, RuntimeError, KeyError), match=message):
        ours.load_state_dict(saved)
    after = ours.state_dict()
    assert all(map(torch.equal, after.pop("fp32_from_fp16"), before.pop("fp32_from_fp16")))
    assert after == before


def test_schedulers_hooks_and_groups_take_it_for_the_optimizer() -> None:
    model, extra = model_of(), nn.Linear(3, 1).half()
    optimizer = FP16Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), static_loss_scale=8.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    stepped = []
    optimizer.register_step_post_hook(lambda *args: stepped.append(1))
    optimizer.add_param_group({"params": extra.parameters(), "lr": 0.5})
    before = extra.weight.clone()
    for _ in range(2):
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        optimizer.backward(extra(model(batches(1)[0][0].half())).float().sum())
        optimizer.step()
        scheduler.step()
    assert optimizer.optimizer.param_groups[0]["lr"] == 0.025
    assert stepped == [1, 1]
    assert not torch.equal(extra.weight, before)
    assert optimizer.masters.master_of(extra.weight) is not None


def test_what_is_refused() -> None:
    model = model_of()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = FP16Optimizer(inner, static_loss_scale=128.0)
    fresh = torch.optim.SGD(model_of().parameters(), lr=0.1)
    remainders = optim.AdamW(model_of().bfloat16().parameters(), masters="remainder")
    for refused, error, message in (
        (lambda: FP16Optimizer(model), TypeError, "wraps a plain torch.optim.Optimizer, got Sequential"),
        (lambda: FP16Optimizer(optimizer), TypeError, "got FP16Optimizer"),
        (lambda: FP16Optimizer(inner), RuntimeError, "SGD has master weights already"),
        (lambda: FP16Optimizer(remainders), ValueError, "AdamW has masters='remainder', which makes float32 masters"),
        (lambda: FP16Optimizer(fresh, -1.0), ValueError, "scale is -1.0; expected a number from"),
        (lambda: FP16Optimizer(fresh, 2.0, dynamic_loss_args={"scale_window": 2}), ValueError, "for a static scale"),
        (lambda: FP16Optimizer(fresh, 0, dynamic_loss_args={"window": 2}), TypeError, "argument 'window'"),
        (lambda: optimizer.step(), RuntimeError, "without a backward since .* call optimizer.backward"),
        (lambda: optimizer.clip_master_grads(1.0), RuntimeError, "without a backward"),
        (lambda: optimizer.update_master_grads(), RuntimeError, "no scaled gradients to take"),
        (lambda: optimizer.backward(1.0), TypeError, r"takes the loss tensor, got float; pass it before .item\(\)"),
        (lambda: copy.deepcopy(optimizer), TypeError, "cannot be pickled or copied"),
        (lambda: pickle.dumps(optimizer), TypeError, r"cannot be pickled or copied; save state_dict\(\)"),
        (lambda: optimizer.no_such_name, AttributeError, "no_such_name"),
    ):
        with pytest.raises(error, match=message):
            refused()
    assert not remainders._optimizer_step_pre_hooks     # of a wrapper that was never made
    loss_of(model, *batches(1)[0]).backward()
    with pytest.raises(RuntimeError, match=r"on gradients of another backward; call optimizer.backward"):
        optimizer.step()


def test_a_default_dtype_other_than_float32() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        weight = torch.nn.Parameter(torch.ones(4))
        optimizer = FP16Optimizer(torch.optim.SGD([weight], lr=1.0), static_loss_scale=64.0)
        optimizer.backward((weight * 2.0).sum())
        assert optimizer.clip_master_grads(1.0).item() == 4.0
        optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert weight.tolist() == [0.5] * 4
