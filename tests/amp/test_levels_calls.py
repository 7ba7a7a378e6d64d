"""initialize and its kin: the arguments, models and optimizers that they take or refuse, checkpoints, several calls."""

import copy
import gc
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from ampkit import Policy, amp, optim
from ampkit.amp import frontend, initialize, loss_scalers, master_params, scale_loss
from ampkit.amp.fp16_optimizer import FP16Optimizer
from ampkit.amp.levels import LEVELS
from ampkit.half_precision.master_weights import MasterWeights
from tests.helpers.half_models import Net, backward, batches, both_dtypes, loss_of, make, set_up, sgd, train


@pytest.fixture(autouse=True)
def _forget_other_tests() -> None:
    """`amp.state_dict()` means the only `initialize` in memory."""
    frontend._sessions.clear()


def test_options_that_make_no_sense() -> None:
    model, senseless, positive = make(), "makes no sense at", "expected a positive number, 'dynamic', or a strategy"
    for opt_level, options, error, message in (
        ("01", {}, ValueError, "unknown opt_level '01'; expected 'O0', 'O1', 'O2' or 'O3', with the letter O"),
        (True, {}, ValueError, "unknown opt_level True; expected 'O0', 'O1', 'O2' or 'O3'"),
        ("O0", {"dtype": torch.float16}, ValueError, r"dtype=torch.float16 makes no sense at O0 \(float32 .*'O1' or"),
        ("O1", {"keep_batchnorm_fp32": True}, ValueError, f"keep_batchnorm_fp32=True {senseless} O1 .* 'O2' or 'O3'"),
        ("O1", {"master_weights": True}, ValueError, f"master_weights=True {senseless} O1"),
        ("O2", {"policy": Policy.default("cpu")}, ValueError, f"{senseless} O2.*use opt_level 'O1'"),
        ("O1", {"dtype": torch.float64}, ValueError, "dtype is torch.float64; expected torch.float16 or torch"),
        ("O2", {"loss_scale": 0}, ValueError, positive),
        ("O2", {"loss_scale": float("nan")}, ValueError, positive),
        ("O2", {"loss_scale": "automatic"}, ValueError, f"loss_scale is 'automatic'; {positive}"),
        ("O2", {"loss_scale": True}, ValueError, f"loss_scale is True; {positive}"),
        ("O2", {"loss_scale": [1.0]}, ValueError, rf"loss_scale is \[1.0\]; {positive}"),
        ("O2", {"loss_scale": 128.0, "min_loss_scale": 1.0}, ValueError, "min_loss_scale=1.0 makes no sense with"),
        ("O2", {"patch_torch_functions": True}, ValueError, f"patch_torch_functions=True {senseless} O2.*level 'O1'"),
        ("O1", {"patch_torch_functions": "True"}, TypeError, "patch_torch_functions is 'True'; expected True, False"),
        ("O1", {"cast_model_type": torch.float16}, ValueError, f"cast_model_type=torch.float16 {senseless} O1"),
        ("O2", {"cast_model_type": torch.float64}, ValueError, "cast_model_type is torch.float64; expected"),
        ("O2", {"cast_model_type": "fp16", "dtype": "bf16"}, ValueError, "are one property; leave one out"),
        ("O2", {"num_losses": 0}, ValueError, "num_losses is 0; expected the number of losses"),
        ("O2", {"keep_batchnorm_fp32": 1}, TypeError, "keep_batchnorm_fp32 is 1; expected True, False or"),
        ("O2", {"keep_batchnorm_fp32": "True"}, TypeError, "keep_batchnorm_fp32 is 'True'; expected True, False or"),
        ("O1", {"buffers": "all"}, ValueError, f"buffers=all {senseless} O1.*'O2' or 'O3'"),
        ("O2", {"buffers": "some"}, ValueError, "buffers is 'some'; expected 'exact', 'all' or 'none'"),
        ("O2", {"master_weights": "True"}, TypeError, "master_weights is 'True'; expected True, False or None"),
        ("O2", {"keep_bn_fp32": True}, TypeError, "initialize got keep_bn_fp32; expected properties among dtype"),
        ("O2", {"cast_model_outputs": "half"}, TypeError, "cast_model_outputs is 'half'; expected None or a dtype"),
    ):
        with pytest.raises(error, match=message):
            set_up(opt_level, model, **options)
    assert type(model) is Net
    set_up("O0", model)  # nothing was changed


