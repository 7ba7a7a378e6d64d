"""DTensor parameters: ampkit.optim updates this rank's shard, with torch.optim's results and state."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
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
