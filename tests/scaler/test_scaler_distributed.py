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

import ampkit.optim
from ampkit.scaler.grad_scaler import GradScaler
from ampkit.scaler.norm_limit import TimesMedian
from tests.helpers.faults import plant_nonfinite, spoil_grad
from tests.helpers.ranks import on_ranks

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not dist.is_available(), reason="no torch.distributed")]

if dist.is_available():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.nn.parallel import DistributedDataParallel

INF_AT, STEPS = 2, 4
OPTIMIZERS = {
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.1),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "ampkit": lambda params: ampkit.optim.AdamW(params, lr=0.1),
    "sgd_fused": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
}
NO_GROUP = r"clip_grad_norm_ got shards of FullyShardedDataParallel, .* process_group="


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))  # the last bias leaves one rank empty


def full(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def started(*arguments: Any, **options: Any) -> GradScaler:
    scaler = GradScaler("cpu", *arguments, **options)
    scaler.scale(torch.ones((), requires_grad=True))
    return scaler


def check_step(scaler: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Step and update: one step is skipped on all ranks, and from then on the scale is half of what it was."""
    scaler.step(optimizer)
    assert not isinstance(scaler, GradScaler) or bool(scaler.found_inf(optimizer)) is (step == INF_AT)
    scaler.update()
    assert scaler.get_scale() == (2.0**16 if step < INF_AT else 2.0**15)


def check_norm(norm: Tensor, plain: Tensor, step: int) -> None:
    """As torch computes it of whole gradients, and not finite in the step with an inf."""
    assert float(norm) == pytest.approx(float(plain), rel=1e-6) if step != INF_AT else not norm.isfinite()


def check_training(
    model: nn.Module, which: str, inputs: Tensor, *, spoiled: Tensor | None = None, clip: bool, cls: Any
) -> list[list[float]]:
    """Train with one overflow, and clip by norms of the whole model; returns the parameters, which all ranks share."""
    optimizer, scaler = OPTIMIZERS[which](model.parameters()), cls("cpu")
    params: list[Any] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(model(inputs + step).square().mean()).backward()
        if spoiled is not None and step == INF_AT:
            spoil_grad(spoiled, "inf")
        if clip:
            norms = [full(p.grad).norm() / scaler.get_scale() for p in model.parameters()]
            check_norm(scaler.clip_grad_norm_(optimizer, 0.1), torch.stack(norms).norm(), step)
        check_step(scaler, optimizer, step)
        params.append([full(p).tolist() for p in model.parameters()])
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, params)
    assert all(params == others for others in everyones)
    assert (params[INF_AT] == params[INF_AT - 1], params[-1] == params[-2]) == (True, False)
    return params[-1]


def ddp(rank: int, world: int, which: str, clip: bool = False, cls: Any = GradScaler) -> Any:
    model = DistributedDataParallel(network())
    if rank == world - 1:
        plant_nonfinite(model.module[0].weight, INF_AT + 1, "nan")
    return check_training(model, which, torch.full((2, 6), float(rank)), clip=clip, cls=cls)


def fsdp(rank: int, world: int, which: str, clip: bool = False, cls: Any = GradScaler) -> Any:
    model = network()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
    spoiled = model[0].weight if rank == world - 1 else None
    return check_training(model, which, torch.full((2, 6), float(rank)), spoiled=spoiled, clip=clip, cls=cls)


def two_dimensions(rank: int, world: int, which: str, clip: bool = False) -> None:
    """FSDP2 over tensor parallel, on 2 x world/2 ranks."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(network(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    inputs = torch.full((2, 6), float(mesh["dp"].get_local_rank()))
    spoiled = model[0].weight if rank == world - 1 else None
    check_training(model, which, inputs, spoiled=spoiled, clip=clip, cls=GradScaler)


@pytest.mark.parametrize(("world", "train", "which", "clip"), [
    *((2, ddp, which, False) for which in ("foreach", "fused", "ampkit")), (2, ddp, "foreach", True),
    *((2, fsdp, which, False) for which in ("foreach", "fused")),
    (2, fsdp, "foreach", True), (2, fsdp, "ampkit", True), (4, fsdp, "fused", True),
    (4, two_dimensions, "foreach", False), (4, two_dimensions, "fused", True),
])
def test_ranks_skip_together_and_hold_one_scale(world: int, train: Callable[..., Any], which: str, clip: bool) -> None:
    """An inf on the last rank only; parameters stay where they were everywhere, and equal."""
    on_ranks(train, which, clip, world=world)


@pytest.mark.parametrize("train", [ddp, fsdp])
def test_equal_to_torch_to_the_bit(train: Callable[..., Any]) -> None:
    assert on_ranks(train, "foreach") == on_ranks(train, "foreach", False, torch.amp.GradScaler)


def flat(rank: int, world: int, which: str, original: bool, clip: bool) -> None:
    model = FullyShardedDataParallel(network(), use_orig_params=original, device_id=torch.device("cpu"))
    optimizer, scaler = OPTIMIZERS[which](model.parameters()), GradScaler("cpu")
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(model(torch.full((2, 6), float(rank + step))).square().mean()).backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        if rank == 0 and step == INF_AT:
            spoil_grad(next(param for param in model.parameters() if param.grad is not None), "inf")
        if clip:
            with pytest.raises(RuntimeError, match=NO_GROUP):
                scaler.clip_grad_norm_(optimizer, 0.1)
            squares = sum((grad.double() / scaler.get_scale()).square().sum() for grad in grads) + torch.zeros(())
            dist.all_reduce(squares)
            norm = scaler.clip_grad_norm_(optimizer, 0.1, process_group=model.process_group)
            check_norm(norm, squares.sqrt(), step)
        check_step(scaler, optimizer, step)


@pytest.mark.parametrize(("which", "original", "clip"), [
    ("foreach", False, False), ("fused", False, False), ("ampkit", True, False), ("foreach", False, True),
    ("ampkit", True, True),
])
def test_flat_shards_of_the_first_fsdp_skip_together(which: str, original: bool, clip: bool) -> None:
    """An inf on one rank; its parameters are plain tensors with a mark. Without a process group clipping is refused:
    the norm would be that of a shard.
    """
    on_ranks(flat, which, original, clip)


def plain_clipping_of_shards(rank: int, world: int) -> None:
    """By a disabled scaler, also without gradients in the first group; shards of FSDP1 are refused."""
    scaler, param = GradScaler("cpu", enabled=False), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([{"params": []}, {"params": [param]}], lr=1.0)
    for order, whole in ((2.0, math.sqrt(10.0)), (math.inf, 2.0)):
        param.grad = torch.full((2,), float(rank + 1))
        norm = scaler.clip_grad_norm_(optimizer, 1.0, order, process_group=dist.group.WORLD)
        assert float(norm) == pytest.approx(whole)
        assert param.grad.tolist() == pytest.approx([(rank + 1) / whole] * 2, rel=1e-5)
    model = FullyShardedDataParallel(network(), device_id=torch.device("cpu"))
    with pytest.raises(RuntimeError, match=NO_GROUP):
        scaler.clip_grad_norm_(torch.optim.SGD(model.parameters(), lr=1.0), 0.1)


def drifted(rank: int, world: int) -> None:
    """A parameter that DDP does not know, with an inf on one rank only; found by a check that all ranks make."""
    model, own = DistributedDataParallel(network()), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*model.parameters(), own], lr=0.1)
    scaler = GradScaler("cpu")
    scaler.check_ranks()        # never used: the same everywhere
    for step in range(2):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 6)).sum() + own.sum()).backward()
        if rank == 1 and step == 1:
            own.grad[0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        if step == 0:
            scaler.check_ranks()
    with pytest.raises(RuntimeError, match="drifted apart: scale from 32768 to 65536, steps from 1 to 2, skips from 0"):
        scaler.check_ranks()
    GradScaler("cpu", enabled=False).check_ranks()


def by_hand(rank: int, world: int, which: str, empty: bool = False) -> None:
    """Each rank owns another parameter; only a process group says that they belong together."""
    param = nn.Parameter(torch.ones(3))
    optimizer, scaler = OPTIMIZERS[which]([param]), GradScaler("cpu", process_group=dist.group.WORLD)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(torch.ones((), requires_grad=True))
        if not (empty and rank == 0):
            param.grad = torch.ones(3) * scaler.get_scale()
        if step == INF_AT and rank == world - 1:
            param.grad[1] = math.inf
        before = param.detach().clone()
        check_step(scaler, optimizer, step)
        assert torch.equal(before, param.detach()) is (step == INF_AT or (empty and rank == 0))
    assert scaler._get_growth_tracker() == 1


@pytest.mark.parametrize(("world", "which", "empty"), [
    *((2, which, False) for which in OPTIMIZERS), (2, "foreach", True), (2, "fused", True), (4, "fused", True),
])
def test_a_process_group_agrees_for_every_optimizer(world: int, which: str, empty: bool) -> None:
    """With a rank without gradients too, which follows the others."""
    on_ranks(by_hand, which, empty, world=world)


def several_meshes(rank: int, world: int, bad_rank: int) -> None:
    """A replicated parameter first, then one sharded over each dimension of a mesh: all ranks must agree."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("rows", "columns"))
    params = [nn.Parameter(torch.ones(2)), *(
        nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh[name], [Shard(0)])) for name in ("rows", "columns")
    )]
    for param in params:
        param.grad = torch.ones_like(param)
    if rank == bad_rank:
        spoil_grad(params[2], "nan")
    scaler = started()
    scaler.step(torch.optim.SGD(params, lr=1.0))
    scaler.update()
    assert (scaler.get_scale(), params[0].tolist()) == (2.0**15, [1.0, 1.0])


@pytest.mark.parametrize("bad_rank", [0, 3])
def test_gradients_on_several_meshes_agree_over_all_of_them(bad_rank: int) -> None:
    on_ranks(several_meshes, bad_rank, world=4)


def pending_reduction(rank: int, world: int) -> None:
    """A DTensor gradient whose sum over the ranks has not been taken: finite parts, infinite sum."""
    mesh = init_device_mesh("cpu", (world,))
    for value, expected in ((8.0, [-3.0, -3.0]), (3e38, [1.0, 1.0])):
        param = nn.Parameter(distribute_tensor(torch.ones(2), mesh, [Replicate()]))
        param.grad = DTensor.from_local(torch.full((2,), value), mesh, [Partial()])
        scaler, optimizer = started(4.0), torch.optim.SGD([param], lr=1.0)
        norm = float(scaler.clip_grad_norm_(optimizer, 1e9))
        scaler.step(optimizer)
        assert norm == pytest.approx(4.0 * math.sqrt(2)) if value == 8.0 else not math.isfinite(norm)
        assert (full(param).tolist(), scaler.stepped(optimizer)) == (expected, value == 8.0)


def norm_over_stages(rank: int, world: int) -> None:
    """Pipeline stages clip by the norm of the whole model."""
    parts = torch.arange(1.0, world + 1).repeat(2)
    for order in (2.0, 1.0, math.inf, 3.0):
        param = nn.Parameter(torch.zeros(2))
        param.grad = torch.full((2,), 4.0 * (rank + 1))
        scaler, optimizer = started(4.0, process_group=dist.group.WORLD), torch.optim.SGD([param], lr=1.0)
        norm = scaler.clip_grad_norm_(optimizer, 1e9, order, process_group=dist.group.WORLD)
        assert float(norm) == pytest.approx(float(torch.linalg.vector_norm(parts, order)))


def closure_on_one_rank(rank: int, world: int) -> None:
    """One rank's loss turns NaN while its gradients stay finite: every rank must leave the step."""
    param = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.LBFGS([param], max_iter=3)
    scaler = GradScaler("cpu", process_group=dist.group.WORLD)
    evaluations = []

    def closure() -> Any:
        evaluations.append(1)
        optimizer.zero_grad()
        loss = param.square().sum()
        scaler.scale(loss).backward()
        return math.nan if rank == 1 and len(evaluations) == 2 else loss

    assert scaler.step(optimizer, closure) is None
    scaler.update()
    assert (param.tolist(), scaler.get_scale(), len(evaluations)) == ([1.0, 1.0], 2.0**15, 2)


def copying(rank: int, world: int) -> None:
    """Process groups are copied and not pickled."""
    scaler = GradScaler("cpu", process_group=dist.group.WORLD)
    with pytest.raises(TypeError, match=r"cannot pickle .*ProcessGroup"):
        pickle.dumps(scaler)
    assert copy.deepcopy(scaler).process_group is dist.group.WORLD


@pytest.mark.parametrize("check", [
    plain_clipping_of_shards, pending_reduction, norm_over_stages, closure_on_one_rank, copying, drifted,
])
def test_on_two_ranks(check: Callable[..., None]) -> None:
    on_ranks(check)


def outlier_on_one_rank(rank: int, world: int, which: str, sharded: bool) -> None:
    """The last rank alone has a large gradient in one step."""
    model = nn.Linear(4, 2 * world, bias=False)
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = OPTIMIZERS[which](model.parameters())
    group = None if sharded else dist.group.WORLD
    scaler = GradScaler("cpu", 8.0, process_group=group, skip_above=TimesMedian(3.0, window=16))
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        grad: Any = model.weight.grad
        (grad.to_local() if isinstance(grad, DTensor) else grad).mul_(10.0 if step == INF_AT and rank else 1.0)
        before = full(model.weight)
        if not sharded:
            scaler.clip_grad_norm_(optimizer, 1e9)      # by the norm of each rank alone
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, full(model.weight)) is (step == INF_AT) is not scaler.stepped(optimizer)
    assert (scaler.stats().outliers, scaler.stats().skips, scaler.get_scale()) == (1, 0, 8.0)


@pytest.mark.parametrize("which", ["foreach", "fused", "ampkit"])
@pytest.mark.parametrize("sharded", [True, False])
def test_a_norm_above_the_limit_on_one_rank_skips_on_all(which: str, sharded: bool) -> None:
    """FSDP2, whose norm is that of all shards, and parameters that only a process group joins."""
    on_ranks(outlier_on_one_rank, which, sharded)