@pytest.mark.parametrize(
    ("opt_level", "options"),
    [
        ("O0", {"loss_scale": "128.0", "master_weights": False}),
        ("O2", {"keep_batchnorm_fp32": False}),
        ("O2", {"master_weights": False}),
        ("O2", {"loss_scale": "dynamic", "min_loss_scale": 4.0}),
        ("O3", {"keep_batchnorm_fp32": True, "master_weights": True, "loss_scale": "dynamic"}),
    ],
    ids=str,
)
def test_overrides_that_make_sense_train(opt_level: str, options: dict[str, Any]) -> None:
    model, optimizer = set_up(opt_level, dtype=None if opt_level == "O0" else torch.float16, **options)
    before = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, batches(1))
    pairs = zip(model.named_parameters(), before, strict=True)
    assert not [name for (name, param), old in pairs if torch.equal(param, old)]
    kept = options.get("keep_batchnorm_fp32", opt_level != "O3")
    assert (model.bn.running_mean.dtype is torch.float32) is kept


CASTS: dict[str, tuple[str, dict[str, Any], torch.dtype, torch.dtype, bool]] = {
    # level, Apex's overrides, dtype of weights, dtype that the first layer meets, scaled
    "O0, half": ("O0", {"cast_model_type": torch.float16}, torch.float16, torch.float16, False),
    "O0, float32": (
        "O0",
        {"cast_model_type": torch.float32, "patch_torch_functions": False},
        torch.float32,
        torch.float32,
        False,
    ),
    "O0, False": ("O0", {"cast_model_type": False}, torch.float32, torch.float64, False),
    "O1": ("O1", {"cast_model_type": False, "patch_torch_functions": True}, torch.float32, torch.float64, True),
    "O1, float32": ("O1", {"cast_model_type": torch.float32}, torch.float32, torch.float32, True),
    "O1, not patched": ("O1", {"patch_torch_functions": False}, torch.float32, torch.float64, True),
    "O2, half": ("O2", {"cast_model_type": "fp16", "patch_torch_functions": False}, torch.float16, torch.float16, True),
    "O2, bfloat16": ("O2", {"cast_model_type": torch.bfloat16}, torch.bfloat16, torch.bfloat16, True),
    "O2, float32": ("O2", {"cast_model_type": torch.float32}, torch.float32, torch.float32, True),
    "O3, half": ("O3", {"cast_model_type": torch.float16}, torch.float16, torch.float16, True),
    "O3, False": ("O3", {"cast_model_type": False, "master_weights": True}, torch.float32, torch.float64, True),
}


@pytest.mark.parametrize("case", CASTS)
def test_what_is_cast_as_apex_says_it(case: str) -> None:
    """With all of its properties given by name; and the model trains."""
    opt_level, overrides, weights, inputs, scaled = CASTS[case]
    rest = dict.fromkeys(
        (
            "keep_batchnorm_fp32",
            "master_weights",
            "loss_scale",
            "cast_model_outputs",
            "min_loss_scale",
            "cast_model_type",
            "patch_torch_functions",
        )
    )
    model, optimizer = set_up(
        opt_level, **{**rest, "num_losses": 1, "max_loss_scale": 2.0**24, "enabled": True, **overrides}
    )
    assert model.conv.weight.dtype is weights
    assert model.bn.weight.dtype is (torch.float32 if opt_level == "O2" else weights)
    kept = weights is torch.float32 or opt_level == "O2"
    assert {p.dtype for p in master_params(optimizer)} == {torch.float32 if kept else weights}
    assert len(loss_scalers(optimizer)) == scaled
    seen: list[torch.Tensor] = []

    class Conv(nn.Conv2d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            seen.extend((input, output := super().forward(input.to(self.weight.dtype))))
            return output

    model.conv.__class__ = Conv
    in_region = opt_level == "O1" and overrides.get("patch_torch_functions") is not False
    assert model(batches(1)[0][0].double()).dtype is torch.float32
    assert seen[0].dtype is inputs
    assert seen[1].dtype is (torch.get_autocast_dtype("cpu") if in_region else weights)
    before = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, batches(2))
    pairs = zip(model.named_parameters(), before, strict=True)
    assert not [name for (name, param), old in pairs if torch.equal(param, old)]


