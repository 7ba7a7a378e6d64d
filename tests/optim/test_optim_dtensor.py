"""DTensor parameters: ampkit.optim updates this rank's shard, with torch.optim's results and state."""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

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

from ampkit.half_precision.master_weights import MasterWeights
from ampkit.optim import SGD, AdamW
from tests.helpers.equal import assert_equal
from tests.helpers.ranks import on_ranks

BFLOAT16 = {"rounding": "stochastic", "masters": "remainder", "state_dtype": torch.bfloat16}


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
    ("cls", "options"),
    [
        (AdamW, {}),
        (SGD, {}),
        (SGD, {"momentum": 0.9}),
        (AdamW, {"max_grad_norm": 0.5}),
        (AdamW, BFLOAT16),
        (SGD, BFLOAT16),
    ],
)
def test_shards_step_as_plain_weights_do(mesh: DeviceMesh, cls: Any, options: dict[str, Any], impl: str) -> None:
    """With masters given and taken, a state that is loaded, a write from outside and a replicated gradient."""
    whole, grads = torch.randn(6, 4), torch.randn(6, 6, 4)
    dtype = torch.bfloat16 if options is BFLOAT16 else torch.float32
    found = []
    for place in (lambda value, *at: distribute_tensor(value, mesh, at or [Shard(0)]), lambda value, *at: value):
        param = torch.nn.Parameter(place(whole.to(dtype, copy=True)))
        optimizer = cls([param], lr=0.1, impl=impl, **options)
        if options is BFLOAT16:
            optimizer.set_masters({param: place(whole)})
        for i, grad in enumerate(grads):
            param.grad = place(8 * grad.to(dtype), *([Replicate()] if i == 2 else []))
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(0.0)
            optimizer.step()
            if i == 1:
                optimizer.load_state_dict(optimizer.state_dict())
            if i == 3:
                with torch.no_grad():
                    param.mul_(0.5)
        found.append([param.detach(), *optimizer.masters().values(), *optimizer.state[param].values()])
        if options is BFLOAT16 and len(found) == 1:
            with pytest.raises(ValueError, match=r"set_masters got a torch.float32 tensor of shape \(6, 4\)"):
                optimizer.set_masters({param: whole})
    for sharded, plain in zip(*found, strict=True):
        assert isinstance(sharded, DTensor) is (plain.ndim > 0)  # a step count and a stream are none
        sharded = sharded.full_tensor() if plain.ndim else sharded
        assert sharded.dtype == plain.dtype
        assert torch.equal(*(t.view(torch.int16) if t.dtype is torch.float16 else t for t in (sharded, plain)))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("impl", ["auto", "triton"])
def test_a_backward_through_a_weight_that_a_step_has_changed_raises(mesh: DeviceMesh, impl: str, masters: bool) -> None:
    """Autograd has saved the DTensor, or its shard where the program computes with that."""
    weight = torch.nn.Parameter(distribute_tensor(torch.ones(3, 3).bfloat16(), mesh, [Shard(0)]))
    optimizer: Any = SGD([weight], lr=0.1, impl=impl, **{} if masters else BFLOAT16)
    if masters:
        MasterWeights(optimizer)
    for of_shard in (False, True):
        for _ in range(2):
            x = torch.ones(3, 3).bfloat16()
            x = (x if of_shard else distribute_tensor(x, mesh, [Replicate()])).requires_grad_()
            loss = (x @ (weight.to_local() if of_shard else weight)).sum()
            weight.grad = distribute_tensor(torch.ones(3, 3).bfloat16(), mesh, [Shard(0)])
            optimizer.step()
            with pytest.raises(RuntimeError, match="been modified"):
                loss.backward()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize(
    "options", [{"fused": False}, {"foreach": True}, BFLOAT16], ids=["for-loop", "foreach", "bfloat16"]
)
@pytest.mark.parametrize("cls", [AdamW, SGD])
def test_plain_parameters_beside_dtensors_of_two_meshes(
    mesh: DeviceMesh, cls: Any, options: dict[str, Any], impl: str
) -> None:
    """As tensor and expert parallelism leave them, under a scaler: some gradients are not contiguous."""
    others = init_device_mesh("cpu", (1, 1))
    values, places = torch.randn(5, 6, 4), (mesh, None, others, mesh, None)
    dtype = torch.bfloat16 if options is BFLOAT16 else torch.float32
    found = []
    for meshes in (places, [None] * 5):

        def place(value: torch.Tensor, on: DeviceMesh | None) -> torch.Tensor:
            return value if on is None else distribute_tensor(value, on, [Replicate()] * (on.ndim - 1) + [Shard(0)])

        params = [torch.nn.Parameter(place(v.to(dtype, copy=True), on)) for v, on in zip(values, meshes, strict=True)]
        optimizer = cls(params, lr=0.1, impl=impl, **options)
        for step in range(3):
            for i, (param, on) in enumerate(zip(params, meshes, strict=True)):
                grad = values[i - 1].to(dtype) * 8 * (step + 1)
                param.grad = place(grad.t().contiguous().t() if i % 2 else grad.clone(), on)
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(0.0)
            optimizer.step()
        found.append([getattr(param, "full_tensor", lambda param=param: param)() for param in params])
    # A kernel takes the rows whose strides agree, which those of a shard do, and torch's operations the others.
    torch.testing.assert_close(*found, rtol=1e-6 if impl == "triton" else 0, atol=1e-6 if impl == "triton" else 0)
    assert not torch.equal(found[0][1], values[1].to(dtype))


