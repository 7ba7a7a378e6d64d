"""What initialize and scale_loss refuse, and overrides and optimizers that they take."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from ampkit import Policy, amp, optim
from ampkit.amp import initialize, loss_scalers, master_params
from ampkit.whole_model.fp16_optimizer import FP16Optimizer
from ampkit.whole_model.levels import LEVELS
from ampkit.whole_model.master_weights import MasterWeights
from tests.helpers.whole_model import Net, backward, batches, loss_of, make, overflowing, set_up, sgd, train

F16, SENSELESS, POSITIVE = torch.float16, "makes no sense at", "expected a positive number, or 'dynamic', which older"
BAD_OPTIONS: tuple[tuple[Any, dict[str, Any], type[Exception], str], ...] = (
    ("01", {}, ValueError, "unknown opt_level '01'; expected 'O0', 'O1', 'O2' or 'O3': did you mean 'O1', with the"),
    (1, {}, ValueError, "unknown opt_level 1; expected 'O0', 'O1', 'O2' or 'O3'"),
    ("O0", {"dtype": F16}, ValueError, r"dtype=torch.float16 makes no sense at O0 \(float32 .*'O1' or 'O2' or 'O3'"),
    ("O1", {"keep_batchnorm_fp32": True}, ValueError, f"keep_batchnorm_fp32=True {SENSELESS} O1 .* 'O2' or 'O3'"),
    ("O1", {"master_weights": True}, ValueError, f"master_weights=True {SENSELESS} O1"),
    ("O2", {"policy": Policy.default("cpu")}, ValueError, f"{SENSELESS} O2.*use opt_level 'O1'"),
    ("O1", {"dtype": torch.float64}, ValueError, "dtype is torch.float64; expected torch.float16 or torch.bfloat16"),
    ("O2", {"loss_scale": 0}, ValueError, POSITIVE),
    ("O2", {"loss_scale": float("nan")}, ValueError, POSITIVE),
    ("O2", {"loss_scale": "automatic"}, ValueError, f"loss_scale is 'automatic'; {POSITIVE}"),
    ("O2", {"loss_scale": True}, TypeError, "loss_scale is True; expected 'dynamic'"),
    ("O2", {"loss_scale": 128.0, "min_loss_scale": 1.0}, ValueError, "min_loss_scale=1.0 makes no sense beside the"),
    ("O2", {"num_losses": 0}, ValueError, "num_losses is 0; expected how many"),
    ("O2", {"keep_batchnorm_fp32": 1}, TypeError, "keep_batchnorm_fp32 is 1; expected True, False, 'True', 'False' or"),
    ("O2", {"master_weights": "True"}, TypeError, "master_weights is 'True'; expected True, False or None"),
    ("O2", {"keep_bn_fp32": True}, TypeError, "initialize got keep_bn_fp32; expected properties among dtype"),
    ("O2", {"cast_model_outputs": "half"}, TypeError, "cast_model_outputs is 'half'; expected None or a dtype"),
)


@pytest.mark.parametrize(("opt_level", "options", "error", "message"), BAD_OPTIONS, ids=str)
def test_options_that_make_no_sense(opt_level: Any, options: dict[str, Any], error: Any, message: str) -> None:
    model = make()
    with pytest.raises(error, match=message):
        set_up(opt_level, model, **options)
    assert type(model) is Net
    set_up("O0", model)      # nothing was changed


@pytest.mark.parametrize(("opt_level", "options"), [
    ("O0", {"loss_scale": "128.0", "master_weights": False}), ("O2", {"keep_batchnorm_fp32": False}),
    ("O2", {"master_weights": False}), ("O2", {"loss_scale": "dynamic", "min_loss_scale": 4.0}),
    ("O3", {"keep_batchnorm_fp32": "True", "master_weights": True, "loss_scale": "dynamic"}),
], ids=str)
def test_overrides_that_make_sense_train(opt_level: str, options: dict[str, Any]) -> None:
    model, optimizer = set_up(opt_level, dtype=None if opt_level == "O0" else torch.float16, **options)
    before = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, batches(1))
    assert not any(map(torch.equal, model.parameters(), before))
    kept = options.get("keep_batchnorm_fp32", opt_level != "O3") in (True, "True")
    assert (model.bn.running_mean.dtype is torch.float32) is kept


class Larc:
    """An optimizer around another, as Apex's LARC is: no `Optimizer`, and it shapes gradients before it steps."""

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
        assert all(master.dtype is torch.float32 for master in master_params(optimizer)) or opt_level == "O3"
        amp.load_state_dict(amp.state_dict(optimizer), optimizer)
        assert loss_scalers(optimizer)[0].stats().updates == 3
        runs.append(model.state_dict().values())
    assert all(map(torch.equal, *runs))