@pytest.mark.parametrize(
    ("opt_level", "override"),
    [
        ("O1", {"patch_torch_functions": False}),
        ("O2", {"cast_model_type": False}),
        ("O3", {"cast_model_type": False}),
    ],
)
def test_a_level_without_its_casts_trains_in_float32_to_the_bit(opt_level: str, override: dict[str, Any]) -> None:
    runs = [set_up("O0"), set_up(opt_level, loss_scale=128.0, **override)]
    losses = [train(model, optimizer, batches(3)) for model, optimizer in runs]
    torch.testing.assert_close(*losses, rtol=0, atol=0)
    torch.testing.assert_close(*[list(model.parameters()) for model, _ in runs], rtol=0, atol=0)


class Larc:
    """A wrapper of an optimizer like Apex's LARC: not an `Optimizer`, and it changes gradients before it steps."""

    def __init__(self, optim: Any) -> None:
        self.optim, self.param_groups, self.zero_grad = optim, optim.param_groups, optim.zero_grad

    def step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.grad.mul_(0.5)
        self.optim.step()


@pytest.mark.parametrize("opt_level", LEVELS)
def test_an_optimizer_around_another_is_taken(opt_level: str) -> None:
    """Same weights as with the inner one at half the rate; saved states and masters are reached through it too."""
    runs = []
    for wrap, lr in ((Larc, 0.25), (lambda optimizer: optimizer, 0.125)):
        optimizer = wrap(torch.optim.SGD((model := make()).parameters(), lr=lr))
        model, returned = initialize(model, optimizer, opt_level, loss_scale=128.0, verbosity=0)
        assert returned is optimizer
        train(model, optimizer, batches(3))
        assert opt_level == "O3" or {master.dtype for master in master_params(optimizer)} == {torch.float32}
        amp.load_state_dict(amp.state_dict(optimizer), optimizer)
        assert loss_scalers(optimizer)[0].stats().updates == 3
        runs.append(model.state_dict().values())
    torch.testing.assert_close(*map(list, runs), rtol=0, atol=0)


