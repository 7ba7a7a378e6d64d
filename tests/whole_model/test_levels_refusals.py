"""What initialize and scale_loss refuse."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampkit import Policy, amp, record_casts
from ampkit.amp import (
    initialize,
    loss_scalers,
    master_params,
)
from ampkit.whole_model.fp16_optimizer import FP16Optimizer
from ampkit.whole_model.levels import LEVELS
from ampkit.whole_model.master_weights import MasterWeights
from tests.helpers.levels import (
    Net,
    backward,
    batches,
    make,
    overflowing,
    set_up,
    sgd,
    train,
)


@pytest.mark.parametrize(
    ("opt_level", "match"),
    [
        ("01", r"unknown opt_level '01'; expected 'O0', 'O1', 'O2' or 'O3': did you mean 'O1', with the letter O"),
        ("o2", r"did you mean 'O2'"),
        ("00", r"did you mean 'O0'"),
        (1, r"unknown opt_level 1; expected 'O0', 'O1', 'O2' or 'O3'"),
        ("O4", r"unknown opt_level 'O4'; expected 'O0', 'O1', 'O2' or 'O3'$"),
        (None, r"unknown opt_level None"),
    ],
)
def test_unknown_levels(opt_level: object, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        initialize(make(), opt_level=opt_level)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("opt_level", "options", "match"),
    [
        ("O0", {"dtype": torch.float16}, "dtype=torch.float16 makes no sense at O0, which computes in float32"),
        ("O0", {"cast_model_type": torch.float16}, "at O0, which leaves the weights in float32"),
        ("O1", {"cast_model_type": torch.bfloat16}, "at O1, which leaves the weights in float32.* at O1 pass dtype"),
        ("O2", {"cast_model_type": torch.float32}, r"O2 converts the model.*use opt_level 'O0'"),
        ("O2", {"dtype": torch.float16, "cast_model_type": torch.bfloat16}, "two names of one property; pass one"),
        ("O1", {"dtype": torch.float64}, r"expected torch.float16 or torch.bfloat16"),
        ("O2", {"patch_torch_functions": True}, "patch_torch_functions=True makes no sense at O2.*opt_level 'O1'"),
        ("O1", {"patch_torch_functions": False}, "patch_torch_functions=False makes no sense at O1.*opt_level 'O0'"),
        ("O1", {"keep_batchnorm_fp32": True}, "keep_batchnorm_fp32=True makes no sense at O1.*'O2' or 'O3'"),
        ("O0", {"keep_batchnorm_fp32": "False"}, "makes no sense at O0"),
        ("O1", {"master_weights": True}, "master_weights=True makes no sense at O1.*use opt_level 'O2'"),
        ("O2", {"loss_scale": 0}, "expected a positive number, or 'dynamic', which older scripts write as 0"),
        ("O2", {"loss_scale": -2.0}, "expected a positive number"),
        ("O2", {"loss_scale": float("nan")}, "expected a positive number"),
        ("O2", {"loss_scale": "automatic"}, "loss_scale is 'automatic'; expected 'dynamic' or a number"),
        ("O2", {"loss_scale": 128.0, "min_loss_scale": 1.0}, "min_loss_scale=1.0 makes no sense beside the static"),
        ("O2", {"num_losses": 0}, "num_losses is 0; expected how many"),
        ("O2", {"num_losses": True}, "num_losses is True"),
        ("O2", {"policy": Policy.default("cpu")}, "makes no sense at O2.*use opt_level 'O1'"),
    ],
    ids=str,
)
def test_overrides_that_make_no_sense(opt_level: str, options: dict[str, object], match: str) -> None:
    model = make()
    with pytest.raises(ValueError, match=match):
        initialize(model, sgd(model), opt_level, **options)  # type: ignore[arg-type]
    assert type(model) is Net
    initialize(model, sgd(model), "O0", verbosity=0)      # nothing was changed


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"keep_batchnorm_fp32": 1}, "keep_batchnorm_fp32 is 1; expected True, False, 'True', 'False' or None"),
        ({"keep_batchnorm_fp32": "yes"}, "keep_batchnorm_fp32 is 'yes'"),
        ({"master_weights": "True"}, "master_weights is 'True'; expected True, False or None"),
        ({"loss_scale": True}, "loss_scale is True; expected 'dynamic'"),
        ({"keep_bn_fp32": True}, "initialize got keep_bn_fp32; expected properties among dtype, cast_model_type, "),
        ({"cast_model_outputs": "half"}, "cast_model_outputs is 'half'; expected None or a dtype"),
    ],
    ids=str,
)
def test_overrides_of_wrong_types(options: dict[str, object], match: str) -> None:
    with pytest.raises(TypeError, match=match):
        initialize(make(), opt_level="O2", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("opt_level", "options"),
    [
        ("O3", {"keep_batchnorm_fp32": "True"}),
        ("O2", {"keep_batchnorm_fp32": False}),
        ("O3", {"master_weights": True}),
        ("O2", {"master_weights": False}),
        ("O0", {"loss_scale": "128.0"}),
        ("O3", {"loss_scale": "dynamic"}),
        ("O1", {"cast_model_type": False}),
        ("O1", {"patch_torch_functions": True}),
        ("O0", {"master_weights": False}),
        ("O2", {"cast_model_type": torch.bfloat16, "loss_scale": "dynamic", "min_loss_scale": 4.0}),
    ],
    ids=str,
)
def test_overrides_that_make_sense_train(opt_level: str, options: dict[str, object]) -> None:
    low = {} if opt_level == "O0" or "cast_model_type" in options else {"dtype": torch.float16}
    model, optimizer = set_up(opt_level, **low, **options)
    before = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, batches(1))
    assert not any(map(torch.equal, model.parameters(), before))
    kept = options.get("keep_batchnorm_fp32", opt_level != "O3") in (True, "True")
    assert (model.bn.running_mean.dtype is torch.float32) is kept


def test_models_that_are_refused() -> None:
    with pytest.raises(TypeError, match=r"models holds a str; expected a torch.nn.Module, or a list of them"):
        initialize("resnet50")
    with pytest.raises(RuntimeError, match=r"parameter conv.weight is torch.float16; expected a float32 model.*half"):
        initialize(make().half())
    with pytest.raises(RuntimeError, match=r"parameter conv.weight is torch.float64"):
        initialize(make().double(), opt_level="O0")
    model = make()
    model.register_buffer("mask", torch.zeros(2, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match=r"buffer mask is torch.bfloat16"):
        initialize(model)
    with pytest.raises(RuntimeError, match=r"wrapped in DataParallel already; call amp.initialize on the bare"):
        initialize(nn.DataParallel(make()))
    model = make()
    with pytest.raises(ValueError, match="models holds one object twice"):
        initialize([model, model])
    model.forward = model.forward  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="given a forward of its own"):
        initialize(model)


@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_float64_buffer_makes_no_float64_model(opt_level: str) -> None:
    """It stays where weights stay float32, and goes with the model where that is converted."""
    model = make()
    model.register_buffer("table", torch.arange(3, dtype=torch.float64))
    model, optimizer = set_up(opt_level, model)
    converted = opt_level in ("O2", "O3")
    assert model.table.dtype is (torch.bfloat16 if converted else torch.float64)
    train(model, optimizer, batches(1))


class Larc:
    """An optimizer around another, as Apex's LARC is: no `Optimizer`, and it shapes gradients before it steps."""

    def __init__(self, optim: torch.optim.Optimizer) -> None:
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
        model = make()
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=lr))
        model, returned = initialize(model, optimizer, opt_level, loss_scale=128.0, verbosity=0)
        assert returned is optimizer
        train(model, optimizer, batches(3))
        assert all(master.dtype is torch.float32 for master in master_params(optimizer)) or opt_level == "O3"
        amp.load_state_dict(amp.state_dict(optimizer), optimizer)
        assert loss_scalers(optimizer)[0].stats().updates == 3
        runs.append(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(*(run.values() for run in runs), strict=True))


