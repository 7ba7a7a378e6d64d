"""The interface of torch.amp.GradScaler, point by point: what is equal is asserted of both classes."""

import copy
import functools
import inspect
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch

from ampkit.optim import AdamW
from ampkit.scaler.grad_scaler import GradScaler
from tests.helpers.scaler_tools import count_reads

BOTH = pytest.mark.parametrize("cls", [GradScaler, torch.amp.GradScaler], ids=["ampkit", "torch"])


def one_parameter(value: float = 1.0, grad: float | None = None, **options):
    """A parameter, its SGD optimizer, and a gradient that is taken as already scaled."""
    param = torch.nn.Parameter(torch.tensor([value], **options))
    if grad is not None:
        param.grad = torch.tensor([grad], **options)
    return param, torch.optim.SGD([param], lr=1.0)


def started(cls=GradScaler, *arguments, **options):
    """A scaler whose scale is on the CPU already."""
    scaler = cls("cpu", *arguments, **options)
    scaler.scale(torch.ones((), requires_grad=True))
    return scaler


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


def test_is_a_torch_scaler() -> None:
    assert isinstance(GradScaler("cpu"), torch.amp.GradScaler)


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


def test_scale_backward_is_scaled() -> None:
    param, _ = one_parameter()
    started(GradScaler, 8.0).scale(param.sum() * 3).backward()
    assert param.grad.item() == 24.0


def test_a_detached_loss_warns_once_and_says_why() -> None:
    scaler = GradScaler("cpu")
    with pytest.warns(UserWarning, match=r"does not require grad.*torch\.tensor\(\)") as caught:
        scaler.scale(torch.tensor(1.0))
    assert caught[0].filename == __file__
    scaler.scale(torch.tensor(1.0))
    with pytest.warns(UserWarning, match="does not require grad"):
        GradScaler("cpu").scale([torch.tensor(1.0)])
    with torch.no_grad():
        GradScaler("cpu").scale(torch.tensor(1.0))  # nobody expects a backward here
    GradScaler("cpu").scale([torch.tensor(1.0), torch.tensor(1.0, requires_grad=True)])


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
def test_unscale_and_update_without_step(cls) -> None:
    scaler = started(cls, growth_interval=1)
    _, optimizer = one_parameter(grad=1.0)
    scaler.unscale_(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**17


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


@BOTH
def test_each_optimizer_skips_alone_and_the_scale_backs_off_once(cls) -> None:
    scaler = started(cls, 8.0)
    good, steps = one_parameter(grad=8.0)
    bad, skips = one_parameter(grad=float("inf"))
    scaler.step(skips)
    scaler.step(steps)
    scaler.update()
    assert (good.item(), bad.item(), scaler.get_scale()) == (0.0, 1.0, 4.0)


@BOTH
def test_growth_comes_exactly_at_the_interval(cls) -> None:
    scaler = started(cls, 8.0, growth_interval=2)
    seen = []
    for _ in range(4):
        _, optimizer = one_parameter(grad=1.0)
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.get_scale(), scaler._get_growth_tracker()))
    assert seen == [(8.0, 1), (16.0, 0), (16.0, 1), (32.0, 0)]


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
    assert not scaler.skipped(optimizer)
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


@BOTH
def test_unscale_grads_can_be_replaced_to_allow_fp16(cls) -> None:
    """Training scripts patch this method on the instance; the patched one must be used."""
    scaler = started(cls, 4.0)
    param, optimizer = one_parameter(grad=8.0, dtype=torch.float16)
    original = scaler._unscale_grads_
    scaler._unscale_grads_ = lambda optimizer, inv, found, _allow: original(optimizer, inv, found, True)
    scaler.unscale_(optimizer)
    assert param.grad.item() == 2.0


def test_a_scale_that_was_put_there_by_hand() -> None:
    scaler = GradScaler("cpu")
    scaler._scale, scaler._growth_tracker = torch.tensor(16.0), torch.tensor(3, dtype=torch.int32)
    _, optimizer = one_parameter(grad=1.0)
    scaler.step(optimizer)
    scaler.update()
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (16.0, 4)


# Saving