def test_models_and_optimizers_that_are_refused() -> None:
    masked, patched, done = make(), make(), set_up("O1")
    masked.register_buffer("mask", torch.zeros(2, dtype=torch.bfloat16))
    patched.forward = patched.forward  # type: ignore[method-assign]
    model, other = make(), make()
    with_masters, wrapped, larc = sgd(make()), FP16Optimizer(sgd(nn.Linear(2, 2).half())), Larc(sgd(model))
    MasterWeights(with_masters)
    larc.optim = None
    shared, with_remainders = [sgd(model), sgd(model)], optim.AdamW(other.parameters(), masters="remainder")
    plain, on_patched = torch.optim.SGD(model.head.parameters(), lr=0.1), sgd(patched)  # the first of some parameters
    for arguments, error, message in (
        (("resnet50",), TypeError, "models holds a str; expected a torch.nn.Module, or a list of them"),
        ((make().half(),), RuntimeError, "parameter conv.weight is torch.float16; expected a float32 model.*half"),
        ((make().double(), None, "O0"), RuntimeError, "parameter conv.weight is torch.float64"),
        ((masked,), RuntimeError, "buffer mask is torch.bfloat16"),
        ((nn.DataParallel(make()),), RuntimeError, "wrapped in DataParallel already; call amp.initialize on the bare"),
        (([model, model],), ValueError, "models holds one object twice"),
        ((patched, on_patched), RuntimeError, "the forward of this Net was replaced on the instance"),
        ((done[0],), RuntimeError, "this Net has been converted by ampkit.half or amp.initialize already"),
        ((model, done[1]), RuntimeError, "this SGD has been through initialize already; call it once"),
        ((model, "sgd"), TypeError, "optimizers holds a str; expected a torch.optim.Optimizer"),
        ((model, larc), TypeError, "holds a Larc; expected .* an object that holds one as `optim`"),
        ((other, sgd(model)), RuntimeError, "SGD holds no parameter of these models; make the optimizer from the"),
        ((other, wrapped), RuntimeError, "has master weights already; pass initialize a bare optimizer"),
        ((other, with_masters), RuntimeError, "has master weights already"),
        (([model, other], [plain, with_remainders], "O2"), ValueError, "AdamW has masters='remainder', which stores"),
        ((model, shared, "O1"), RuntimeError, "parameter conv.weight is in two optimizers; give it to one"),
    ):
        with pytest.raises(error, match=message):
            initialize(*arguments)
    assert {p.dtype for p in (*model.parameters(), *other.parameters())} == {torch.float32}
    del patched.forward
    initialize([model, other, patched], [plain, sgd(other), on_patched], "O2", verbosity=0)  # nothing had changed


def test_a_16_bit_parameter_outside_the_models_gets_a_master_from_its_own_value() -> None:
    """Beside the model's, which start from float32."""
    model, extra = nn.Linear(4, 4), nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer, before = sgd(model), model.weight.detach().clone()
    optimizer.add_param_group({"params": [extra], "lr": 2.0**-10, "momentum": 0.0})
    initialize(model, optimizer, "O2", dtype=torch.bfloat16, verbosity=0)
    weight, _, master = master_params(optimizer)
    assert torch.equal(weight, before)
    assert model.weight.dtype is torch.bfloat16
    backward((model(torch.ones(1, 4)) * extra).sum() * 0.0 + extra.sum(), optimizer)
    optimizer.step()
    assert master.tolist() == [1.0 - 2.0**-10] * 4
    assert extra.tolist() == [1.0] * 4


def test_calls_out_of_order_are_refused() -> None:
    with pytest.raises(RuntimeError, match="SGD has not been through initialize"):
        backward(torch.ones(()), sgd(make()))
    with pytest.raises(RuntimeError, match="no optimizer has been through initialize; call it first"):
        amp.state_dict()
    model, optimizer = set_up("O2", dtype=torch.float16)
    with pytest.raises(RuntimeError, match=r"SGD.step\(\) without a backward since the last step; call"):
        optimizer.step()
    loss_of(model).backward()
    with pytest.raises(RuntimeError, match=r"SGD.step\(\) on gradients of another backward; call backward inside"):
        optimizer.step()
    optimizer.zero_grad()
    backward(loss_of(model), optimizer, delay_unscale=True)
    with pytest.raises(RuntimeError, match=r"gradients of a delayed backward are still scaled"):
        optimizer.step()
    backward(loss_of(model), optimizer)
    with pytest.raises(
        RuntimeError, match="got a closure, whose gradients would not reach the float32 masters or be unscaled"
    ):
        optimizer.step(lambda: None)
    optimizer.step()
    with pytest.raises(TypeError, match="scale_loss takes the loss tensor that backward is called on, got float"):
        backward(1.0, optimizer)  # type: ignore[arg-type]
    with pytest.raises(IndexError, match="loss_id is 1; expected 0 to 0, or pass num_losses to initialize, which is 1"):
        backward(loss_of(model), optimizer, loss_id=1)
    model, optimizer = set_up("O0")  # which steps on anything
    optimizer.step()
    loss_of(model).backward()
    optimizer.step()