def clipped_by_the_norm_of_all_shards(rank: int, world: int) -> None:
    """In the step, without a scaler; a plain parameter counts once."""
    mesh = init_device_mesh("cpu", (world,))
    values, gradients = torch.ones(2, 3), torch.tensor([[3.0, 4.0, 0.0], [0.0, 12.0, 84.0]])
    found = []
    for is_sharded in (True, False):
        weights = [values.clone(), values[0].clone()]
        grads = [gradients.clone(), torch.zeros(3)]
        if is_sharded:
            weights[0], grads[0] = (distribute_tensor(each, mesh, [Shard(0)]) for each in (weights[0], grads[0]))
        params = [torch.nn.Parameter(weight) for weight in weights]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer = SGD(params, lr=1.0, max_grad_norm=17.0)
        optimizer.step()
        assert float(optimizer.grad_norm) == 85.0
        assert torch.equal(params[0].grad.full_tensor() if is_sharded else params[0].grad, gradients)
        found.append(params[0].full_tensor() if is_sharded else params[0])
    torch.testing.assert_close(*found)


def fsdp_checkpoint(rank: int, world: int, full: bool) -> None:
    """A state that leaves one optimizer and enters another, with every remainder and stream; steps keep them."""
    mesh = init_device_mesh("cpu", (world,))
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 3)).bfloat16()
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    first, second = (
        AdamW(model.parameters(), masters="remainder", rounding="stochastic", seed=seed, lr=0.0, weight_decay=0.0)
        for seed in (0, 1)
    )
    wide = {param: torch.randn(param.shape) for param in model.parameters()}
    first.set_masters({param: distribute_tensor(value, mesh, param.placements) for param, value in wide.items()})
    options = StateDictOptions(full_state_dict=full)
    state = get_optimizer_state_dict(model, first, options=options)
    set_optimizer_state_dict(model, second, state, options=options)
    assert_equal([second.state[param]["stream"] for param in wide], [first.state[param]["stream"] for param in wide])
    for _ in range(3):
        masters = second.masters()
        assert_equal([masters[param].full_tensor() for param in wide], wide.values())
        model(torch.ones(2, 5).bfloat16()).sum().backward()
        second.step()


def rounding(rank: int, world: int) -> None:
    """Equal weights on ranks of a mesh: replicas stay equal, shards do not, and state is that of a plain weight."""
    plain, shard = torch.nn.Parameter(torch.ones(500).bfloat16()), Shard(0)
    meshes = {sizes: init_device_mesh("cpu", sizes) for sizes in ((1, world), (world, 1))}
    pairs = [(a, b) for a in (Replicate(), shard) for b in (Replicate(), shard)]
    for (sizes, mesh), placements in itertools.product(meshes.items(), pairs):
        param = torch.nn.Parameter(DTensor.from_local(torch.ones(500).bfloat16(), mesh, placements))
        found = []
        for each in (plain, param):
            optimizer = SGD([each], lr=2**-9, rounding="stochastic")
            each.grad = torch.ones_like(each)
            optimizer.step()
            found.append(optimizer.state[each]["stream"])
        assert torch.equal(*found)
        locals = DTensor.from_local(param.detach().to_local(), mesh, [shard] * 2).full_tensor().chunk(world)
        n_shards = world if placements[sizes.index(world)].is_shard() else 1
        assert len({tuple(local.tolist()) for local in locals}) == n_shards
        assert rank or torch.equal(locals[0], plain)
        plain.data.fill_(1.0)


def steps_by_caches(rank: int, world: int) -> None:
    """Beside an optimizer without caches; shards are exchanged in between, as by FSDP2, and placements change."""
    mesh = init_device_mesh("cpu", (world,))
    for cls, options in ((AdamW, {}), (SGD, BFLOAT16)):
        values = torch.randn(8, 8, 8, dtype=torch.bfloat16 if options is BFLOAT16 else torch.float32)
        lists = [
            [torch.nn.Parameter(distribute_tensor(value.clone(), mesh, [Shard(0)])) for value in values[:3]]
            for _ in range(2)
        ]
        cached, other = (cls(params, lr=0.1, impl="triton", **options) for params in lists)
        examined = []
        with mock.patch.object(cached, "_step_kernels", wraps=cached._step_kernels) as step_kernels:
            for step in range(8):
                for params in lists:
                    for i, param in enumerate(params):
                        place = Shard(int(step == 3 and i == 1))
                        param.grad = distribute_tensor(values[step - i].clone(), mesh, [place])
                    if step == 5:
                        params[1]._local_tensor = params[1]._local_tensor.clone()
                        params[2].requires_grad_(False)
                    if step == 6:
                        params[0].grad = None
                other._caches.clear()
                for optimizer in (cached, other):
                    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(float(step == 4))
                    version = lists[0][1]._version
                    optimizer.step()
                    assert optimizer is other or lists[0][1]._version > version
                examined.append(step_kernels.call_count)
        assert examined == [1, 1, 1, 2, 2, 2, 3, 3], examined
        for pair in zip(*lists, strict=True):
            assert_equal(
                *[map(bits, (param, *o.state[param].values())) for param, o in zip(pair, (cached, other), strict=True)]
            )


def bits(tensor: Any) -> torch.Tensor:
    """This rank's shard, and remainders as integers: some are NaN as numbers."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    return local.view(torch.int16) if local.dtype is torch.float16 else local


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs the interpreter")
def test_caches_see_what_changes_between_steps() -> None:
    on_ranks(steps_by_caches)


def test_a_step_clips_by_the_norm_of_all_shards() -> None:
    on_ranks(clipped_by_the_norm_of_all_shards)


def test_shards_round_apart_and_replicas_alike() -> None:
    on_ranks(rounding)


@pytest.mark.parametrize("full", [True, False])
def test_checkpoints_of_fsdp_have_remainders_and_streams(full: bool) -> None:
    on_ranks(fsdp_checkpoint, full)