@BOTH
def test_torchs_entries_are_plain_values(cls) -> None:
    saved = started(cls, 8.0).state_dict()
    native = {key: saved[key] for key in ("scale", "growth_factor", "backoff_factor", "growth_interval")}
    assert native == {"scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
    assert [type(value) for value in native.values()] == [float, float, float, int]
    assert saved["_growth_tracker"] == 0


@pytest.mark.parametrize("source", [GradScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("target", [GradScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("live", [True, False])
def test_state_travels_between_both_scalers(source, target, live) -> None:
    old = started(source, 8.0, 3.0, 0.25, 5)
    _, optimizer = one_parameter(grad=1.0)
    old.step(optimizer)
    old.update()
    new = started(target) if live else target("cpu")
    new.load_state_dict(old.state_dict())
    new.scale(torch.ones((), requires_grad=True))
    assert (new.get_scale(), new._get_growth_tracker()) == (8.0, 1)
    assert (new.get_growth_factor(), new.get_backoff_factor(), new.get_growth_interval()) == (3.0, 0.25, 5)


@BOTH
def test_an_empty_state_is_refused(cls) -> None:
    with pytest.raises(RuntimeError, match="The source state dict is empty"):
        cls("cpu").load_state_dict({})


def test_missing_and_unknown_entries_are_named() -> None:
    scaler = started()
    saved = started(GradScaler, 4.0).state_dict()
    with pytest.raises(KeyError, match="no 'scale', 'growth_interval'"):
        scaler.load_state_dict({k: v for k, v in saved.items() if k not in ("scale", "growth_interval")})
    assert scaler.get_scale() == 2.0**16, "a refused state changes nothing"
    with pytest.warns(UserWarning, match=r"unknown entries in the scaler's state dict: \['flavour'\]"):
        scaler.load_state_dict({**saved, "flavour": 3})
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("scale", [0.0, float("inf"), float("nan")])
def test_a_collapsed_checkpoint_is_refused(scale) -> None:
    with pytest.raises(ValueError, match="the saved scale is"):
        GradScaler("cpu").load_state_dict({**torch.amp.GradScaler("cpu").state_dict(), "scale": scale})


def test_the_state_survives_a_weights_only_checkpoint(tmp_path) -> None:
    saved = started().state_dict()
    torch.save(saved, tmp_path / "scaler.pt")
    assert torch.load(tmp_path / "scaler.pt", weights_only=True) == saved


@BOTH
@pytest.mark.parametrize("twin_of", [lambda s: pickle.loads(pickle.dumps(s)), copy.deepcopy], ids=["pickle", "copy"])
def test_pickle_and_deepcopy(cls, twin_of) -> None:
    lazy = twin_of(cls("cpu", 4.0))
    assert lazy.get_scale() == 4.0
    scaler = started(cls, 4.0)
    _, optimizer = one_parameter(grad=1.0)
    scaler.step(optimizer)
    with pytest.raises(AssertionError, match="may only be pickled at the beginning of an iteration, or at the end"):
        twin_of(scaler)
    scaler.update()
    twin = twin_of(scaler)
    assert twin.state_dict() == scaler.state_dict()
    _, optimizer = one_parameter(grad=float("inf"))
    twin.scale(torch.ones((), requires_grad=True))
    twin.step(optimizer)
    twin.update()
    assert (twin.get_scale(), scaler.get_scale()) == (2.0, 4.0), "a twin lives its own life"


@BOTH
@pytest.mark.parametrize("twin_of", [lambda s: pickle.loads(pickle.dumps(s)), copy.deepcopy], ids=["pickle", "copy"])
def test_pickle_and_deepcopy_between_scale_and_step(cls, twin_of) -> None:
    """The twin is at the beginning of an iteration, and knows nothing of the original's losses."""
    scaler = cls("cpu", 4.0)
    param, optimizer = one_parameter()
    loss = scaler.scale(param.sum())
    twin = twin_of(scaler)
    assert twin.state_dict() == scaler.state_dict()
    assert cls is torch.amp.GradScaler or (twin._iteration.scale_calls, twin._iteration.norm) == (0, None)
    with pytest.raises(AssertionError, match="Attempted step but _scale is None"):
        twin.step(optimizer)
    loss.backward()
    scaler.step(optimizer)
    scaler.update()
    assert param.item() == 0.0


ENTRIES: dict[str, list[Any]] = {
    "'ampkit'": [None, [], "x", 3],
    "'scale'": [None, "8", [], True],
    "'growth_factor'": [None, "2"],
    "'growth_interval'": [2**63, 2.5, "5"],
    "'_growth_tracker'": [None, "3", float("inf"), float("nan"), -1, 2**31, 0.5],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in ENTRIES.items() for value in values])
@pytest.mark.parametrize("live", [False, True])
def test_a_bad_entry_is_named_and_nothing_is_loaded(key, value, live) -> None:
    scaler = started(GradScaler, 4.0) if live else GradScaler("cpu", 4.0)
    before = scaler.state_dict()
    saved = {**GradScaler("cpu", 8.0, 3.0, 0.25, 7).state_dict(), key.strip("'"): value}
    with pytest.raises((TypeError, ValueError), match=rf"the saved {key}|the saved {key[1:-1]}"):
        scaler.load_state_dict(saved)
    assert scaler.state_dict() == before
    assert scaler._init_scale == 4.0


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"counters": {"window_updates": "3"}}, "the saved window_updates of 'counters' is '3'; expected a number"),
        ({"counters": {"hysteresis_left": 2**31}}, "hysteresis_left of 'counters' is 2147483648; expected a whole"),
        ({"counters": {"flavour": 1}}, r"the saved 'counters' has unknown entries \['flavour'\]; expected"),
        ({"counters": None}, "the saved 'counters' is None; expected a dict"),
        ({"totals": {"skips": -1}}, "the saved skips of 'totals' is -1; expected a whole number from 0"),
        ({"totals": {"hops": 1}}, r"the saved 'totals' has unknown entries \['hops'\]"),
        ({"loss_scale": None}, "the saved 'loss_scale' is None; expected a dict"),
        ({"loss_scale": {"kind": "static"}}, r"the saved loss scale \(static\) lacks \['scale'\]"),
        ({"version": 2}, "the saved 'version' is 2; expected 1"),
        ({"flavour": 1}, r"the saved 'ampkit' has unknown entries \['flavour'\].*newer ampkit"),
    ],
)
def test_a_bad_entry_of_our_own_is_named(own, message) -> None:
    scaler = started(GradScaler, 4.0)
    saved = GradScaler("cpu", 8.0).state_dict()
    before = scaler.state_dict()
    with pytest.raises((TypeError, ValueError), match=message):
        scaler.load_state_dict({**saved, "ampkit": {**saved["ampkit"], **own}})
    assert scaler.state_dict() == before