def test_delayed_gradients_meet_no_other_scale() -> None:
    """Nor the same scale after it has changed: by the overflow of another optimizer with the same loss id."""
    models, (optimizer, other) = set_up(
        "O1", [make(0), make(1)], lambda models: list(map(sgd, models)), dtype=torch.float16, num_losses=2
    )
    backward(loss_of(models[0]), optimizer, delay_unscale=True)
    with pytest.raises(RuntimeError, match="waiting under another loss scale; end the accumulation with the same loss"):
        backward(loss_of(models[0]), optimizer, loss_id=1)
    backward(loss_of(models[0]), optimizer)
    with pytest.raises(RuntimeError, match="delay_unscale=True after a backward whose gradients are unscaled already"):
        backward(loss_of(models[0]), optimizer, delay_unscale=True)
    optimizer.step()
    optimizer.zero_grad()
    backward(loss_of(models[0]), optimizer, delay_unscale=True)
    optimizer.zero_grad()  # gives the accumulation up
    backward(loss_of(models[0]), optimizer, loss_id=1)
    optimizer.step()
    optimizer.zero_grad()
    backward(loss_of(models[0]), optimizer, delay_unscale=True)
    backward(loss_of(models[1]) * 1e30, other)
    with pytest.raises(RuntimeError, match="waiting under another loss scale"):
        backward(loss_of(models[0]), optimizer)


@both_dtypes
@pytest.mark.parametrize("opt_level", LEVELS)
def test_checkpoints_are_float32_and_resume_to_the_bit(opt_level: str, dtype: torch.dtype) -> None:
    data = batches(8)

    def start() -> tuple[nn.Module, torch.optim.Optimizer]:
        return set_up(
            opt_level,
            optimizer_of=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4),
            dtype=None if opt_level == "O0" else dtype,
        )

    straight, first, second = start(), start(), start()
    train(*straight, data)
    train(*first, data[:4])
    file = io.BytesIO()
    torch.save([*(part.state_dict() for part in first), amp.state_dict(first[1])], file)
    file.seek(0)
    saved_model, saved_optimizer, saved_scales = torch.load(file)
    assert {t.dtype for t in saved_model.values() if t.is_floating_point()} == {torch.float32}
    assert list(saved_model) == list(make().state_dict())
    make().load_state_dict(saved_model)
    model, optimizer = second
    model.load_state_dict(saved_model)
    optimizer.load_state_dict(saved_optimizer)
    amp.load_state_dict(saved_scales, optimizer)
    train(model, optimizer, data[4:])
    torch.testing.assert_close([*master_params(optimizer)], [*master_params(straight[1])], rtol=0, atol=0)
    torch.testing.assert_close([*model.parameters()], [*straight[0].parameters()], rtol=0, atol=0)


def test_a_wrapper_saves_and_loads_the_masters_too_and_copies_hold_none() -> None:
    """DDP adds a prefix; nn.Sequential stands for it here."""
    model, optimizer = set_up("O2", dtype=torch.bfloat16)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    saved = nn.Sequential(model).state_dict()
    assert saved["0.head.weight"].dtype is torch.float32
    assert model.state_dict(keep_vars=True)["head.weight"] is model.head.weight
    changed = {name: torch.full_like(t, 1.0 + 2.0**-20) if t.ndim else t for name, t in saved.items()}
    nn.Sequential(model).load_state_dict(changed)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, batches(1))  # nothing rounds the masters on the way
    assert set(model.head.weight.flatten().tolist()) == {1.0}
    assert {value for p in master_params(optimizer) for value in p.flatten().tolist()} == {1.0 + 2.0**-20}
    for copied in copies:
        assert torch.equal(copied.state_dict()["head.weight"], copied.head.weight.float())


@pytest.mark.parametrize("opt_level", ["O2", "O3"])
def test_tied_weights_stay_one_tensor(opt_level: str) -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    model, optimizer = set_up(opt_level, model, dtype=torch.bfloat16)
    assert model[1].weight is model[0].weight
    assert len(list(master_params(optimizer))) == 1
    saved = model.state_dict()
    assert saved["0.weight"].data_ptr() == saved["1.weight"].data_ptr()
    assert model(torch.arange(5)).dtype is torch.float32


