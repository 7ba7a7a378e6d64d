"""Levels and checkpoints, and more than one call of initialize."""

import copy
import gc
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from ampkit import amp
from ampkit.amp import initialize, loss_scalers, master_params, scale_loss
from ampkit.whole_model.levels import LEVELS
from tests.helpers.whole_model import backward, batches, both_dtypes, loss_of, make, overflowing, set_up, sgd, train


@both_dtypes
@pytest.mark.parametrize("opt_level", LEVELS)
def test_checkpoints_are_float32_and_resume_to_the_bit(opt_level: str, dtype: torch.dtype) -> None:
    data = batches(8)

    def start() -> tuple[nn.Module, torch.optim.Optimizer]:
        return set_up(
            opt_level, optimizer_of=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4),
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
    assert all(map(torch.equal, master_params(optimizer), master_params(straight[1])))
    assert all(map(torch.equal, model.parameters(), straight[0].parameters()))


def test_a_wrapper_saves_and_loads_the_masters_too_and_copies_hold_none() -> None:
    """DDP adds a prefix; nn.Sequential stands for it here."""
    model, optimizer = set_up("O2", dtype=torch.bfloat16)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    saved = nn.Sequential(model).state_dict()
    assert saved["0.head.weight"].dtype is torch.float32
    assert model.state_dict(keep_vars=True)["head.weight"] is model.head.weight
    other = {name: torch.full_like(t, 1.0 + 2.0**-20) if t.ndim else t for name, t in saved.items()}
    nn.Sequential(model).load_state_dict(other)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, batches(1))     # nothing rounds the masters on the way
    assert bool((model.head.weight == 1.0).all())
    assert all(bool((p == 1.0 + 2.0**-20).all()) for p in master_params(optimizer))
    for copied in copies:
        assert torch.equal(copied.state_dict()["head.weight"], copied.head.weight.float())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.out = nn.Linear(3, 5, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.embed(ids))


@pytest.mark.parametrize("opt_level", ["O2", "O3"])
def test_tied_weights_stay_one_tensor(opt_level: str) -> None:
    model, optimizer = set_up(opt_level, Tied(), dtype=torch.bfloat16)
    assert model.out.weight is model.embed.weight
    assert len(list(master_params(optimizer))) == 1
    saved = model.state_dict()
    assert saved["embed.weight"].data_ptr() == saved["out.weight"].data_ptr()
    assert model(torch.arange(5)).dtype is torch.float32


def test_scales_travel_in_apexs_form_and_more() -> None:
    def scales(optimizer: Any = None) -> list[tuple[float, int]]:
        return [(one["loss_scale"], one["unskipped"]) for one in amp.state_dict(optimizer).values()]

    model, optimizer = set_up("O1", dtype=torch.float16, num_losses=2)
    backward(overflowing(model), optimizer, loss_id=1)
    optimizer.step()
    saved = amp.state_dict()
    assert list(saved) == ["loss_scaler0", "loss_scaler1"]
    assert scales() == [(2.0**16, 0), (2.0**15, 0)]
    _, optimizer = set_up("O1", dtype=torch.float16, num_losses=2)
    amp.load_state_dict(saved, optimizer)
    assert [one.get_scale() for one in loss_scalers(optimizer)] == [2.0**16, 2.0**15]
    apex = {"loss_scaler0": {"loss_scale": 512.0, "unskipped": 7}, "loss_scaler1": {"loss_scale": 4.0, "unskipped": 0}}
    amp.load_state_dict(apex, optimizer)
    assert scales(optimizer) == [(512.0, 7), (4.0, 0)]
    with pytest.raises(ValueError, match=r"saved scales are \['loss_scaler0'\], this script's \['loss_scaler0', 'loss"):
        amp.load_state_dict({"loss_scaler0": apex["loss_scaler0"]}, optimizer)


def test_disabled_is_as_if_ampkit_were_not_there() -> None:
    """And inference needs no optimizer."""
    model = make()
    optimizer = sgd(model)
    assert initialize(model, optimizer, "O2", enabled=False) == (model, optimizer)
    assert type(model) is type(make())
    loss = loss_of(model)
    with scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
        scaled.backward()
    optimizer.step()
    assert amp.state_dict() == {}
    amp.load_state_dict({})
    for opt_level in LEVELS:
        models = initialize([make(), model] if opt_level == "O3" else [make()], opt_level=opt_level, verbosity=0)
        assert [loss_of(each).dtype for each in models] == [torch.float32] * len(models)


def test_two_calls_are_distinguished() -> None:
    _, first = set_up("O1", dtype=torch.float16)
    _, second = set_up("O2", dtype=torch.float16, loss_scale=8.0)
    with pytest.raises(RuntimeError, match="initialize has been called 2 times; pass an optimizer"):
        amp.state_dict()
    assert amp.state_dict(second)["loss_scaler0"]["loss_scale"] == 8.0
    with pytest.raises(RuntimeError, match="come from 2 calls of initialize"):
        backward(torch.ones(()), [first, second])
    del second
    gc.collect()
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**16


@pytest.mark.parametrize("level", ["O0", "O1", "O3"])
def test_state_dict_of_torchs_distributed_checkpoint(level: str) -> None:
    """It makes an optimizer's state by a step on zeros at a learning rate of 0, which no backward precedes."""
    model, optimizer = set_up(level, optimizer_of=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2))
    before = [param.clone() for param in model.parameters()]
    state = get_optimizer_state_dict(model, optimizer)
    assert set(state["state"]) == {name for name, _ in model.named_parameters()}
    assert optimizer.param_groups[0]["lr"] == 1e-2
    assert all(map(torch.equal, model.parameters(), before))
    set_optimizer_state_dict(model, optimizer, state)
    train(model, optimizer, batches(1))
    assert not any(map(torch.equal, model.parameters(), before))