def test_a_rule_for_a_module_is_about_the_copy_in_a_copied_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    policy = Policy.default("cpu").for_modules(model, {model[1]: torch.float16})
    model, _ = set_up("O1", model, policy=policy, cast_model_outputs=torch.float64)
    copied = copy.deepcopy(model)
    del model, policy, _
    gc.collect()
    with record_casts() as record:
        copied(torch.ones(2, 4))
    assert [call.computed_in for call in record.calls] == [(torch.bfloat16,) * 3, (torch.float16,) * 3]


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


def test_initialize_twice_is_refused() -> None:
    model, optimizer = set_up("O1")
    with pytest.raises(RuntimeError, match=r"this Net has been through ampkit.half or amp.initialize already"):
        initialize(model)
    with pytest.raises(RuntimeError, match="this SGD has been through initialize already; call it once"):
        initialize(make(), optimizer)


def test_optimizers_that_are_refused() -> None:
    model = make()
    with pytest.raises(TypeError, match=r"optimizers holds a str; expected a torch.optim.Optimizer"):
        initialize(model, "sgd")
    larc = Larc(sgd(model))
    larc.optim = None
    with pytest.raises(TypeError, match=r"holds a Larc; expected .* an object that holds one as `optim`"):
        initialize(model, larc)
    with pytest.raises(RuntimeError, match="SGD holds no parameter of the models given; make the optimizer from the"):
        initialize(model, sgd(make(1)))
    initialize(model, torch.optim.SGD(model.head.parameters(), lr=0.1), "O2", verbosity=0)
    half = nn.Linear(2, 2).half()
    other = make()
    wrapped = FP16Optimizer(sgd(half))
    with pytest.raises(RuntimeError, match="has master weights already; pass initialize a bare optimizer"):
        initialize(other, wrapped)
    optimizer = sgd(make())
    MasterWeights(optimizer)
    with pytest.raises(RuntimeError, match="has master weights already"):
        initialize(other, optimizer)


