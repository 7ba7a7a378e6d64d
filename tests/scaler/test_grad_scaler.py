"""The interface of torch.amp.GradScaler, point by point: what is equal is asserted of both classes."""

import copy
import inspect
import pickle

import pytest
import torch

from ampkit.scaler.grad_scaler import GradScaler
from ampkit.scaler.loss_scale import LARGEST_SCALE, DynamicLossScale
from tests.helpers.scaler_tools import BOTH, iterate, one_parameter, started


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without CUDA")
@BOTH
def test_cuda_without_cuda_warns_and_disables(cls) -> None:
    with pytest.warns(UserWarning, match=r"CUDA is not available.  Disabling"):
        assert not cls("cuda").is_enabled()


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
        assert {own.kind for own in ours[len(theirs) :]} <= {inspect.Parameter.KEYWORD_ONLY}, name


def test_the_float32_reciprocal_has_the_bits_of_the_rounded_float64_one() -> None:
    """Of every scale: all significands, with normal and with subnormal quotients, and all powers of two."""
    significands = torch.arange(2**23, dtype=torch.int32)
    for exponent in (0, 126, 127):  # above 2**126 quotients are subnormal
        scales = (significands + ((exponent + 127) << 23)).view(torch.float32)
        assert torch.equal(scales.reciprocal(), scales.double().reciprocal().float()), f"2**{exponent}"
    powers = torch.tensor([2.0**exponent for exponent in range(-126, 128)])
    assert torch.equal(powers.reciprocal(), powers.double().reciprocal().float())
    for scale in (3.0, 65535.0, 2.0**127, LARGEST_SCALE):  # 0-d, as a scaler's
        scaler = started(GradScaler, scale)
        inv_scale, flag = scaler._inverse_scale()
        assert inv_scale.item() == torch.tensor(scale).double().reciprocal().float().item()
        assert (inv_scale.dtype, flag.item()) == (torch.float32, 0.0)


@BOTH
@pytest.mark.parametrize("is_taken_away", [False, True])
def test_calls_out_of_order_say_what_is_wrong(cls, is_taken_away: bool) -> None:
    """Before a scale is there, and where other code has taken it away: then the next loss makes a new one."""
    scaler, (_, optimizer) = cls("cpu", 4.0), one_parameter(grad=1.0)
    if is_taken_away:
        scaler.scale(torch.ones(()))
        iterate(scaler, optimizer)
        scaler._scale = scaler._growth_tracker = None
    calls = {"unscale_": scaler.unscale_, "step": scaler.step, "update": lambda _: scaler.update()}
    if cls is GradScaler:
        calls["clip_grad_norm_"] = lambda each: scaler.clip_grad_norm_(each, 1.0)
        calls["_check_inf_per_device"] = scaler._check_inf_per_device

    def refuses(names, error, message) -> None:
        for name in names:
            with pytest.raises(error, match=message.format(name)):
                calls[name](optimizer)

    refuses(calls, AssertionError, "Attempted {} but _scale is None")
    if cls is GradScaler:
        assert (scaler.stats().scale, scaler.state_dict()["scale"], scaler.history) == (4.0, 4.0, [])
    scaler.scale(torch.ones(()))
    refuses(["update"], AssertionError, "No inf checks were recorded prior to update")
    scaler.unscale_(optimizer)
    refuses(["unscale_"], RuntimeError, r"{}\(\) has already been called on this optimizer since the last")
    scaler.step(optimizer)
    refuses(["unscale_"], RuntimeError, r"{}\(\) is being called after step\(\)")
    if cls is GradScaler:
        calls["unscale_"] = lambda each: scaler.unscale_(each, allow_repeat=True)  # before `step` that repeats nothing
        refuses(["unscale_", "clip_grad_norm_"], RuntimeError, r"{}\(\) is being called after step\(\)")
    refuses(["step"], RuntimeError, r"{}\(\) has already been called since the last update\(\)")
    scaler.update()
    iterate(scaler, optimizer)
    assert cls is not GradScaler or scaler.stats().steps == 2


@BOTH
def test_step_takes_arguments_and_returns_the_optimizers_value(cls) -> None:
    class Chatty(torch.optim.SGD):
        def step(self, word, *, times=1):
            return word * times

    param, _ = one_parameter(grad=1.0)
    assert started(cls).step(Chatty([param], lr=1.0), "ha", times=2) == "haha"


def test_new_scales_that_torch_mishandles() -> None:
    scaler = started()
    for new, scale in ((16, 16.0), (torch.tensor([32.0]), 32.0)):
        scaler.update(new)
        assert scaler.get_scale() == scale
    with pytest.raises(AssertionError, match="got True"):
        scaler.update(True)
    for bad in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=r"new_scale is .*; expected a positive finite number"):
            scaler.update(bad)
        scaler.update(torch.tensor(bad))  # a tensor is not looked at by the host: the device keeps the scale
        assert scaler.get_scale() == 32.0
    bounded = started(loss_scale=DynamicLossScale(8.0, min_scale=6.0))
    bounded.update(1.0)
    assert bounded.get_scale() == 6.0


@BOTH
def test_disabled_passes_everything_through(cls) -> None:
    scaler, loss = cls("cpu", growth_factor=0.0, backoff_factor=9.0, init_scale=-1.0, enabled=False), torch.ones(())
    assert scaler.scale(loss) is loss
    param, optimizer = one_parameter(grad=1.0)
    scaler.unscale_(optimizer)
    iterate(scaler, optimizer)
    scaler.load_state_dict({"any": "thing"})
    assert (param.item(), scaler.get_scale(), scaler.state_dict()) == (0.0, 1.0, {})
    copies = scaler, pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler)
    assert [each.is_enabled() for each in copies] == [False] * 3
    if cls is GradScaler:
        param.grad = torch.tensor([4.0])
        assert scaler.clip_grad_norm_(optimizer, 2.0).item() == 4.0
        assert param.grad.item() == pytest.approx(2.0)
        scaler.clip_grad_value_(optimizer, 0.5)
        assert param.grad.item() == 0.5
        assert (bool(scaler.found_inf(optimizer)), scaler.stepped(optimizer)) == (False, True)
        assert (scaler.stats().scale, scaler.history) == (1.0, [])
