"""The interface of torch.amp.GradScaler, point by point: what is equal is asserted of both classes."""

import copy
import inspect
import pickle

import pytest
import torch

from ampkit.scaler.grad_scaler import GradScaler
from ampkit.scaler.loss_scale import DynamicLossScale
from tests.helpers.scaler_tools import BOTH, iterate, one_parameter, started

NAN, INF = float("nan"), float("inf")


# Constructor


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without CUDA")
@BOTH
def test_cuda_without_cuda_warns_and_disables(cls) -> None:
    with pytest.warns(UserWarning, match=r"CUDA is not available.  Disabling"):
        scaler = cls("cuda")
    assert not scaler.is_enabled()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="about machines without an accelerator")
def test_device_defaults_to_what_the_machine_has() -> None:
    """torch's default is "cuda" everywhere, which disables the scaler on other machines."""
    assert GradScaler().is_enabled()


def test_arguments_are_torchs_with_ours_by_keyword() -> None:
    """Of the constructor and of every public method."""
    for name, native in inspect.getmembers(torch.amp.GradScaler, inspect.isfunction):
        if name.startswith("_") and name != "__init__":
            continue
        theirs = list(inspect.signature(native).parameters.values())
        ours = list(inspect.signature(getattr(GradScaler, name)).parameters.values())
        for own, other in zip(ours, theirs, strict=False):
            assert (own.name, own.kind) == (other.name, other.kind), name
            assert own.name == "device" or own.default == other.default
        assert all(own.kind is inspect.Parameter.KEYWORD_ONLY for own in ours[len(theirs) :]), name


@BOTH
def test_factors_are_checked_unless_disabled(cls) -> None:
    with pytest.raises(AssertionError, match=r"The growth factor must be > 1\.0"):
        cls("cpu", growth_factor=1.0)
    with pytest.raises(AssertionError, match=r"The backoff factor must be < 1\.0"):
        cls("cpu", backoff_factor=1.0)
    assert not cls("cpu", growth_factor=0.0, backoff_factor=9.0, init_scale=-1.0, enabled=False).is_enabled()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: GradScaler("cpu", init_scale=0.0), ValueError, "init_scale is 0"),
        (lambda: GradScaler("cpu", on_stuck="scream"), ValueError, "on_stuck is 'scream'; expected 'warn', 'raise'"),
        (lambda: GradScaler(2.0**16), TypeError, "device is 65536.0; expected .*; init_scale comes"),
        (lambda: GradScaler("cpu").set_growth_factor(0.5), ValueError, r"growth_factor is 0\.5"),
        (lambda: GradScaler("cpu").set_backoff_factor(0.0), ValueError, r"backoff_factor is 0\.0"),
    ],
)
def test_bad_arguments_are_named(make, error, message) -> None:
    with pytest.raises(error, match=message):
        make()


# The order of calls: that it is torch's, tests in lockstep prove; here is what the errors say


@BOTH
def test_calls_out_of_order_say_what_is_wrong(cls) -> None:
    scaler = cls("cpu")
    _, optimizer = one_parameter(grad=1.0)
    calls = {"unscale_": lambda: scaler.unscale_(optimizer), "step": lambda: scaler.step(optimizer),
             "update": scaler.update}
    if cls is GradScaler:
        calls["clip_grad_norm_"] = lambda: scaler.clip_grad_norm_(optimizer, 1.0)
    for name, call in calls.items():
        with pytest.raises(AssertionError, match=f"Attempted {name} but _scale is None"):
            call()
    scaler.scale(torch.ones((), requires_grad=True))
    with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
        scaler.update()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called on this optimizer since the last"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    if cls is GradScaler:       # before `step` that repeats nothing
        calls["unscale_"] = lambda: scaler.unscale_(optimizer, allow_repeat=True)
    for name in calls.keys() - {"step", "update"}:
        with pytest.raises(RuntimeError, match=rf"{name}\(\) is being called after step\(\)"):
            calls[name]()
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called since the last update\(\)"):
        scaler.step(optimizer)
    scaler.update()
    scaler.unscale_(optimizer)


@BOTH
def test_step_takes_arguments_and_returns_the_optimizers_value(cls) -> None:
    class Chatty(torch.optim.SGD):
        def step(self, word, *, times=1):
            return word * times

    param, _ = one_parameter(grad=1.0)
    assert started(cls).step(Chatty([param], lr=1.0), "ha", times=2) == "haha"


# update(new_scale)


def test_new_scales_that_torch_mishandles() -> None:
    scaler = started()
    scaler.update(16)
    assert scaler.get_scale() == 16.0
    scaler.update(torch.tensor([32.0]))
    assert scaler.get_scale() == 32.0
    with pytest.raises(AssertionError, match="got True"):
        scaler.update(True)
    for bad in (0.0, -1.0, INF, NAN):
        with pytest.raises(ValueError, match=r"new_scale is .*; expected a positive finite number"):
            scaler.update(bad)
        scaler.update(torch.tensor(bad))  # a tensor is not looked at by the host: the device keeps the scale
        assert scaler.get_scale() == 32.0
    bounded = started(loss_scale=DynamicLossScale(8.0, min_scale=6.0))
    bounded.update(1.0)
    assert bounded.get_scale() == 6.0


# Disabled, set by hand


@BOTH
def test_disabled_passes_everything_through(cls) -> None:
    scaler = cls("cpu", enabled=False)
    loss = torch.ones(())
    assert scaler.scale(loss) is loss
    param, optimizer = one_parameter(grad=1.0)
    scaler.unscale_(optimizer)
    iterate(scaler, optimizer)
    scaler.load_state_dict({"any": "thing"})
    assert (param.item(), scaler.get_scale(), scaler.state_dict()) == (0.0, 1.0, {})
    assert not pickle.loads(pickle.dumps(scaler)).is_enabled()
    assert not copy.deepcopy(scaler).is_enabled()
    if cls is GradScaler:
        param.grad = torch.tensor([4.0])
        assert scaler.clip_grad_norm_(optimizer, 2.0).item() == 4.0
        assert param.grad.item() == pytest.approx(2.0)
        scaler.clip_grad_value_(optimizer, 0.5)
        assert param.grad.item() == 0.5
        assert (bool(scaler.found_inf(optimizer)), scaler.stepped(optimizer)) == (False, True)
        assert (scaler.stats().scale, scaler.history) == (1.0, [])
