"""`LoadPlanner`: checkpoints of torch's classes load into ampkit's, and whatever else is missing raises."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ampkit
import ampkit.optim
from tests.helpers.equal import assert_equal

if not dist.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from ampkit.integrations.checkpoint import LoadPlanner

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # of no_dist

OPTIMIZERS: dict[str, Any] = {
    "torch": lambda params: torch.optim.AdamW(params, lr=0.1),
    "ampkit": lambda params: ampkit.optim.AdamW(params, lr=0.1),
    "stochastic": lambda params: ampkit.optim.AdamW(params, lr=0.1, rounding="stochastic"),
    "remainder": lambda params: ampkit.optim.AdamW(params, lr=0.1, masters="remainder"),
    "both": lambda params: ampkit.optim.AdamW(params, lr=0.1, masters="remainder", rounding="stochastic"),
}


class Training:
    """A model, an optimizer and a scaler as one object for DCP, after `steps` steps."""

    def __init__(self, optimizer: str, scaler: Any, steps: int, *, flat: bool = False) -> None:
        self.model = nn.Linear(4, 3).bfloat16()
        self.optimizer, self.scaler = OPTIMIZERS[optimizer](self.model.parameters()), scaler
        self.options = StateDictOptions(flatten_optimizer_state_dict=flat)
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(torch.randn(2, 4, dtype=torch.bfloat16)).float().square().sum()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self.options)
        return {"model": model, "optimizer": optimizer, "scaler": self.scaler.state_dict()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        model, optimizer = saved["model"], saved["optimizer"]
        set_state_dict(
            self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=self.options
        )
        self.scaler.load_state_dict(saved["scaler"])


def load(into: Any, folder: Path, **options: Any) -> None:
    dcp.load({"run": into}, checkpoint_id=folder, no_dist=True, **options)


def torchs_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=8.0, growth_factor=4.0, growth_interval=3)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("into", ["ampkit", "stochastic", "remainder", "both"])
def test_a_checkpoint_of_torchs_scaler_and_optimizer(tmp_path: Path, into: str, flat: bool) -> None:
    old = Training("torch", torchs_scaler(), steps=4, flat=flat)
    dcp.save({"run": old}, checkpoint_id=tmp_path, no_dist=True)
    new = Training(into, ampkit.GradScaler("cpu"), steps=6, flat=flat)
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict"):
        load(new, tmp_path)
    load(new, tmp_path, planner=LoadPlanner())

    assert_equal(new.model.state_dict(), old.model.state_dict())
    as_loaded = ampkit.GradScaler("cpu")
    as_loaded.load_state_dict(old.scaler.state_dict())
    assert new.scaler.state_dict() == as_loaded.state_dict(), "as load_state_dict of torch's dict"
    assert new.scaler.get_scale() == 32.0
    assert new.scaler.stats().steps == 0
    for param, before in zip(new.model.parameters(), old.model.parameters(), strict=True):
        for name in ("step", "exp_avg", "exp_avg_sq"):
            got, expected = new.optimizer.state[param][name], old.optimizer.state[before][name]
            assert torch.equal(got.float(), expected.float()), name
    if new.optimizer.has_remainders:
        masters = new.optimizer.masters()
        assert all(torch.equal(masters[param], param.float()) for param in new.model.parameters())
    new.step()
    assert new.scaler.stepped(new.optimizer)


@pytest.mark.parametrize("flat", [False, True])
def test_between_stochastic_rounding_and_remainders(tmp_path: Path, flat: bool) -> None:
    for first, then in (("stochastic", "remainder"), ("remainder", "stochastic"), ("remainder", "both")):
        old = Training(first, ampkit.GradScaler("cpu"), steps=4, flat=flat)
        folder = tmp_path / f"{first} to {then}"
        dcp.save({"run": old}, checkpoint_id=folder, no_dist=True)
        new = Training(then, ampkit.GradScaler("cpu"), steps=6, flat=flat)
        with pytest.raises(CheckpointException, match="Missing key"):
            load(new, folder)
        load(new, folder, planner=LoadPlanner())
        assert_equal(new.model.state_dict(), old.model.state_dict())
        assert new.scaler.state_dict() == old.scaler.state_dict()
        masters = [*old.optimizer.masters().values()] if first == "remainder" and new.optimizer.has_remainders else None
        if new.optimizer.has_remainders:
            expected = masters or [param.float() for param in new.model.parameters()]
            assert_equal([*new.optimizer.masters().values()], expected)
        new.step()


def test_back_to_torch_needs_no_planner(tmp_path: Path) -> None:
    old = Training("remainder", ampkit.GradScaler("cpu", init_scale=4.0), steps=3)
    dcp.save({"run": old}, checkpoint_id=tmp_path, no_dist=True)
    new = Training("torch", torchs_scaler(), steps=0)
    load(new, tmp_path)
    assert_equal(new.model.state_dict(), old.model.state_dict())
    assert new.scaler.get_scale() == 4.0
    new.step()


STRATEGIES = (ampkit.DynamicLossScale(8.0, growth_interval=3), ampkit.StaticLossScale(4.0), ampkit.NoOpLossScale())


@pytest.mark.parametrize("saved", STRATEGIES, ids=lambda strategy: strategy.kind)
@pytest.mark.parametrize("own", STRATEGIES, ids=lambda strategy: strategy.kind)
def test_another_strategy_loads_as_load_state_dict_does(tmp_path: Path, saved: Any, own: Any) -> None:
    old = Training("ampkit", ampkit.GradScaler("cpu", loss_scale=saved), steps=4)
    dcp.save({"run": old}, checkpoint_id=tmp_path, no_dist=True)
    new = Training("ampkit", ampkit.GradScaler("cpu", loss_scale=own), steps=2)
    expected = ampkit.GradScaler("cpu", loss_scale=own)
    warns = pytest.warns(UserWarning, match="this scaler keeps") if own.kind != saved.kind else contextlib.nullcontext()
    with warns:
        expected.load_state_dict(old.scaler.state_dict())
    with warns:
        load(new, tmp_path, planner=LoadPlanner())
    assert new.scaler.state_dict() == expected.state_dict()
    assert new.scaler.loss_scale == expected.loss_scale


@pytest.mark.parametrize("optimizer", ["ampkit", "stochastic", "remainder"])
def test_a_checkpoint_of_a_run_that_has_only_skipped_loads(tmp_path: Path, optimizer: str) -> None:
    """The optimizer's state is in it, with 0 steps: DCP would leave it out, or step to make it."""
    old = Training(optimizer, ampkit.GradScaler("cpu"), steps=0)
    old.scaler.scale(old.model(torch.full((2, 4), torch.inf, dtype=torch.bfloat16)).float().sum()).backward()
    old.scaler.step(old.optimizer)
    old.scaler.update()
    dcp.save({"run": old}, checkpoint_id=tmp_path, no_dist=True)
    new = Training(optimizer, ampkit.GradScaler("cpu"), steps=0)
    load(new, tmp_path)
    assert new.scaler.stats().skips == 1
    assert [state["step"].item() for state in new.optimizer.state.values()] == [0.0, 0.0]


