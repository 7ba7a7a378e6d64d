"""The scaler on 2 and 4 gloo ranks: they skip together and hold one scale, whoever saw the overflow.

Functions that take a rank run on every rank, and assert there.
"""

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ampkit import GradScaler, TimesMedian
from ampkit.optim import AdamW
from tests.helpers.faults import plant_nonfinite, spoil_grad
from tests.helpers.ranks import on_ranks
from tests.helpers.scaler_tools import OPTIMIZERS, iterate, one_parameter, started

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not dist.is_available(), reason="no torch.distributed")]

if dist.is_available():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.nn.parallel import DistributedDataParallel

INF_AT, STEPS = 2, 4
NO_GROUP = r"clip_grad_norm_ got shards of FullyShardedDataParallel, .* process_group="


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))  # the last bias leaves one rank empty


def full(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def check_step(scaler: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Step and update: one step is skipped on all ranks, and from then on the scale is half of what it was."""
    scaler.step(optimizer)
    assert not isinstance(scaler, GradScaler) or bool(scaler.found_inf(optimizer)) is (step == INF_AT)
    scaler.update()
    assert scaler.get_scale() == (2.0**16 if step < INF_AT else 2.0**15)


def check_training(
    model: nn.Module, which: str, part: int, spoils: bool, clip: bool, cls: Any = GradScaler, group: Any = None
) -> list[list[float]]:
    """Train with one overflow, and clip by norms of the whole model; returns the parameters, which all ranks share,
    unless a `group` says which ranks hold flat shards.
    """
    optimizer, scaler, params = OPTIMIZERS[which](model.parameters()), cls("cpu"), list[Any]()
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(model(torch.full((2, 6), float(part + step))).square().mean()).backward()
        with_grad = [param for param in model.parameters() if param.grad is not None]
        squares = sum((full(p.grad).double() / scaler.get_scale()).square().sum() for p in with_grad) + torch.zeros(())
        if spoils and step == INF_AT:
            spoil_grad(with_grad[0], "inf")
        if clip and group is not None:
            dist.all_reduce(squares)
            with pytest.raises(RuntimeError, match=NO_GROUP):
                scaler.clip_grad_norm_(optimizer, 0.1)
        if clip:
            norm = scaler.clip_grad_norm_(optimizer, 0.1, process_group=group)
            assert float(norm) == pytest.approx(float(squares.sqrt())) if step != INF_AT else not norm.isfinite()
        check_step(scaler, optimizer, step)
        params.append([full(p).tolist() for p in model.parameters()])
    assert (params[INF_AT] == params[INF_AT - 1], params[-1] == params[-2]) == (True, False)
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, params)
    assert group is not None or all(params == others for others in everyones)
    return params[-1]


def ddp(rank: int, world: int, which: str, clip: bool = False, cls: Any = GradScaler) -> Any:
    model = DistributedDataParallel(network())
    if rank == world - 1:
        plant_nonfinite(model.module[0].weight, INF_AT + 1, "nan")
    return check_training(model, which, rank, False, clip, cls)


def fsdp(rank: int, world: int, which: str, clip: bool = False, cls: Any = GradScaler) -> Any:
    model = network()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
    return check_training(model, which, rank, rank == world - 1, clip, cls)


def two_dimensions(rank: int, world: int, which: str, clip: bool) -> None:
    """FSDP2 over tensor parallel, on 2 x world/2 ranks."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(network(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    check_training(model, which, mesh["dp"].get_local_rank(), rank == world - 1, clip)


def flat(rank: int, world: int, which: str, clip: bool) -> None:
    """FSDP1, whose parameters are plain tensors with a mark. Without a process group clipping is refused: the norm
    would be that of a shard.
    """
    model = FullyShardedDataParallel(network(), use_orig_params=which == "ampkit", device_id=torch.device("cpu"))
    check_training(model, which, rank, rank == 0, clip, group=model.process_group)


@pytest.mark.parametrize(
    ("world", "train", "which", "clip"),
    [
        *((2, train, which, False) for train in (ddp, fsdp, flat) for which in ("ordinary", "fused")),
        *((2, train, "ordinary", True) for train in (ddp, fsdp, flat)),
        (2, ddp, "ampkit", False),
        (2, flat, "ampkit", False),
        (2, fsdp, "ampkit", True),
        (2, flat, "ampkit", True),
        (4, fsdp, "fused", True),
        (4, two_dimensions, "ordinary", False),
        (4, two_dimensions, "fused", False),
    ],
)
def test_ranks_skip_together_and_hold_one_scale(world: int, train: Callable[..., Any], which: str, clip: bool) -> None:
    """An inf on one rank only; parameters stay where they were everywhere, and equal."""
    on_ranks(train, which, clip, world=world)


@pytest.mark.parametrize("train", [ddp, fsdp])
def test_equal_to_torch_to_the_bit(train: Callable[..., Any]) -> None:
    assert on_ranks(train, "ordinary") == on_ranks(train, "ordinary", False, torch.amp.GradScaler)


def by_hand(rank: int, world: int, which: str, empty: bool) -> None:
    """Each rank owns another parameter; only a process group says that they belong together."""
    param = nn.Parameter(torch.ones(3))
    optimizer, scaler = OPTIMIZERS[which]([param]), started(process_group=dist.group.WORLD)
    for step in range(STEPS):
        if not (empty and rank == 0):
            param.grad = torch.ones(3) * scaler.get_scale()
        if step == INF_AT and rank == world - 1:
            param.grad[1] = math.inf
        before = param.detach().clone()
        check_step(scaler, optimizer, step)
        assert torch.equal(before, param.detach()) is (step == INF_AT or (empty and rank == 0))
    assert scaler._get_growth_tracker() == 1


@pytest.mark.parametrize(
    ("world", "which", "empty"),
    [
        *((2, which, False) for which in OPTIMIZERS),
        (2, "ordinary", True),
        (2, "fused", True),
        (4, "fused", True),
    ],
)
def test_a_process_group_agrees_for_every_optimizer(world: int, which: str, empty: bool) -> None:
    """With a rank without gradients too, which follows the others."""
    on_ranks(by_hand, which, empty, world=world)


def norm_over_stages(rank: int, world: int) -> None:
    """Pipeline stages clip by the norm of the whole model, also by a disabled scaler, and with an empty group first."""
    group = dist.group.WORLD
    for order, enabled in ((order, enabled) for order in (2.0, 1.0, math.inf, 3.0) for enabled in (True, False)):
        param = nn.Parameter(torch.zeros(2))
        param.grad = torch.full((2,), (rank + 1.0) * (4.0 if enabled else 1.0))
        optimizer = torch.optim.SGD([{"params": []}, {"params": [param]}], lr=1.0)
        scaler = started(GradScaler, 4.0, enabled=enabled, process_group=group)
        norm = float(scaler.clip_grad_norm_(optimizer, 1.0, order, process_group=group))
        assert norm == pytest.approx(float(torch.linalg.vector_norm(torch.arange(1.0, world + 1).repeat(2), order)))
        assert param.grad.tolist() == pytest.approx([(rank + 1) / norm] * 2, rel=1e-5)
    model = FullyShardedDataParallel(network(), device_id=torch.device("cpu"))
    with pytest.raises(RuntimeError, match=NO_GROUP):
        GradScaler("cpu", enabled=False).clip_grad_norm_(torch.optim.SGD(model.parameters(), lr=1.0), 0.1)


def drifted(rank: int, world: int) -> None:
    """An inf on one rank only, in a parameter that is not shared; found by a check that all ranks make."""
    scaler, (_, optimizer) = GradScaler("cpu"), one_parameter()
    scaler.check_ranks()  # never used: the same everywhere
    scaler.scale(torch.ones(()))
    iterate(scaler, optimizer, 1.0)
    scaler.check_ranks()
    iterate(scaler, optimizer, math.inf if rank == 1 else 1.0)
    with pytest.raises(
        RuntimeError,
        match="the scalers of the ranks differ: scale from 32768 to 65536, steps from 1 to 2, skips from 0",
    ):
        scaler.check_ranks()
    with pytest.raises(RuntimeError, match=r"the scalers of the ranks differ: scale from 1\.25 to 1\.5\. "):
        started(GradScaler, 1.25 + 0.25 * rank).check_ranks()
    GradScaler("cpu", enabled=False).check_ranks()


def several_meshes(rank: int, world: int) -> None:
    """A replicated parameter first, then one sharded over each dimension of a mesh: all ranks must agree."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("rows", "columns"))
    for bad_rank in (0, world - 1):
        params = [
            nn.Parameter(torch.ones(2)),
            *(
                nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh[name], [Shard(0)]))
                for name in ("rows", "columns")
            ),
        ]
        for param in params:
            param.grad = torch.ones_like(param)
        if rank == bad_rank:
            spoil_grad(params[2], "nan")
        scaler = started()
        iterate(scaler, torch.optim.SGD(params, lr=1.0))
        assert (scaler.get_scale(), params[0].tolist()) == (2.0**15, [1.0, 1.0])


def pending_reduction(rank: int, world: int) -> None:
    """A DTensor gradient whose sum over the ranks has not been taken: finite parts, infinite sum."""
    mesh = init_device_mesh("cpu", (world,))
    for value, expected in ((8.0, [-3.0, -3.0]), (3e38, [1.0, 1.0])):
        param = nn.Parameter(distribute_tensor(torch.ones(2), mesh, [Replicate()]))
        param.grad = DTensor.from_local(torch.full((2,), value), mesh, [Partial()])
        scaler, optimizer = started(GradScaler, 4.0), torch.optim.SGD([param], lr=1.0)
        norm = float(scaler.clip_grad_norm_(optimizer, 1e9))
        scaler.step(optimizer)
        assert norm == pytest.approx(4.0 * math.sqrt(2)) if value == 8.0 else not math.isfinite(norm)
        assert (full(param).tolist(), scaler.stepped(optimizer)) == (expected, value == 8.0)


def copying(rank: int, world: int) -> None:
    """Process groups are copied and not pickled."""
    scaler = GradScaler("cpu", process_group=dist.group.WORLD)
    with pytest.raises(TypeError, match=r"cannot pickle .*ProcessGroup"):
        pickle.dumps(scaler)
    assert copy.deepcopy(scaler).process_group is dist.group.WORLD


def the_norm_of_clipping_is_compared(rank: int, world: int) -> None:
    """The one of each rank, or of the group, as `clip_grad_norm_` returns it; without clipping of the group.

    A norm above the limit on one rank skips on all of them.
    """
    group = dist.group.WORLD
    for across, order, largest in ((None, 2.0, 8.0), (None, math.inf, 8.0), (group, 1.0, 12.0), (group, 2.0, 80**0.5)):
        for limit, clips in ((0.99 * largest, True), (1.01 * largest, True), (0.99 * 80**0.5, False), (9.0, False)):
            _, optimizer = one_parameter(grad=4.0 * (rank + 1))
            scaler = started(GradScaler, 1.0, process_group=group, skip_above=limit)
            if clips:
                norm = float(scaler.clip_grad_norm_(optimizer, 1e9, order, process_group=across))
                assert norm == pytest.approx(largest if across else 4.0 * (rank + 1))
            scaler.step(optimizer)
            assert scaler.stepped(optimizer) is (limit > (largest if clips else 80**0.5))


def norms_of_shards(rank: int, world: int) -> None:
    """torch's but for the last bit, of gradients whose squares float32 cannot hold too."""
    param = nn.Parameter(distribute_tensor(torch.zeros(5), init_device_mesh("cpu", (world,)), [Shard(0)]))
    for size in (1.0, 1e30, 1e-30):
        value = torch.randn(5) * size
        param.grad = distribute_tensor(value * 4.0, param.device_mesh, [Shard(0)])
        norm = started(GradScaler, 4.0).clip_grad_norm_(torch.optim.SGD([param]), size)
        assert float(norm) == pytest.approx(float(value.double().norm()), rel=2.5e-7)
        clipped = value.double() * min(size / (float(norm) + 1e-6), 1.0)
        torch.testing.assert_close(full(param.grad), clipped.float(), rtol=5e-7, atol=0.0)


def gradients_placed_anew(rank: int, world: int) -> None:
    """Other placements, another mesh and another shard in each iteration: nothing is kept from the last one."""
    meshes = [init_device_mesh("cpu", shape) for shape in ((world,), (1, world))]
    params = [nn.Parameter(distribute_tensor(torch.zeros(4), meshes[0], [Shard(0)])) for _ in range(3)]
    optimizer, scaler = torch.optim.SGD(params), started(GradScaler, 2.0)
    places: list[Any] = [[Shard(0)], [Replicate()], [Partial()]]
    for i in range(6):
        for j, param in enumerate(params):
            mesh, place = meshes[(i + j) // 3 % 2], places[(i + j) % 3]
            local = torch.full((2 if place == [Shard(0)] else 4,), (1.0 if place == [Partial()] else 2.0) * (i + 1))
            param.grad = DTensor.from_local(local, mesh, [Replicate()] * (mesh.ndim - 1) + place, run_check=False)
            if j == i % 3:
                param.grad._local_tensor = param.grad._local_tensor.clone()
        norm = scaler.clip_grad_norm_(optimizer, 1e9)
        assert float(norm) == pytest.approx((i + 1) * math.sqrt(12)), i
        assert [full(param.grad).tolist() for param in params] == [[i + 1.0] * 4] * 3
        scaler.update()


@pytest.mark.parametrize(
    ("check", "world"),
    [
        (norms_of_shards, 2),
        (gradients_placed_anew, 2),
        (norm_over_stages, 2),
        (drifted, 2),
        (several_meshes, 4),
        (pending_reduction, 2),
        (copying, 2),
        (the_norm_of_clipping_is_compared, 2),
    ],
)
def test_on_ranks(check: Callable[..., None], world: int) -> None:
    on_ranks(check, world=world)


def where_messages_are(rank: int, world: int, device: str) -> None:
    """As NCCL, which takes no tensor from the CPU: messages are on the scaler's device before anything is scaled."""
    param, seen = nn.Parameter(torch.ones(2)), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", lambda tensor, *_, **__: seen.append(tensor.device.type))
        scaler = GradScaler(device, process_group=dist.group.WORLD)
        with pytest.raises(NotImplementedError, match="meta"):  # which has no values to read
            scaler.check_ranks()
        assert scaler._unscale_grads_(torch.optim.SGD([param], lr=1.0), torch.ones(()), torch.zeros(())).keys()
    assert seen == [device, device]


@pytest.mark.parametrize("device", ["meta"])
def test_messages_before_the_first_scale_are_on_the_scalers_device(device: str) -> None:
    on_ranks(where_messages_are, device)


def outlier_on_one_rank(rank: int, world: int, which: str, sharded: bool) -> None:
    """The last rank alone has a large gradient in one step."""
    model = nn.Linear(4, 2 * world, bias=False)
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    group = None if sharded else dist.group.WORLD
    optimizer = OPTIMIZERS[which](model.parameters())
    scaler = GradScaler("cpu", 8.0, process_group=group, skip_above=TimesMedian(3.0, window=16))
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        grad: Any = model.weight.grad
        (grad.to_local() if sharded else grad).mul_(10.0 if step == INF_AT and rank else 1.0)
        before = full(model.weight)
        if not sharded:
            scaler.clip_grad_norm_(optimizer, 1e9)  # by the norm of each rank alone
        iterate(scaler, optimizer)
        assert torch.equal(before, full(model.weight)) is (step == INF_AT) is not scaler.stepped(optimizer)
    assert (scaler.stats().outliers, scaler.stats().skips, scaler.get_scale()) == (1, 0, 8.0)


@pytest.mark.parametrize("which", OPTIMIZERS)
@pytest.mark.parametrize("sharded", [True, False])
def test_a_norm_above_the_limit_on_one_rank_skips_on_all(which: str, sharded: bool) -> None:
    """FSDP2, whose norm is that of all shards, and parameters that only a process group joins."""
    on_ranks(outlier_on_one_rank, which, sharded)


class Collectives(TorchDispatchMode):
    """The collectives that a rank issues, those of DTensors too: the operator, and how many numbers it sends."""

    def __init__(self) -> None:
        super().__init__()
        self.issued: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # and come back with the operators on its shards
        name = str(func)
        if name.startswith(("c10d.", "_c10d_functional.")) and "wait" not in name:
            sent = args[0] if isinstance(args[0], Tensor) else args[0][0]
            self.issued.append((name, sent.numel()))
        return func(*args, **(kwargs or {}))


def hybrid(rank: int, world: int) -> nn.Module:
    return fully_shard(network(), mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicas", "shards")))


def tensor_parallel(rank: int, world: int) -> nn.Module:
    """FSDP2 over tensor parallel; the last layer is not split, so its mesh is another one."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(network(), nn.Linear(1, 3))
    parallelize_module(model[0], mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["dp"])


LAYOUTS: dict[str, tuple[int, int, Callable[[int, int], nn.Module]]] = {  # ranks, collectives, model
    "plain": (2, 0, lambda rank, world: network()),
    "ddp": (2, 0, lambda rank, world: DistributedDataParallel(network())),
    "process group": (2, 1, lambda rank, world: network()),
    "fsdp": (2, 1, lambda rank, world: fully_shard(network())),
    "hsdp": (4, 2, hybrid),
    "fsdp with tp": (4, 2, tensor_parallel),
}


WAYS = (  # what comes before `step`, `skip_above`, the optimizer
    ("nothing", None, "ordinary"),
    ("nothing", None, "ampkit"),
    ("nothing", None, "clipping"),
    ("nothing", 1e9, "ordinary"),
    ("clip", None, "ampkit"),
    ("clip", 1e9, "ordinary"),
    ("clip to inf", 1e9, "ampkit"),
)
MAKE = {**OPTIMIZERS, "clipping": lambda params: AdamW(params, lr=0.1, max_grad_norm=0.1)}


def collectives(rank: int, world: int, layout: str) -> list[Any]:
    """Those of each way to take a step; in the second of the two steps ranks disagree about everything."""
    found = []
    group = dist.group.WORLD if layout == "process group" else None
    for before, limit, which in WAYS:
        model = LAYOUTS[layout][2](rank, world)
        optimizer = MAKE[which](model.parameters())
        scaler = GradScaler("cpu", 8.0, process_group=group, skip_above=limit)
        for disagree in (False, True):
            optimizer.zero_grad()
            scaler.scale(model(torch.full((2, 6), float(rank + 1))).square().mean()).backward()
            norm = torch.stack([full(param.grad).square().sum() for param in model.parameters()]).sum().sqrt()
            if disagree and rank == 0:
                optimizer.zero_grad()
            elif disagree:
                spoil_grad(next(model.parameters()), "inf")
            order, across = (2.0, group) if before == "clip" else (math.inf, None)
            with Collectives() as counted:
                if before != "nothing":
                    clipped = scaler.clip_grad_norm_(optimizer, 0.1, order, process_group=across)
                scaler.step(optimizer)
                scaler.update()
            if not disagree and group is None and (before == "clip" or which == "clipping"):
                taken = clipped if before == "clip" else optimizer.grad_norm
                assert float(taken) == pytest.approx(float(norm) / 8.0)
            issued: list[Any] = [None] * world
            dist.all_gather_object(issued, counted.issued)
            assert all(each == issued[0] for each in issued)
            found.append((before, limit, which, disagree, len(counted.issued)))
        assert scaler.get_scale() == (4.0 if LAYOUTS[layout][1] else 8.0 if rank == 0 else 4.0)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_takes_one_collective_for_each_dimension(layout: str) -> None:
    """With the norm for clipping in it, and one more for `skip_above`, whose flags are known after the norm.

    It is the same sequence on all ranks, whatever they hold.
    """
    world, dimensions, _ = LAYOUTS[layout]
    for found in on_ranks(collectives, layout, world=world)[0]:
        *_, limit, _, _, issued = found
        assert issued == (dimensions if limit is None else 2 * dimensions), found
