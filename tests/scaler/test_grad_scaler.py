"""The interface of torch.amp.GradScaler, point by point: what is equal is asserted of both classes."""

import copy
import inspect
import pickle

import pytest
import torch

from ampkit.scaler.grad_scaler import GradScaler
from tests.helpers.scaler_tools import BOTH, one_parameter, started

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
    scaler = GradScaler()
    assert scaler.is_enabled()
    assert scaler._device == "cpu"
    assert GradScaler(torch.device("cpu"))._device == "cpu"


def test_the_arguments_are_torchs_with_ours_by_keyword() -> None:
    ours = list(inspect.signature(GradScaler).parameters.values())
    theirs = list(inspect.signature(torch.amp.GradScaler).parameters.values())
    for own, native in zip(ours, theirs, strict=False):
        assert (own.name, own.kind) == (native.name, native.kind)
        assert own.name == "device" or own.default == native.default
    assert all(own.kind is inspect.Parameter.KEYWORD_ONLY for own in ours[len(theirs) :])


def test_every_public_method_of_torch_is_there_with_its_arguments() -> None:
    for name, native in inspect.getmembers(torch.amp.GradScaler, inspect.isfunction):
        if name.startswith("_") and name != "__init__":
            continue
        own = list(inspect.signature(getattr(GradScaler, name)).parameters)
        assert own[: len(inspect.signature(native).parameters)] == list(inspect.signature(native).parameters), name


@BOTH
def test_factors_are_checked_unless_disabled(cls) -> None:
    with pytest.raises(AssertionError, match=r"The growth factor must be > 1\.0"):
        cls("cpu", growth_factor=1.0)
    with pytest.raises(AssertionError, match=r"The backoff factor must be < 1\.0"):
        cls("cpu", backoff_factor=1.0)
    assert not cls("cpu", growth_factor=0.0, backoff_factor=9.0, init_scale=-1.0, enabled=False).is_enabled()


def test_bad_numbers_are_named() -> None:
    with pytest.raises(ValueError, match="init_scale is 0"):
        GradScaler("cpu", init_scale=0.0)
    with pytest.raises(ValueError, match="history_size is -1"):
        GradScaler("cpu", history_size=-1)


# scale


@BOTH
def test_scale_is_made_at_first_use(cls) -> None:
    scaler = cls("cpu", init_scale=4.0)
    assert scaler._scale is None
    assert scaler.get_scale() == 4.0
    assert scaler.scale(torch.ones((), requires_grad=True)).item() == 4.0
    assert (scaler._scale.dtype, scaler._scale.shape) == (torch.float32, ())
    assert (scaler._growth_tracker.dtype, scaler._growth_tracker.shape) == (torch.int32, ())


@BOTH
@pytest.mark.parametrize(
    ("dtype", "shape", "result"),
    [
        (torch.float16, (), torch.float32),
        (torch.bfloat16, (), torch.float32),
        (torch.float16, (2,), torch.float16),
        (torch.float64, (), torch.float64),
    ],
)
def test_dtypes_of_scaled_outputs(cls, dtype, shape, result) -> None:
    assert started(cls).scale(torch.ones(shape, dtype=dtype, requires_grad=True)).dtype is result


@BOTH
def test_containers_keep_their_types(cls) -> None:
    scaler = started(cls, 2.0)
    one = torch.ones((), requires_grad=True)
    scaled = scaler.scale([one, (one, [one])])
    assert [type(scaled), type(scaled[1]), type(scaled[1][1])] == [list, tuple, list]
    assert scaled[1][1][0].item() == 2.0
    lazy = scaler.scale(one for _ in range(2))
    assert not isinstance(lazy, list | tuple)
    assert [output.item() for output in lazy] == [2.0, 2.0]


@BOTH
@pytest.mark.parametrize("outputs", [3.0, None, [1.0]])
def test_what_is_no_tensor_is_refused(cls, outputs) -> None:
    with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable of Tensors"):
        started(cls).scale(outputs)


# The order of calls


@BOTH
def test_nothing_before_scale(cls) -> None:
    scaler = cls("cpu")
    _, optimizer = one_parameter(grad=1.0)
    for call, name in (
        (lambda: scaler.unscale_(optimizer), "unscale_"),
        (lambda: scaler.step(optimizer), "step"),
        (scaler.update, "update"),
    ):
        with pytest.raises(AssertionError, match=f"Attempted {name} but _scale is None"):
            call()


def test_nothing_else_before_scale_either() -> None:
    scaler = GradScaler("cpu")
    _, optimizer = one_parameter(grad=1.0)
    with pytest.raises(AssertionError, match="Attempted clip_grad_norm_ but"):
        scaler.clip_grad_norm_(optimizer, 1.0)
    with pytest.raises(AssertionError, match="Attempted clip_grad_value_ but"):
        scaler.clip_grad_value_(optimizer, 1.0)


@BOTH
def test_unscale_once_and_before_step(cls) -> None:
    scaler = started(cls)
    _, optimizer = one_parameter(grad=1.0)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called on this optimizer since the last"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) is being called after step\(\)"):
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called since the last update\(\)"):
        scaler.step(optimizer)
    scaler.update()
    scaler.unscale_(optimizer)


def test_unscale_may_be_repeated_on_request() -> None:
    scaler = started(GradScaler, 4.0)
    param, optimizer = one_parameter(grad=8.0)
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer, allow_repeat=True)
    assert param.grad.item() == 2.0
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"after step\(\)"):
        scaler.unscale_(optimizer, allow_repeat=True)
    for clip in (scaler.clip_grad_norm_, scaler.clip_grad_value_):
        with pytest.raises(RuntimeError, match=r"clip_grad_\w+_\(\) is being called after step\(\)"):
            clip(optimizer, 1.0)


