"""What each rank does in the scaler's distributed tests: functions for `on_ranks`, which return plain values."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import ampkit.optim
from ampkit.scaler.grad_scaler import GradScaler
from ampkit.scaler.norm_limit import TimesMedian
from tests.helpers.faults import plant_nonfinite, spoil_grad

INF_AT = 2
STEPS = 4
OPTIMIZERS = {
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.1),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "ampkit": lambda params: ampkit.optim.AdamW(params, lr=0.1),
    "sgd_fused": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))  # the last bias leaves one rank empty


def full(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(model, optimizer, scaler, inputs, *, spoiled=None, clip=False) -> dict[str, Any]:
    """Train a few steps with one fault; says what this rank saw."""
    seen: dict[str, Any] = {"scales": [], "skipped": [], "norms": [], "params": [], "plain_norms": []}
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(model(inputs + step).square().mean()).backward()
        if spoiled is not None and step == INF_AT:
            spoil_grad(spoiled, "inf")
        if clip:
            scale = scaler.get_scale()
            grads = [full(p.grad) / scale for p in model.parameters()]
            seen["plain_norms"].append(float(torch.stack([g.norm() for g in grads]).norm()))
            seen["norms"].append(float(scaler.clip_grad_norm_(optimizer, 0.1)))
        scaler.step(optimizer)
        if isinstance(scaler, GradScaler):
            seen["skipped"].append(bool(scaler.found_inf(optimizer)))
        scaler.update()
        seen["scales"].append(scaler.get_scale())
        seen["params"].append([full(p).clone().tolist() for p in model.parameters()])
    return seen


def ddp(rank: int, world: int, which: str, clip: bool = False, cls=GradScaler) -> dict[str, Any]:
    model = DistributedDataParallel(network())
    if rank == world - 1:
        plant_nonfinite(model.module[0].weight, INF_AT + 1, "nan")
    optimizer = OPTIMIZERS[which](model.parameters())
    return train(model, optimizer, cls("cpu"), torch.full((2, 6), float(rank)), clip=clip)


def fsdp(rank: int, world: int, which: str, clip: bool = False, cls=GradScaler) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world,))
    model = network()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = OPTIMIZERS[which](model.parameters())
    spoiled = model[0].weight if rank == world - 1 else None
    return train(model, optimizer, cls("cpu"), torch.full((2, 6), float(rank)), spoiled=spoiled, clip=clip)


def flat(rank: int, world: int, which: str, original: bool = False, clip: bool = False) -> dict[str, Any]:
    """The first FSDP: gradients are shards of flat parameters, plain tensors all of them."""
    torch.manual_seed(0)
    model = FullyShardedDataParallel(network(), use_orig_params=original, device_id=torch.device("cpu"))
    optimizer = OPTIMIZERS[which](model.parameters())
    scaler = GradScaler("cpu")
    seen: dict[str, Any] = {"scales": [], "skipped": [], "norms": [], "plain_norms": []}
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(model(torch.full((2, 6), float(rank + step))).square().mean()).backward()
        if rank == 0 and step == INF_AT:
            spoil_grad(next(param for param in model.parameters() if param.grad is not None), "inf")
        if clip:
            try:
                scaler.clip_grad_norm_(optimizer, 0.1)
            except RuntimeError as error:
                seen["refusal"] = str(error)
            grads = [param.grad for param in model.parameters() if param.grad is not None]
            squares = sum((grad.double() / scaler.get_scale()).square().sum() for grad in grads) + torch.zeros(())
            dist.all_reduce(squares)
            seen["plain_norms"].append(float(squares.sqrt()))
            seen["norms"].append(float(scaler.clip_grad_norm_(optimizer, 0.1, process_group=model.process_group)))
        scaler.step(optimizer)
        seen["skipped"].append(bool(scaler.found_inf(optimizer)))
        scaler.update()
        seen["scales"].append(scaler.get_scale())
    return seen


def plain_clipping_of_shards(rank: int, world: int) -> dict[str, Any]:
    """A disabled scaler clips as an enabled one: over the ranks of a process group, and no flat shards without one."""
    scaler = GradScaler("cpu", enabled=False)
    out: dict[str, Any] = {}
    for order in (2.0, math.inf):
        param = nn.Parameter(torch.zeros(2))
        param.grad = torch.full((2,), float(rank + 1))
        optimizer = torch.optim.SGD([param], lr=1.0)
        norm = scaler.clip_grad_norm_(optimizer, 1.0, order, process_group=dist.group.WORLD)
        out[f"norm {order}"] = float(norm)
        out[f"grad {order}"] = param.grad.tolist()
    optimizer = torch.optim.SGD([{"params": []}, {"params": [param]}], lr=1.0)
    out["with an empty group"] = float(scaler.clip_grad_norm_(optimizer, 1.0, process_group=dist.group.WORLD))
    model = FullyShardedDataParallel(network(), device_id=torch.device("cpu"))
    model(torch.ones(2, 6)).sum().backward()
    try:
        scaler.clip_grad_norm_(torch.optim.SGD(model.parameters(), lr=1.0), 0.1)
    except RuntimeError as error:
        out["refusal"] = str(error)
    return out


def drifted(rank: int, world: int) -> dict[str, Any]:
    """A parameter that DDP does not know, with an inf on one rank only."""
    model, own = DistributedDataParallel(network()), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*model.parameters(), own], lr=0.1)
    scaler = GradScaler("cpu")
    messages = []
    for step in range(2):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 6)).sum() + own.sum()).backward()
        if rank == 1 and step == 1:
            own.grad[0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        try:
            scaler.check_ranks()
            messages.append("")
        except RuntimeError as error:
            messages.append(str(error))
    GradScaler("cpu", enabled=False).check_ranks()
    GradScaler("cpu").check_ranks()     # never used: the same everywhere
    return {"messages": messages}


def two_dimensions(rank: int, world: int, which: str, clip: bool = False) -> dict[str, Any]:
    """FSDP2 over tensor parallel, on 2 x world/2 ranks."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(network(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = OPTIMIZERS[which](model.parameters())
    spoiled = model[0].weight if rank == world - 1 else None
    inputs = torch.full((2, 6), float(mesh["dp"].get_local_rank()))
    return train(model, optimizer, GradScaler("cpu"), inputs, spoiled=spoiled, clip=clip)