class Missing:
    """A state without some entries, by their names in the flat form."""

    def __init__(self, of: Training, *names: str) -> None:
        self.of, self.names = of, names

    def state_dict(self) -> dict[str, Any]:
        state = self.of.state_dict()
        for name in self.names:
            *path, last = name.split("/")
            at = state
            for key in path:
                at = at[key]
            del at[last]
        return state

    def load_state_dict(self, saved: dict[str, Any]) -> None: ...


@pytest.mark.parametrize(
    "name",
    [
        "model/weight",
        "optimizer/state/weight/exp_avg",
        "optimizer/state/weight/remainder",  # that of the bias is there
        "optimizer/state/bias/stream",
        "optimizer/param_groups",
        "scaler/_growth_tracker",
        "scaler/ampkit/totals/steps",
        "scaler/ampkit/loss_scale",
        "scaler/ampkit/counters",
    ],
)
def test_what_else_is_missing_raises(tmp_path: Path, name: str) -> None:
    old = Training("both", ampkit.GradScaler("cpu"), steps=2)
    if name == "scaler/ampkit/totals/steps":
        name = f"scaler/ampkit/totals/{min(old.scaler.state_dict()['ampkit']['totals'])}"
    dcp.save({"run": Missing(old, name)}, checkpoint_id=tmp_path, no_dist=True)
    new = Training("both", ampkit.GradScaler("cpu"), steps=1)
    with pytest.raises(CheckpointException, match=f"Missing key in checkpoint state_dict: run.{name.split('/')[0]}"):
        load(new, tmp_path, planner=LoadPlanner())


@pytest.mark.parametrize(
    "state",
    [
        {"layer.remainder": torch.ones(2)},
        {"state": {"layer": {"remainder": torch.ones(2)}}},
        {"state.layer.remainder": torch.ones(2)},
        {"remainder": torch.ones(2)},
        {"ampkit": {"loss_scale": 1}},
    ],
)
def test_what_is_no_state_of_an_optimizer_or_scaler_may_not_be_absent(tmp_path: Path, state: dict[str, Any]) -> None:
    dcp.save({"other": torch.ones(1)}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(CheckpointException, match="Missing key"):
        dcp.load(state, checkpoint_id=tmp_path, planner=LoadPlanner(), no_dist=True)