@BOTH
def test_update_wants_checks(cls) -> None:
    with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
        started(cls).update()


@BOTH
def test_step_takes_arguments_and_returns_the_optimizers_value(cls) -> None:
    class Chatty(torch.optim.SGD):
        def step(self, word, *, times=1):
            return word * times

    param, _ = one_parameter(grad=1.0)
    assert started(cls).step(Chatty([param], lr=1.0), "ha", times=2) == "haha"


@BOTH
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_overflow_skips_and_backs_off(cls, bad) -> None:
    scaler = started(cls, 8.0, growth_interval=3)
    param, optimizer = one_parameter(grad=8.0)
    scaler.step(optimizer)
    scaler.update()
    assert (scaler.get_scale(), scaler._get_growth_tracker(), param.item()) == (8.0, 1, 0.0)
    param.grad = torch.tensor([bad])
    assert scaler.step(optimizer) is None
    scaler.update()
    assert (scaler.get_scale(), scaler._get_growth_tracker(), param.item()) == (4.0, 0, 0.0)


# update(new_scale)


@BOTH
def test_a_new_scale_replaces_the_answer(cls) -> None:
    scaler = started(cls, 8.0)
    param, optimizer = one_parameter(grad=8.0)
    scaler.step(optimizer)
    scaler.update(32.0)
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (32.0, 0)
    scaler.update(torch.tensor(64.0))
    assert scaler.get_scale() == 64.0
    param.grad = torch.tensor([64.0])
    scaler.unscale_(optimizer)  # update(new) made it READY again
    assert param.grad.item() == 1.0


@BOTH
def test_new_scales_of_wrong_kinds(cls) -> None:
    scaler = started(cls)
    for bad in (torch.ones(2), torch.ones((), requires_grad=True), torch.ones((), device="meta")):
        with pytest.raises(AssertionError, match="new_scale should be a"):
            scaler.update(bad)


def test_new_scales_that_torch_mishandles() -> None:
    scaler = started()
    scaler.update(16)
    assert scaler.get_scale() == 16.0
    scaler.update(torch.tensor([32.0]))
    assert scaler.get_scale() == 32.0
    with pytest.raises(AssertionError, match="got bool"):
        scaler.update(True)
    for bad in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=r"new_scale is .*; expected a positive finite number"):
            scaler.update(bad)
        scaler.update(torch.tensor(bad))  # a tensor is not looked at by the host: the device keeps the scale
        assert scaler.get_scale() == 32.0


# Setters, disabled, private names


@BOTH
def test_getters_and_setters(cls) -> None:
    scaler = cls("cpu", 4.0, 3.0, 0.25, 7)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (3.0, 0.25, 7)
    scaler.set_growth_factor(1.0)
    scaler.set_backoff_factor(1.0)
    scaler.set_growth_interval(9)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (1.0, 1.0, 9)
    assert scaler.is_enabled()


def test_setters_refuse_what_would_ruin_the_scale() -> None:
    with pytest.raises(ValueError, match=r"growth_factor is 0\.5"):
        GradScaler("cpu").set_growth_factor(0.5)
    with pytest.raises(ValueError, match=r"backoff_factor is 0\.0"):
        GradScaler("cpu").set_backoff_factor(0.0)


@BOTH
def test_disabled_passes_everything_through(cls) -> None:
    scaler = cls("cpu", enabled=False)
    loss = torch.ones(())
    assert scaler.scale(loss) is loss
    param, optimizer = one_parameter(grad=1.0)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    scaler.load_state_dict({"any": "thing"})
    assert (param.item(), scaler.get_scale(), scaler.state_dict()) == (0.0, 1.0, {})
    assert not pickle.loads(pickle.dumps(scaler)).is_enabled()


def test_our_methods_when_disabled() -> None:
    scaler = GradScaler("cpu", enabled=False)
    param, optimizer = one_parameter(grad=4.0)
    assert scaler.clip_grad_norm_(optimizer, 2.0).item() == 4.0
    assert param.grad.item() == pytest.approx(2.0)
    scaler.clip_grad_value_(optimizer, 0.5)
    assert param.grad.item() == 0.5
    assert not scaler.found_inf(optimizer)
    assert scaler.stepped(optimizer)
    assert scaler.stats().scale == 1.0
    assert scaler.history == []
    assert copy.deepcopy(scaler).is_enabled() is False


@BOTH
def test_private_names_that_other_libraries_use(cls) -> None:
    scaler = started(cls, 8.0)
    _, optimizer = one_parameter(grad=8.0)
    assert scaler._get_scale_async() is scaler._scale
    assert scaler._found_inf_per_device(optimizer) == {}
    found = scaler._check_inf_per_device(optimizer)
    assert {device.type: flag.item() for device, flag in found.items()} == {"cpu": 0.0}
    assert scaler._found_inf_per_device(optimizer) is found
    assert scaler._per_optimizer_states[id(optimizer)]["stage"].name == "READY"
    inv, flag = torch.tensor(0.5), torch.zeros(())
    found = scaler._unscale_grads_(optimizer, inv, flag, True)
    assert optimizer.param_groups[0]["params"][0].grad.item() == 4.0
    assert [value.item() for value in found.values()] == [0.0]


def test_a_scale_that_was_put_there_by_hand() -> None:
    scaler = GradScaler("cpu")
    scaler._scale, scaler._growth_tracker = torch.tensor(16.0), torch.tensor(3, dtype=torch.int32)
    _, optimizer = one_parameter(grad=1.0)
    scaler.step(optimizer)
    scaler.update()
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (16.0, 4)