@pytest.mark.parametrize("state", [None, [], 3, [("scale", 1.0)]])
def test_what_is_no_state_dict_is_refused(state) -> None:
    with pytest.raises(TypeError, match=r"the scaler's state dict is .*; expected a dict, as GradScaler.state_dict"):
        GradScaler("cpu").load_state_dict(state)


@BOTH
def test_private_names_that_need_no_scale_work_before_there_is_one(cls) -> None:
    scaler = cls("cpu", 4.0)
    param, optimizer = one_parameter(grad=8.0)
    sparse = torch.nn.Parameter(torch.zeros(2, 3))
    sparse.grad = torch.sparse_coo_tensor([[0, 1], [2, 0]], [4.0, float("inf")], (2, 3))
    optimizer.add_param_group({"params": [sparse]})
    found = scaler._unscale_grads_(optimizer, torch.tensor([0.5]), torch.tensor([0.0]), True)
    assert [flag.item() for flag in found.values()] == [1.0]
    assert param.grad.item() == 4.0
    assert sparse.grad._values().tolist() == [2.0, float("inf")]
    for flag, value in ((None, -3.0), (1.0, -3.0), (0.0, -7.0)):
        flags = {} if flag is None else {param.device: torch.tensor([flag])}
        sparse.grad = None
        assert scaler._maybe_opt_step(optimizer, {"found_inf_per_device": flags}) is None
        assert param.item() == value
    assert scaler._found_inf_per_device(optimizer) == {}
    assert (scaler._get_scale_async(), scaler._get_growth_tracker(), scaler.get_scale()) == (None, 0, 4.0)
    for call in (scaler._check_inf_per_device, scaler.unscale_, scaler.step):
        with pytest.raises(AssertionError, match="_scale is None"):
            call(optimizer)