def test_scales_travel_in_apexs_form_and_more_and_load_all_or_none() -> None:
    def scales(optimizer: Any = None) -> list[tuple[float, int]]:
        return [(saved["loss_scale"], saved["unskipped"]) for saved in amp.state_dict(optimizer).values()]

    model, optimizer = set_up("O1", dtype=torch.float16, num_losses=2)
    backward(loss_of(model) * 1e30, optimizer, loss_id=1)
    optimizer.step()
    saved = amp.state_dict()
    assert list(saved) == ["loss_scaler0", "loss_scaler1"]
    assert scales() == [(2.0**16, 0), (2.0**15, 0)]
    _, optimizer = set_up("O1", dtype=torch.float16, num_losses=2)
    amp.load_state_dict(saved, optimizer)
    assert [scaler.get_scale() for scaler in loss_scalers(optimizer)] == [2.0**16, 2.0**15]
    apex = {"loss_scaler0": {"loss_scale": 512.0, "unskipped": 7}, "loss_scaler1": {"loss_scale": 4.0, "unskipped": 0}}
    amp.load_state_dict(apex, optimizer)
    assert scales(optimizer) == [(512.0, 7), (4.0, 0)]
    before = amp.state_dict(optimizer)
    for bad in (None, {}, {"scaler": None}, {"loss_scale": 8.0, "unskipped": "2"}):
        with pytest.raises((TypeError, RuntimeError), match=r"expected|source state dict is empty"):
            amp.load_state_dict({**saved, "loss_scaler1": bad}, optimizer)
        assert amp.state_dict(optimizer) == before
    with pytest.raises(ValueError, match=r"saved scales are \['loss_scaler0'\], this script's \['loss_scaler0', 'loss"):
        amp.load_state_dict({"loss_scaler0": saved["loss_scaler0"]}, optimizer)


def test_disabled_is_as_if_ampkit_were_not_there() -> None:
    """And inference needs no optimizer."""
    model = make()
    optimizer = sgd(model)
    assert initialize(model, optimizer, "O2", enabled=False) == (model, optimizer)
    assert type(model) is Net
    loss = loss_of(model)
    with scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
        scaled.backward()
    optimizer.step()
    assert amp.state_dict() == {}
    amp.load_state_dict({})
    for opt_level in LEVELS:
        models = initialize([make(), model] if opt_level == "O3" else [make()], opt_level=opt_level, verbosity=0)
        assert [loss_of(net).dtype for net in models] == [torch.float32] * len(models)


def test_two_calls_are_distinguished() -> None:
    _, first = set_up("O1", dtype=torch.float16)
    _, second = set_up("O2", dtype=torch.float16, loss_scale=8.0)
    with pytest.raises(RuntimeError, match="initialize has been called 2 times; pass an optimizer of the call"):
        amp.state_dict()
    assert amp.state_dict(second)["loss_scaler0"]["loss_scale"] == 8.0
    with pytest.raises(RuntimeError, match="belong to 2 calls of initialize"):
        backward(torch.ones(()), [first, second])
    del second
    gc.collect()
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**16


@pytest.mark.parametrize("level", ["O0", "O1", "O3"])
def test_state_dict_of_torchs_distributed_checkpoint(level: str) -> None:
    """It creates an optimizer's state by a step on zeros with a learning rate of 0, without a backward."""
    model, optimizer = set_up(level, optimizer_of=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2))
    before = [param.clone() for param in model.parameters()]
    state = get_optimizer_state_dict(model, optimizer)
    assert set(state["state"]) == {name for name, _ in model.named_parameters()}
    assert optimizer.param_groups[0]["lr"] == 1e-2
    torch.testing.assert_close([*model.parameters()], [*before], rtol=0, atol=0)
    set_optimizer_state_dict(model, optimizer, state)
    train(model, optimizer, batches(1))
    pairs = zip(model.named_parameters(), before, strict=True)
    assert not [name for (name, param), old in pairs if torch.equal(param, old)]
