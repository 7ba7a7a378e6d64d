"""DTensor parameters: ampkit.optim updates this rank's shard, with torch.optim's results and state."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ampkit.optim import SGD, AdamW


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


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("cls", [AdamW, SGD])
def test_shards_of_bfloat16_step_as_plain_weights_do(mesh: DeviceMesh, cls: type, impl: str) -> None:
    """With remainders, stochastic state, masters given and taken, a state that is loaded and a write from outside."""
    whole = torch.randn(6, 4)
    weights = [distribute_tensor(whole.bfloat16(), mesh, [Shard(0)]), whole.bfloat16()]
    options = {"rounding": "stochastic", "masters": "remainder", "state_dtype": torch.bfloat16}
    found = []
    for weight in weights:
        param = torch.nn.Parameter(weight)
        optimizer = cls([param], lr=0.1, impl=impl, **options)
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
    for sharded, plain in zip(*found, strict=True):
        sharded = sharded.full_tensor() if isinstance(sharded, DTensor) else sharded
        assert sharded.dtype == plain.dtype
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