def test_unscaling_with_a_process_group_before_anything_was_scaled() -> None:
    """As torch's test of its sharded scaler does it, with the process group that it uses."""
    common_fsdp = pytest.importorskip("torch.testing._internal.common_fsdp")
    scaler = GradScaler("cpu", 2.0, process_group=common_fsdp.DummyProcessGroup(0, 1))
    inv_scale, found_inf = torch.full((1,), 0.5), torch.zeros(1)
    values = torch.tensor([16.0, 32.0, 64.0])
    param = torch.sparse_coo_tensor([[0, 1, 1], [2, 0, 2]], values, (2, 3))
    param.grad = param.clone()
    optimizer = torch.optim.SGD([param], lr=1.0)
    assert scaler._unscale_grads_(optimizer, inv_scale, found_inf)[param.device] == 0.0
    assert torch.equal(param.grad.to_dense(), param.to_dense() / 2)
    param.grad = torch.sparse_coo_tensor([[0, 1, 1], [2, 0, 2]], values * float("inf"), (2, 3))
    assert scaler._unscale_grads_(optimizer, inv_scale, found_inf)[param.device] == 1.0


def test_losses_are_followed_whatever_they_hold() -> None:
    """One that holds several numbers, one that is 0 and one that needs no gradient; none of them is read."""
    scaler = GradScaler("cpu", 4.0)
    param, optimizer = one_parameter()
    losses = scaler.scale([param.expand(2), param.sum() * 0.0, torch.ones(2)])
    for loss in losses[:2]:
        loss.sum().backward()
    with count_reads() as reads:
        scaler.unscale_(optimizer)
    assert reads == []
    assert param.grad == 2.0


def test_reports_survive_reuse_of_a_twin() -> None:
    scaler = started(GradScaler, 4.0)
    _, optimizer = one_parameter(grad=float("inf"))
    scaler.step(optimizer)
    scaler.update()
    twin = copy.deepcopy(scaler)
    assert twin.stats() == scaler.stats()
    assert twin.overflow_report() == ()


# Gradients as torch takes them


@BOTH
def test_fp16_gradients_are_refused_untouched(cls) -> None:
    scaler = started(cls)
    a, _ = one_parameter(grad=8.0)
    b, _ = one_parameter(grad=8.0, dtype=torch.float16)
    optimizer = torch.optim.SGD([("body.weight", a), ("head.weight", b)], lr=1.0)
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients") as caught:
        scaler.unscale_(optimizer)
    assert (a.grad.item(), b.grad.item()) == (8.0, 8.0)
    assert scaler._per_optimizer_states[id(optimizer)]["stage"].name == "READY"
    if cls is GradScaler:
        assert "float16 gradients of head.weight;" in str(caught.value)
        with pytest.raises(ValueError, match="FP16 gradients"):
            scaler.clip_grad_norm_(optimizer, 1.0)
        assert a.grad.item() == 8.0


@BOTH
def test_inverse_scale_is_rounded_once_from_double(cls) -> None:
    scaler = started(cls, 3.0)
    param, optimizer = one_parameter(grad=1.0)
    scaler.unscale_(optimizer)
    assert param.grad.item() == torch.tensor(1.0 / 3.0, dtype=torch.float64).float().item()


@BOTH
def test_sparse_gradients_are_unscaled_in_place(cls) -> None:
    scaler = started(cls, 4.0)
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    scaler.scale(embedding(torch.tensor([1, 1, 3])).sum()).backward()
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    scaler.unscale_(optimizer)
    assert not embedding.weight.grad.is_coalesced()
    assert embedding.weight.grad.to_dense()[1].tolist() == [2.0, 2.0]


@BOTH
def test_version_counters_are_left_alone(cls) -> None:
    scaler = started(cls)
    param, optimizer = one_parameter(grad=1.0)
    version = param.grad._version
    scaler.unscale_(optimizer)
    assert param.grad._version == version


