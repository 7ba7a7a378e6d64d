"""What version 0.1 wrote still loads: the files in `fixtures` are its own."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import ampkit
from ampkit import DynamicLossScale, FP16Optimizer, GradScaler, Policy, Rule, amp, autocast
from ampkit.scaler.history import ScalerStats
from ampkit.whole_model._level_options import resolve

FIXTURES = Path(__file__).parents[1] / "fixtures"
RULE = DynamicLossScale(
    init_scale=2.0**12, growth_interval=3, min_scale=2.0, max_scale=2.0**14, hysteresis=2, hysteresis_refill="clean",
    tolerance=0.25,
)
STATS = ScalerStats(
    scale=4096.0, updates=8, steps=5, skips=3, overflows=3, consecutive_skips=2, growths=1, backoffs=1, inf_values=30
)


@pytest.fixture
def saved() -> dict[str, Any]:
    """State dicts, as plain values and tensors."""
    return torch.load(FIXTURES / "checkpoint.pt", weights_only=True)


@pytest.fixture
def objects() -> dict[str, Any]:
    """Pickled objects."""
    return pickle.loads((FIXTURES / "objects.pickle").read_bytes())


def one_step(scaler: GradScaler) -> None:
    param = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([param], lr=0.5)
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert param.item() == 0.5


def test_scaler_state(saved) -> None:
    scaler = GradScaler("cpu", loss_scale=DynamicLossScale(tolerance=0.5))
    scaler.load_state_dict(saved["scaler"])
    assert scaler.loss_scale == RULE
    assert scaler.stats() == STATS
    assert scaler.state_dict() == saved["scaler"]
    one_step(scaler)
    assert scaler.stats().updates == 9


def test_pickled_scalers(objects) -> None:
    scaler = objects["scaler"]
    assert type(scaler) is GradScaler
    assert scaler.loss_scale == RULE
    assert scaler.stats() == objects["stats"] == STATS
    assert (scaler.on_stuck, scaler.count_every_step, scaler.allow_fp16) == ("raise", True, True)
    for _ in range(9):
        one_step(scaler)
    assert len(scaler.history) == 7
    assert objects["fresh"].get_scale() == 8.0
    one_step(objects["fresh"])
    assert not objects["disabled"].is_enabled()
    one_step(objects["disabled"])
    assert objects["level_scaler"].stats().updates == 2
    one_step(objects["level_scaler"])


def test_levels(saved, objects) -> None:
    assert objects["options"] == resolve("O2", torch.float16, num_losses=2)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    model, optimizer = amp.initialize(model, optimizer, "O2", dtype=torch.float16, num_losses=2, verbosity=0)
    model.load_state_dict(saved["level_model"])
    optimizer.load_state_dict(saved["level_optimizer"])
    ampkit.amp.load_state_dict(saved["amp"], optimizer)
    assert ampkit.amp.state_dict(optimizer) == saved["amp"]
    assert all(torch.equal(value, saved["level_model"][name]) for name, value in model.state_dict().items())


def test_fp16_optimizer(saved) -> None:
    model = torch.nn.Linear(4, 2).half()
    optimizer = FP16Optimizer(torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5), dynamic_loss_scale=True)
    optimizer.load_state_dict(saved["fp16_optimizer"])
    assert optimizer.loss_scale == 2.0**10
    again, before = optimizer.state_dict(), saved["fp16_optimizer"]
    assert again["loss_scaler"] == before["loss_scaler"]
    for ours, theirs in zip(again["fp32_from_fp16"][0], before["fp32_from_fp16"][0], strict=True):
        assert torch.equal(ours, theirs)
    assert all(torch.equal(value, saved["fp16_model"][name]) for name, value in model.state_dict().items())


def test_pickled_models_and_optimizers(objects) -> None:
    assert objects["half"](torch.ones(2, 4)).dtype is torch.bfloat16
    assert objects["half"][1].running_var.dtype is torch.float32
    optimizer = objects["adamw"]
    (param,) = optimizer.param_groups[0]["params"]
    assert optimizer.state[param]["step"] == 1
    param.grad = torch.ones(2)
    optimizer.step()
    assert optimizer.state[param]["step"] == 2


def test_pickled_models_with_a_region_around_forward() -> None:
    models = pickle.loads((FIXTURES / "models.pickle").read_bytes())
    assert models["wrapped"](torch.ones(2, 4)).dtype is torch.bfloat16
    assert models["level"](torch.ones(2, 4)).dtype is torch.float32
    assert models["policy"] == ampkit.Policy.default("cpu")
    for model in (models["wrapped"], models["level"]):
        again = pickle.loads(pickle.dumps(model))
        assert torch.equal(again(torch.ones(2, 4)), model(torch.ones(2, 4)))
    with pytest.raises(RuntimeError, match="is wrapped already"):
        ampkit.wrap_forward(models["wrapped"], "cpu", torch.bfloat16)


def test_pickled_policies_and_regions() -> None:
    """`fixtures/regions.pickle`: under the names that their modules had then."""
    found = pickle.loads((FIXTURES / "regions.pickle").read_bytes())
    policy = Policy.default("cpu").with_rules({"aten::mm": Rule.FLOAT32})
    policy = policy.for_modules({"0": "bfloat16", torch.nn.Linear: Policy.torch("cpu")})
    assert found["policy"] == policy
    assert found["cache"].max_bytes == 2**20
    assert found["rule"] is Rule.PROMOTE
    assert [call.rule for call in found["record"].calls] == [Rule.LOWER]
    assert repr(found["region"]) == repr(autocast("cpu", torch.float16, policy=policy))
    assert found["float32_region"].fast_dtype is torch.float32
    x = torch.ones(2, 2)
    assert found["wrapped"](x).dtype is torch.bfloat16
    with found["region"]:
        assert torch.bmm(x[None], x[None]).dtype is torch.float16
        assert not torch.is_autocast_cache_enabled()
    again = pickle.loads(pickle.dumps(found))
    assert repr(again["region"]) == repr(found["region"])
    assert again["wrapped"](x).dtype is torch.bfloat16
