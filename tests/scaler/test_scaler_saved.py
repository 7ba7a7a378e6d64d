"""The scaler's state: checkpoints, pickles, and what is refused of both."""

import copy
import math
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ampkit.scaler.grad_scaler import GradScaler
from ampkit.scaler.loss_scale import DynamicLossScale, StaticLossScale
from tests.helpers.scaler_tools import BOTH, count_reads, one_parameter, started

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


def test_the_state_survives_a_weights_only_checkpoint(tmp_path) -> None:
    saved = started().state_dict()
    torch.save(saved, tmp_path / "scaler.pt")
    assert torch.load(tmp_path / "scaler.pt", weights_only=True) == saved


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("strategy", [DynamicLossScale(hysteresis=3, tolerance=0.1), StaticLossScale(64.0)])
def test_a_distributed_checkpoint_brings_every_count_to_a_fresh_scaler(tmp_path, strategy) -> None:
    """It loads the entries that it finds in the scaler to load, so those are there before anything has happened."""
    used, fresh = GradScaler("cpu", loss_scale=strategy), GradScaler("cpu", loss_scale=strategy)
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=0.1)
    for factor in (1.0, math.inf, math.inf, 1.0):
        optimizer.zero_grad()
        used.scale((param * factor).sum()).backward()
        used.step(optimizer)
        used.update()
    assert used.stats().skips == 2
    dcp.save({"scaler": used}, checkpoint_id=tmp_path / "run")
    dcp.load({"scaler": fresh}, checkpoint_id=tmp_path / "run")
    assert fresh.state_dict() == used.state_dict()
    assert fresh.stats() == used.stats()


@BOTH
@pytest.mark.parametrize("copied", [lambda s: pickle.loads(pickle.dumps(s)), copy.deepcopy], ids=["pickle", "copy"])
def test_pickle_and_deepcopy(cls, copied) -> None:
    lazy = copied(cls("cpu", 4.0))
    assert lazy.get_scale() == 4.0
    scaler = started(cls, 4.0)
    _, optimizer = one_parameter(grad=1.0)
    scaler.step(optimizer)
    with pytest.raises(AssertionError, match="may only be pickled at the beginning of an iteration, or at the end"):
        copied(scaler)
    scaler.update()
    again = copied(scaler)
    assert again.state_dict() == scaler.state_dict()
    _, optimizer = one_parameter(grad=float("inf"))
    again.scale(torch.ones((), requires_grad=True))
    again.step(optimizer)
    again.update()
    assert (again.get_scale(), scaler.get_scale()) == (2.0, 4.0), "the two are independent"


@BOTH
@pytest.mark.parametrize("copied", [lambda s: pickle.loads(pickle.dumps(s)), copy.deepcopy], ids=["pickle", "copy"])
def test_pickle_and_deepcopy_between_scale_and_step(cls, copied) -> None:
    """The copy is at the beginning of an iteration, and knows nothing of the original's losses."""
    scaler = cls("cpu", 4.0)
    param, optimizer = one_parameter()
    loss = scaler.scale(param.sum())
    again = copied(scaler)
    assert again.state_dict() == scaler.state_dict()
    assert cls is torch.amp.GradScaler or (again._scale_calls, again._largest_norm) == (0, None)
    with pytest.raises(AssertionError, match="Attempted step but _scale is None"):
        again.step(optimizer)
    loss.backward()
    scaler.step(optimizer)
    scaler.update()
    assert param.item() == 0.0


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
        ({"loss_scale": {"kind": "static"}}, r"the saved loss scale \(static\) has the fields \[\]; expected"),
        ({"version": 2}, "the saved 'version' is 2; expected 1"),
        ({"ampkit": []}, r"the saved 'ampkit' is \[\]; expected a dict"),
        ({"scale": "8"}, "the saved scale is '8'; expected a number"),
        ({"scale": math.inf}, "the saved scale is inf; expected a positive finite number"),
        ({"growth_interval": 2.5}, "growth_interval is 2.5; expected a whole number"),
        ({"_growth_tracker": 2**31}, "the saved _growth_tracker is 2147483648; expected a whole number from 0"),
        ({"flavour": 1}, r"the saved 'ampkit' has unknown entries \['flavour'\].*newer ampkit"),
    ],
)
def test_a_bad_entry_is_named(own, message) -> None:
    scaler = started(GradScaler, 4.0)
    saved = GradScaler("cpu", 8.0).state_dict()
    before = scaler.state_dict()
    theirs = {name: own.pop(name) for name in list(own) if name in saved}
    with pytest.raises((TypeError, ValueError), match=message):
        scaler.load_state_dict({**saved, "ampkit": {**saved["ampkit"], **own}, **theirs})
    assert scaler.state_dict() == before


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


@pytest.mark.parametrize("kind", [torch.Tensor, torch.nn.Parameter])
def test_unscaled_gradients_survive_a_weights_only_checkpoint(kind, tmp_path) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = kind(torch.full((3,), 4.0))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(1, requires_grad=True))
    scaler.unscale_(optimizer)
    torch.save(weight.grad, tmp_path / "gradient.pt")
    assert torch.load(tmp_path / "gradient.pt", weights_only=True).tolist() == [2.0] * 3