@BOTH
def test_gradients_broken_after_unscale_reach_the_parameters(cls) -> None:
    """The check looks once, at unscale_: what code does to gradients afterwards is its own business."""
    scaler = started(cls)
    param, optimizer = one_parameter(grad=1.0)
    scaler.unscale_(optimizer)
    param.grad.fill_(float("nan"))
    scaler.step(optimizer)
    assert param.isnan().all()


def test_ordered_and_custom_mappings_come_back_as_they_were() -> None:
    scaled = started(GradScaler, 2.0).scale(OrderedDict(loss=torch.ones((), requires_grad=True)))
    assert type(scaled) is OrderedDict
    assert scaled["loss"].item() == 2.0


# Several optimizers in one iteration


@BOTH
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_gradients_made_anew_between_two_steps_are_divided_anew(cls, set_to_none, fused) -> None:
    """A GAN without an update between its phases: the second optimizer's gradients are new, though shared."""
    shared = torch.nn.Parameter(torch.ones(2))
    optimizers = [torch.optim.SGD([shared], lr=0.5, fused=fused) for _ in range(2)]
    scaler = cls("cpu", 2.0**8)
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=set_to_none)
        scaler.scale(shared.sum()).backward()
        scaler.step(optimizer)
    scaler.update()
    assert shared.tolist() == [0.0, 0.0]


@BOTH
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("apart", [True, False])
def test_losses_scaled_ahead_of_both_steps(cls, apart, fused, set_to_none) -> None:
    shared = torch.nn.Parameter(torch.ones(2))
    optimizers = [torch.optim.SGD([shared], lr=0.5, fused=fused) for _ in range(2)]
    scaler = cls("cpu", 2.0**8)
    losses = [shared.sum(), shared.sum()]
    losses = [scaler.scale(loss) for loss in losses] if apart else scaler.scale(losses)
    for optimizer, loss in zip(optimizers, losses, strict=True):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss.backward()
        scaler.step(optimizer)
    assert shared.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("make", [functools.partial(torch.optim.SGD, fused=True), torch.optim.SGD, AdamW])
@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize("steps", [True, False])
@pytest.mark.parametrize("ahead", [True, False])
def test_a_loss_that_does_not_reach_a_shared_gradient_leaves_it_unscaled(make, clips, steps, ahead) -> None:
    shared, own = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    first, second = make([shared], lr=0.0), torch.optim.SGD([shared, own], lr=0.0)
    scaler = GradScaler("cpu", 2.0**8)
    losses = [lambda: scaler.scale(shared.sum()), lambda: scaler.scale(own.sum())]
    if ahead:
        losses = [lambda loss=loss: loss for loss in [loss() for loss in losses]]
    losses[0]().backward()
    scaler.clip_grad_norm_(first, 1e9) if clips else scaler.unscale_(first)
    if steps:
        scaler.step(first)
    losses[1]().backward()
    scaler.unscale_(second)
    assert (shared.grad.tolist(), own.grad.tolist()) == ([1.0, 1.0], [1.0, 1.0])


def test_shared_gradients_may_be_clipped_in_between() -> None:
    shared = torch.nn.Parameter(torch.ones(1))
    shared.grad = torch.tensor([64.0])
    optimizers = [torch.optim.SGD([shared], lr=1.0) for _ in range(3)]
    scaler = started(GradScaler, 4.0)
    assert scaler.clip_grad_norm_(optimizers[0], 8.0).item() == 16.0
    assert scaler.clip_grad_norm_(optimizers[1], 1e9).item() == pytest.approx(8.0, rel=1e-5)
    scaler.unscale_(optimizers[2])
    assert shared.grad.item() == pytest.approx(8.0, rel=1e-5)


def test_marks_on_gradients_keep_nothing_alive() -> None:
    import gc
    import weakref

    param, optimizer = one_parameter(grad=1.0)
    scaler = started()
    scaler.step(optimizer)
    scaler.update()
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    assert param.grad is not None


def test_a_scale_in_the_place_of_the_device_is_told_apart():
    """torch.cuda.amp.GradScaler took `init_scale` first."""
    with pytest.raises(TypeError, match=r"device is 65536.0; expected .* init_scale=65536.0: it comes second"):
        GradScaler(2.0**16)
