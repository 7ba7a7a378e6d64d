"""FP16Optimizer in scripts as for Apex, compared with a scaler and masters by hand."""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn

from ampkit import optim
from ampkit.amp.fp16_optimizer import FP16Optimizer
from ampkit.half_precision.master_weights import MasterWeights
from ampkit.scaler.grad_scaler import GradScaler
from ampkit.scaler.loss_scale import DynamicLossScale
from tests.helpers.half_models import OPTIMIZERS, Net, batches, both_dtypes, loss_of, make_half
from tests.helpers.scaler_tools import alike

each_kind = pytest.mark.parametrize("kind", ["torch-adamw", "ampkit-adamw"])


@pytest.mark.parametrize("set_to_none", [True, False])
@each_kind
@both_dtypes
def test_it_is_a_scaler_and_masters_to_the_bit(
    dtype: torch.dtype, kind: str, set_to_none: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Losses and weights of 12 steps of two micro-batches, with clipping and two overflows.

    Micro-batches are unscaled together or separately, with an update of the scale each time. The second overflow is
    dropped as in scripts for Apex: `if optimizer.overflow: continue`.
    """
    model, reference, rule = make_half(dtype), make_half(dtype), {"init_scale": 2.0**12, "scale_window": 4}
    optimizer = FP16Optimizer(
        OPTIMIZERS[kind](model.parameters()), dynamic_loss_scale=True, dynamic_loss_args=rule, verbose=True
    )
    by_hand = OPTIMIZERS[kind](reference.parameters())
    masters = MasterWeights(by_hand)
    scaler = GradScaler("cpu", loss_scale=DynamicLossScale(init_scale=2.0**12, growth_interval=4))
    for index, (x, y) in enumerate(batches(12)):
        factor, together = torch.inf if index in (5, 6) else 1.0, set_to_none and index % 2 == 1
        scale = optimizer.loss_scale
        optimizer.zero_grad(set_to_none)
        by_hand.zero_grad()
        for last, part in ((False, slice(0, 4)), (True, slice(4, 8))):
            loss, expected = (loss_of(net, (x[part], y[part])) * factor for net in (model, reference))
            assert torch.equal(loss, expected)
            optimizer.backward(loss, update_master_grads=not together)
            scaler.scale(expected).backward()
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
        torch.testing.assert_close([*optimizer.masters.masters()], [*masters.masters()], rtol=0, atol=0)
        torch.testing.assert_close([*model.parameters()], [*reference.parameters()], rtol=0, atol=0)
    stats = optimizer.scaler.stats()
    assert (stats.steps, stats.skips) == (10, 1)
    printed = "" if kind.startswith("ampkit") else "step skipped; the loss scale is"
    assert printed in capsys.readouterr().out
    report = optimizer.scaler.overflow_report(model)  # the masters' gradients are gone by now
    assert {row.name for row in report} == {name for name, _ in model.named_parameters()}


def train(model: nn.Module, optimizer: FP16Optimizer, data: list[tuple[Tensor, Tensor]]) -> None:
    for batch in data:
        optimizer.zero_grad()
        optimizer.backward(loss_of(model, batch))
        optimizer.step()


@each_kind
def test_resuming_is_bit_for_bit(kind: str) -> None:
    def start() -> tuple[Net, FP16Optimizer]:
        model = make_half(torch.float16)
        args = {"init_scale": 2.0**14, "scale_window": 3}
        optimizer = OPTIMIZERS[kind](model.parameters())
        return model, FP16Optimizer(optimizer, dynamic_loss_scale=True, dynamic_loss_args=args)

    straight, first, second = start(), start(), start()
    train(*straight, batches(8))
    train(*first, batches(8)[:4])
    file = io.BytesIO()
    torch.save([part.state_dict() for part in first], file)
    file.seek(0)
    for part, saved in zip(second, torch.load(file), strict=True):
        part.load_state_dict(saved)
    train(*second, batches(8)[4:])
    assert second[1].loss_scale == straight[1].loss_scale > 2.0**14
    torch.testing.assert_close([*second[0].state_dict().values()], [*straight[0].state_dict().values()], rtol=0, atol=0)


def test_a_state_loads_as_a_whole_or_not_at_all() -> None:
    def started(lr: float) -> FP16Optimizer:
        model = make_half()
        optimizer = FP16Optimizer(torch.optim.SGD(model.parameters(), lr=lr), 0)
        train(model, optimizer, batches(1))
        return optimizer

    ours, saved = started(0.25), started(0.5).state_dict()
    before = copy.deepcopy(ours.state_dict())
    for changed, message in (
        ({"loss_scaler": {}}, "source state dict is empty"),
        ({"loss_scaler": None}, "expected a dict"),
        ({"fp32_from_fp16": [1.0, None]}, r"the saved masters are \[1.0, None\]; expected a list of tensors"),
        ({"optimizer_state_dict": {"param_groups": [], "state": {}}}, "different number of parameter groups"),
    ):
        with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
            ours.load_state_dict({**saved, **changed})
        assert alike(ours.state_dict(), before)
    del saved["fp32_from_fp16"]
    with pytest.raises(KeyError, match=r"\['fp32_from_fp16'\] missing"):
        ours.load_state_dict(saved)
    assert alike(ours.state_dict(), before)


def test_schedulers_hooks_and_groups_take_it_for_the_optimizer() -> None:
    model, extra = make_half(), nn.Linear(10, 10).bfloat16()
    optimizer = FP16Optimizer(OPTIMIZERS["torch-sgd"](model.parameters()), static_loss_scale=8.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    stepped = []
    optimizer.register_step_post_hook(lambda *args: stepped.append(1))
    optimizer.add_param_group({"params": extra.parameters(), "lr": 0.5})
    before = extra.weight.clone()
    for x, _ in batches(2):
        optimizer.zero_grad()
        assert {p.grad for p in model.parameters()} == {None}
        optimizer.backward(extra(model(x).bfloat16()).float().sum())
        optimizer.step()
        scheduler.step()
    assert optimizer.optimizer.param_groups[0]["lr"] == 0.025
    assert stepped == [1, 1]
    assert not torch.equal(extra.weight, before)
    assert optimizer.masters.master_of(extra.weight) is not None


def test_what_is_refused() -> None:
    model = make_half()
    inner = OPTIMIZERS["torch-sgd"](model.parameters())
    optimizer = FP16Optimizer(inner, static_loss_scale=128.0)
    fresh = OPTIMIZERS["torch-sgd"](make_half().parameters())
    remainders = optim.AdamW(make_half().parameters(), masters="remainder")
    for refused, error, message in (
        (lambda: FP16Optimizer(model), TypeError, "wraps a plain torch.optim.Optimizer, got Net"),
        (lambda: FP16Optimizer(optimizer), TypeError, "got FP16Optimizer"),
        (lambda: FP16Optimizer(inner), RuntimeError, "SGD has master weights already"),
        (lambda: FP16Optimizer(remainders), ValueError, "AdamW has masters='remainder', which stores the remainders"),
        (lambda: FP16Optimizer(fresh, -1.0), ValueError, "scale is -1.0; expected a number from"),
        (lambda: FP16Optimizer(fresh, 2.0, dynamic_loss_args={"scale_window": 2}), ValueError, "for a static scale"),
        (lambda: FP16Optimizer(fresh, 0, dynamic_loss_args={"window": 2}), TypeError, "argument 'window'"),
        (lambda: optimizer.step(), RuntimeError, "without a backward since .* call optimizer.backward"),
        (lambda: optimizer.clip_master_grads(1.0), RuntimeError, "without a backward"),
        (lambda: optimizer.update_master_grads(), RuntimeError, "no gradient is scaled; call"),
        (lambda: optimizer.backward(1.0), TypeError, r"takes the loss tensor, got float; pass it before .item\(\)"),
        (lambda: copy.deepcopy(optimizer), TypeError, "cannot be pickled or copied"),
        (lambda: pickle.dumps(optimizer), TypeError, r"cannot be pickled or copied; save state_dict\(\)"),
        (lambda: optimizer.no_such_name, AttributeError, "no_such_name"),
    ):
        with pytest.raises(error, match=message):
            refused()
    assert not remainders._optimizer_step_pre_hooks  # of a wrapper that was never made
    loss_of(model).backward()
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