def test_models_and_optimizers_that_are_refused() -> None:
    masked, patched, done = make(), make(), set_up("O1")
    masked.register_buffer("mask", torch.zeros(2, dtype=torch.bfloat16))
    patched.forward = patched.forward  # type: ignore[method-assign]
    model, other = make(), make()
    with_masters, wrapped, larc = sgd(make()), FP16Optimizer(sgd(nn.Linear(2, 2).half())), Larc(sgd(model))
    MasterWeights(with_masters)
    larc.optim = None
    shared, with_remainders = [sgd(model), sgd(model)], optim.AdamW(other.parameters(), masters="remainder")
    plain = torch.optim.SGD(model.head.parameters(), lr=0.1)        # some of its parameters
    for arguments, error, message in (
        (("resnet50",), TypeError, "models holds a str; expected a torch.nn.Module, or a list of them"),
        ((make().half(),), RuntimeError, "parameter conv.weight is torch.float16; expected a float32 model.*half"),
        ((make().double(), None, "O0"), RuntimeError, "parameter conv.weight is torch.float64"),
        ((masked,), RuntimeError, "buffer mask is torch.bfloat16"),
        ((nn.DataParallel(make()),), RuntimeError, "wrapped in DataParallel already; call amp.initialize on the bare"),
        (([model, model],), ValueError, "models holds one object twice"),
        ((patched,), RuntimeError, "given a forward of its own"),
        ((done[0],), RuntimeError, "this Net has been through ampkit.half or amp.initialize already"),
        ((model, done[1]), RuntimeError, "this SGD has been through initialize already; call it once"),
        ((model, "sgd"), TypeError, "optimizers holds a str; expected a torch.optim.Optimizer"),
        ((model, larc), TypeError, "holds a Larc; expected .* an object that holds one as `optim`"),
        ((other, sgd(model)), RuntimeError, "SGD holds no parameter of the models given; make the optimizer from the"),
        ((other, wrapped), RuntimeError, "has master weights already; pass initialize a bare optimizer"),
        ((other, with_masters), RuntimeError, "has master weights already"),
        (([model, other], [plain, with_remainders], "O2"), ValueError, "AdamW has masters='remainder', which makes"),
        ((model, shared, "O1"), RuntimeError, "parameter conv.weight is in two optimizers; give it to one"),
    ):
        with pytest.raises(error, match=message):
            initialize(*arguments)
    assert {p.dtype for p in (*model.parameters(), *other.parameters())} == {torch.float32}
    initialize([model, other], [plain, sgd(other)], "O2", verbosity=0)      # nothing had changed


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


def test_saved_scales_load_all_or_none() -> None:
    _model, optimizer = set_up("O2", dtype=torch.float16, num_losses=2)
    before = amp.state_dict(optimizer)
    other = copy.deepcopy(before)
    other["loss_scaler0"]["scaler"]["scale"] = 8.0
    for bad in (None, {}, {"scaler": None}, {"loss_scale": 8.0, "unskipped": "2"}):
        with pytest.raises((TypeError, RuntimeError), match=r"expected|source state dict is empty"):
            amp.load_state_dict({**other, "loss_scaler1": bad}, optimizer)
        assert amp.state_dict(optimizer) == before
    amp.load_state_dict(other, optimizer)
    assert loss_scalers(optimizer)[0].get_scale() == 8.0


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
    with pytest.raises(RuntimeError, match="got a closure, whose backward is not seen here"):
        optimizer.step(lambda: None)
    optimizer.step()
    with pytest.raises(TypeError, match="scale_loss takes the loss tensor that backward is called on, got float"):
        backward(1.0, optimizer)  # type: ignore[arg-type]
    with pytest.raises(IndexError, match="loss_id is 1, and there are scales for 1 losses; expected 0 to 0: pass num"):
        backward(loss_of(model), optimizer, loss_id=1)
    model, optimizer = set_up("O0")     # which steps on anything
    optimizer.step()
    loss_of(model).backward()
    optimizer.step()


def test_delayed_gradients_meet_no_other_scale() -> None:
    """Nor their own where it has moved since: by the overflow of another optimizer under the same loss id."""
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
    optimizer.zero_grad()       # gives the accumulation up
    backward(loss_of(models[0]), optimizer, loss_id=1)
    optimizer.step()
    optimizer.zero_grad()
    backward(loss_of(models[0]), optimizer, delay_unscale=True)
    backward(overflowing(models[1]), other)
    with pytest.raises(RuntimeError, match="waiting under another loss scale"):
        backward(loss_of(models[0]), optimizer)