def several_meshes(rank: int, world: int, bad_rank: int, cls=GradScaler) -> dict[str, Any]:
    """A replicated parameter first, then one sharded over each dimension of a mesh: all ranks must agree."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("rows", "columns"))
    plain = nn.Parameter(torch.ones(2))
    sharded = [
        nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh[name], [Shard(0)])) for name in ("rows", "columns")
    ]
    scaler = cls("cpu")
    scaler.scale(torch.ones((), requires_grad=True))
    params = [plain, *sharded]
    for param in params:
        param.grad = torch.ones_like(param)
    if rank == bad_rank:
        spoil_grad(sharded[1], "nan")
    optimizer = torch.optim.SGD(params, lr=1.0)
    scaler.step(optimizer)
    scaler.update()
    return {"scale": scaler.get_scale(), "plain": plain.tolist()}


def pending_reduction(rank: int, world: int) -> dict[str, Any]:
    """A DTensor gradient whose sum over the ranks has not been taken: finite parts, infinite sum."""
    from torch.distributed.tensor import Partial

    mesh = init_device_mesh("cpu", (world,))
    results = {}
    for name, value in (("finite", 8.0), ("overflows", 3e38)):
        param = nn.Parameter(distribute_tensor(torch.ones(2), mesh, [Replicate()]))
        param.grad = DTensor.from_local(torch.full((2,), value), mesh, [Partial()])
        scaler = GradScaler("cpu", 4.0)
        scaler.scale(torch.ones((), requires_grad=True))
        optimizer = torch.optim.SGD([param], lr=1.0)
        norm = float(scaler.clip_grad_norm_(optimizer, 1e9))
        scaler.step(optimizer)
        results[name] = (norm, full(param).tolist(), bool(scaler.found_inf(optimizer)))
    return results


def by_hand(rank: int, world: int, which: str, empty: bool = False, cls=GradScaler) -> dict[str, Any]:
    """Each rank owns another parameter; only a process group says that they belong together."""
    param = nn.Parameter(torch.ones(3))
    optimizer = OPTIMIZERS[which]([param])
    scaler = cls("cpu", process_group=dist.group.WORLD)
    seen: dict[str, Any] = {"scales": [], "moved": []}
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(torch.ones((), requires_grad=True))
        if not (empty and rank == 0):
            param.grad = torch.ones(3) * scaler.get_scale()
        if step == INF_AT and rank == world - 1:
            param.grad[1] = math.inf
        before = param.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        seen["scales"].append(scaler.get_scale())
        seen["moved"].append(not torch.equal(before, param.detach()))
    if isinstance(scaler, GradScaler):
        seen["tracker"] = scaler._get_growth_tracker()
        seen["no_gradients"] = scaler.stats().no_gradients
    return seen


def outliers(rank: int, world: int, which: str, sharded: bool) -> list[Any]:
    """The last rank alone has a large gradient in one step: what each step did, and the counts."""
    network = nn.Linear(4, 2 * world, bias=False)
    if sharded:
        fully_shard(network, mesh=init_device_mesh("cpu", (world,)))
    optimizer = OPTIMIZERS[which](network.parameters())
    group = None if sharded else dist.group.WORLD
    scaler = GradScaler("cpu", 8.0, process_group=group, skip_above=TimesMedian(3.0, warmup=2))
    moved = []
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(network(torch.ones(1, 4)).sum()).backward()
        grad = network.weight.grad
        (grad.to_local() if isinstance(grad, DTensor) else grad).mul_(10.0 if step == INF_AT and rank else 1.0)
        before = full(network.weight).clone()
        if not sharded:
            scaler.clip_grad_norm_(optimizer, 1e9)      # by the norm of each rank alone
        scaler.step(optimizer)
        scaler.update()
        moved.append(not torch.equal(before, full(network.weight)))
    stats = scaler.stats()
    return [moved, stats.outliers, stats.skips, stats.scale]


def norm_over_stages(rank: int, world: int) -> dict[str, Any]:
    """Pipeline stages clip by the norm of the whole model."""
    out = {}
    for order in (2.0, 1.0, math.inf, 3.0):
        param = nn.Parameter(torch.zeros(2))
        param.grad = torch.full((2,), 4.0 * (rank + 1))
        scaler = GradScaler("cpu", 4.0, process_group=dist.group.WORLD)
        scaler.scale(torch.ones((), requires_grad=True))
        norm = scaler.clip_grad_norm_(torch.optim.SGD([param], lr=1.0), 1e9, order, process_group=dist.group.WORLD)
        out[order] = float(norm)
    return out


def closure_on_one_rank(rank: int, world: int) -> dict[str, Any]:
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

    result = scaler.step(optimizer, closure)
    scaler.update()
    return {"result": result, "param": param.tolist(), "scale": scaler.get_scale(), "evaluations": len(evaluations)}


def pickling(rank: int, world: int) -> dict[str, Any]:
    import copy
    import pickle

    scaler = GradScaler("cpu", process_group=dist.group.WORLD)
    try:
        pickle.dumps(scaler)
        message = ""
    except TypeError as error:
        message = str(error)
    return {"message": message, "same": copy.deepcopy(scaler).process_group is dist.group.WORLD}
