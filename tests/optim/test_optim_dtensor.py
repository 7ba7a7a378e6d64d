"""DTensor parameters: ampkit.optim updates this rank's shard, with torch.optim's results and state."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ampkit.optim import SGD, AdamW
from tests.helpers.ranks import on_ranks


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A mesh of this process alone: the placements are real, the shards are whole."""
    if dist.is_initialized():
        pytest.skip("another test left a process group open")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_fsdp_writes_to_no_weight_between_steps(mesh: DeviceMesh) -> None:
    """Or each step would drop remainders."""
    models = [torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)).bfloat16() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for layer in models[0]:
        fully_shard(layer, mesh=mesh)
    fully_shard(models[0], mesh=mesh)
    found = []
    for model in models:
        optimizer = AdamW(model.parameters(), lr=1e-3, masters="remainder")
        for i in range(4):
            model(torch.full((2, 4), i + 1.0).bfloat16()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([getattr(master, "_local_tensor", master) for master in optimizer.masters().values()])
    assert all(map(torch.equal, *found))


def fsdp_checkpoint(rank: int, world: int, full: bool) -> None:
    """A state that leaves one optimizer and enters another, with every remainder and stream."""
    mesh = init_device_mesh("cpu", (world,))
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 3)).bfloat16()
    fully_shard(model, mesh=mesh)
    optimizers = [
        AdamW(model.parameters(), masters="remainder", rounding="stochastic", seed=seed, lr=0.0, weight_decay=0.0)
        for seed in (0, 1)
    ]
    wide = [torch.randn(param.shape) for param in model.parameters()]
    optimizers[0].set_masters({
        param: distribute_tensor(value, mesh, param.placements)
        for param, value in zip(model.parameters(), wide, strict=True)
    })
    options = StateDictOptions(full_state_dict=full)
    state = get_optimizer_state_dict(model, optimizers[0], options=options)
    set_optimizer_state_dict(model, optimizers[1], state, options=options)
    for param, value in zip(model.parameters(), wide, strict=True):
        assert torch.equal(optimizers[1].masters()[param].full_tensor(), value)
        assert torch.equal(*(optimizer.state[param]["stream"] for optimizer in optimizers))
    model(torch.ones(2, 5).bfloat16()).sum().backward()
    optimizers[1].step()
    masters = optimizers[1].masters()
    assert all(torch.equal(masters[p].full_tensor(), value) for p, value in zip(model.parameters(), wide, strict=True))


@pytest.mark.parametrize("full", [True, False])
def test_checkpoints_of_fsdp_have_remainders_and_streams(full: bool) -> None:
    on_ranks(fsdp_checkpoint, full)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("cls", [AdamW, SGD])
def test_shards_of_bfloat16_step_as_plain_weights_do(mesh: DeviceMesh, cls: type, impl: str) -> None:
    """With remainders, stochastic state, masters given and taken, a state that is loaded and a write from outside."""
    whole = torch.randn(6, 4)
    weights = [distribute_tensor(whole.bfloat16(), mesh, [Shard(0)]), whole.bfloat16()]
    options = {"rounding": "stochastic", "masters": "remainder", "state_dtype": torch.bfloat16}
    found, optimizers = [], []
    for weight in weights:
        param = torch.nn.Parameter(weight)
        optimizer = cls([param], lr=0.1, impl=impl, **options)
        optimizers.append(optimizer)
        masters = distribute_tensor(whole, mesh, [Shard(0)]) if isinstance(weight, DTensor) else whole
        optimizer.set_masters({param: masters})
        for i in range(6):
            param.grad = torch.ones_like(param) * (i + 1)
            optimizer.step()
            if i == 1:
                optimizer.load_state_dict(optimizer.state_dict())
            if i == 3:
                with torch.no_grad():
                    param.mul_(0.5)
        found.append([param.detach(), optimizer.masters()[param], *optimizer.state[param].values()])
    with pytest.raises(ValueError, match=r"set_masters got a torch.float32 tensor of shape \(6, 4\) on cpu for a"):
        optimizers[0].set_masters({optimizers[0].param_groups[0]["params"][0]: whole})
    for sharded, plain in zip(*found, strict=True):
        sharded = sharded.full_tensor() if isinstance(sharded, DTensor) else sharded
        assert sharded.dtype == plain.dtype
        if plain.dtype is torch.float16:        # remainders, some of which are patterns of NaN
            sharded, plain = sharded.view(torch.int16), plain.view(torch.int16)
        assert torch.equal(sharded, plain)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [(AdamW, torch.optim.AdamW, {}), (SGD, torch.optim.SGD, {"momentum": 0.9}), (SGD, torch.optim.SGD, {})],
)
def test_shards_are_updated_in_place(mesh: DeviceMesh, ours, theirs, options: dict, impl: str) -> None:
    whole = torch.randn(6, 4)
    param = torch.nn.Parameter(distribute_tensor(whole.clone(), mesh, [Shard(0)]))
    plain = torch.nn.Parameter(whole.clone())
    mine, reference = ours([param], lr=0.1, impl=impl, **options), theirs([plain], lr=0.1, **options)
    for i in range(4):
        plain.grad = torch.randn(6, 4)
        # A gradient may come replicated where the parameter is sharded.
        placement = Replicate() if i == 2 else Shard(0)
        param.grad = distribute_tensor(plain.grad * 8, mesh, [placement])
        mine.grad_scale, mine.found_inf = torch.tensor(8.0), torch.tensor(0.0)
        mine.step()
        reference.step()
    assert isinstance(param.data, DTensor)
    torch.testing.assert_close(param.full_tensor(), plain, rtol=0, atol=0 if impl == "auto" else 1e-6)
    for name, value in mine.state[param].items():
        if name != "step":
            assert isinstance(value, DTensor), name
            torch.testing.assert_close(value.full_tensor(), reference.state[plain][name], rtol=0, atol=1e-6)
    mine.load_state_dict(mine.state_dict())
    mine.step()