def test_calls_out_of_order_are_refused() -> None:
    model = make()
    optimizer = sgd(model)
    (x, y), = batches(1)
    with pytest.raises(RuntimeError, match="SGD has not been through initialize"):
        backward(torch.ones(()), optimizer)
    with pytest.raises(RuntimeError, match="no optimizer has been through initialize; call it first"):
        amp.state_dict()
    model, optimizer = initialize(model, optimizer, "O2", dtype=torch.float16, verbosity=0)
    with pytest.raises(RuntimeError, match=r"SGD.step\(\) without a backward since the last step; call"):
        optimizer.step()
    model(x).sum().backward()
    with pytest.raises(RuntimeError, match=r"SGD.step\(\) on gradients that did not come through scale_loss"):
        optimizer.step()
    optimizer.zero_grad()
    backward(F.cross_entropy(model(x), y), optimizer, delay_unscale=True)
    with pytest.raises(RuntimeError, match=r"with delay_unscale=True are still scaled"):
        optimizer.step()
    backward(F.cross_entropy(model(x), y), optimizer)
    with pytest.raises(RuntimeError, match="got a closure, whose backward the level cannot see"):
        optimizer.step(lambda: None)
    optimizer.step()
    with pytest.raises(TypeError, match="scale_loss takes the loss tensor that backward is called on, got float"):
        backward(1.0, optimizer)  # type: ignore[arg-type]
    with pytest.raises(IndexError, match="loss_id is 1, and there are scales for 1 losses; expected 0 to 0: pass num"):
        backward(F.cross_entropy(model(x), y), optimizer, loss_id=1)


def test_delayed_gradients_meet_no_other_scale() -> None:
    model, optimizer = set_up("O1", dtype=torch.float16, num_losses=2)
    (x, y), = batches(1)

    def loss() -> Tensor:
        return F.cross_entropy(model(x), y)

    backward(loss(), optimizer, loss_id=0, delay_unscale=True)
    with pytest.raises(RuntimeError, match="waiting under another loss scale; end the accumulation with the same loss"):
        backward(loss(), optimizer, loss_id=1)
    backward(loss(), optimizer, loss_id=0)
    with pytest.raises(RuntimeError, match="delay_unscale=True after a backward whose gradients are unscaled already"):
        backward(loss(), optimizer, loss_id=0, delay_unscale=True)
    optimizer.step()
    optimizer.zero_grad()
    backward(loss(), optimizer, loss_id=0, delay_unscale=True)
    optimizer.zero_grad()       # gives the accumulation up
    backward(loss(), optimizer, loss_id=1)
    optimizer.step()


def test_delayed_gradients_meet_no_scale_that_has_moved_since() -> None:
    """Two optimizers under one loss id: the other's overflow has halved the scale."""
    first, second = make(0), make(1)
    models, optimizers = initialize([first, second], [sgd(first), sgd(second)], dtype=torch.float16, verbosity=0)
    (x, y), = batches(1)
    backward(F.cross_entropy(models[0](x), y), optimizers[0], delay_unscale=True)
    backward(overflowing(models[1], x, y), optimizers[1])
    with pytest.raises(RuntimeError, match="waiting under another loss scale; end the accumulation with the same loss"):
        backward(F.cross_entropy(models[0](x), y), optimizers[0])


def test_a_parameter_of_two_optimizers_is_refused_where_each_would_have_a_master() -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    with pytest.raises(RuntimeError, match=r"parameter weight is in two optimizers.*'O1'"):
        initialize(model, optimizers, "O2", dtype=torch.bfloat16, verbosity=0)
    assert model.weight.dtype is torch.float32


@pytest.mark.parametrize("second_call", [[1], [0, 1]])
def test_delayed_gradients_of_a_shared_parameter_are_scaled_for_both_or_neither(second_call: list[int]) -> None:
    """A second optimizer would set the scaled gradient aside as if it were unscaled, and add to it."""
    model = nn.Linear(2, 1, bias=False)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    initialize(model, optimizers, "O1", dtype=torch.bfloat16, loss_scale=8.0, verbosity=0)
    backward(model(torch.ones(1, 2)).sum(), optimizers[0], delay_unscale=True)
    with pytest.raises(RuntimeError, match="shares parameters with an optimizer whose gradients are still scaled"):
        backward(model(torch.ones(1, 2)).sum(), [optimizers[i] for i in second_call])
    optimizers[0].zero_grad()
    backward(model(torch.ones(1, 2)).sum(), optimizers, delay_unscale=True)
    with pytest.raises(RuntimeError, match="shares parameters with an optimizer whose gradients are still scaled"):
        backward(model(torch.ones(1, 2)).sum(), optimizers[0])
    backward(model(torch.ones(1, 2)).sum(), optimizers)
    assert model.weight.grad.tolist() == [[2.0, 2.0]]
