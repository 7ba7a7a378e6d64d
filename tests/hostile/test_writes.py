"""Weights written in every way that torch has, at every place in random programs of regions: no use is stale.

The oracle is a cast made on the spot. What a cache cannot see is listed in `UNSEEN`: programs call `clear()` after such
a write, as `WeightCache` says.
"""

import contextlib
import gc
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from ampkit import WeightCache, autocast, clear_autocast_cache
from tests.hostile.budget import rounds

pytestmark = pytest.mark.timeout(300 + float(os.environ.get("AMPKIT_SOAK_SECONDS") or 0))

BF16 = torch.bfloat16
X = torch.eye(4, dtype=BF16)

class Through(torch.optim.Optimizer):
    """Writes through `.data`, as many optimizers outside torch do; and may be interrupted after that."""

    def __init__(self, p: Parameter, values: Tensor, interrupted: bool = False) -> None:
        super().__init__([p], {})
        self.p, self.values, self.interrupted = p, values, interrupted

    def step(self, closure=None):
        self.p.data.copy_(self.values)
        if self.interrupted:
            raise KeyboardInterrupt


def data_replaced(p: Parameter, *values: Tensor) -> None:
    """The second storage may lie where the weight's own was."""
    for each in values:
        p.data = each.clone()


def data_offloaded(p: Parameter, v: Tensor) -> None:
    p.data = torch.empty(0)
    gc.collect(0)
    p.data = v.clone()


def module_with(p: Parameter) -> nn.Module:
    module = nn.Module()
    module.weight = p
    return module


def converted_and_back(p: Parameter, v: Tensor) -> None:
    module = module_with(p).half()
    p.data.copy_(v)
    module.float()


def optimizer_interrupted(p: Parameter, v: Tensor) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        Through(p, v, interrupted=True).step()


def optimizer_fused(p: Parameter, v: Tensor) -> None:
    kept, p.grad = p.grad, p.detach() - v
    torch.optim.SGD([p], lr=1.0, fused=True).step()
    p.grad = kept


def written(alias: Any, v: Any) -> Any:
    """An alias of the weight that lives on, after a write to it."""
    alias[:] = v
    return alias


def flat_buffer(p: Parameter, v: Tensor) -> Any:
    """As FSDP and ZeRO do it: the weight is a piece of something that others fill."""
    flat = torch.zeros(32)
    p.data = flat[:16].view(4, 4)
    flat[:16].copy_(v.flatten())
    return flat


def shared_memory(p: Parameter, v: Tensor) -> None:
    """Another process may write from here on; this one does."""
    p.data = p.data.clone().share_memory_()
    p.data.copy_(v)


def storage(p: Parameter, v: Tensor) -> None:
    rest = p.untyped_storage().nbytes() // 4 - 16
    p.untyped_storage().copy_(torch.cat([v.flatten(), torch.zeros(rest)]).untyped_storage())


def version_preserved(p: Parameter, v: Tensor) -> None:
    with torch.autograd._unsafe_preserve_version_counter(p):
        p.copy_(v)


# A write gives a weight new values, with gradients off. What those of BETWEEN return is kept alive.
Write = Callable[[Parameter, Tensor], Any]
SEEN: dict[str, Write] = {          # wherever the weight is cached
    "in place": lambda p, v: p.copy_(v),
    "in place, detached": lambda p, v: torch.enable_grad()(p.detach().copy_)(v),
    "in inference mode": lambda p, v: torch.inference_mode()(p.copy_)(v),
    "through views": lambda p, v: (p.view(-1)[2:].copy_(v.flatten()[2:]), p[0].copy_(v[0])),
    "foreach": lambda p, v: torch._foreach_copy_([p], [v]),
    "out": lambda p, v: torch.add(v, 0.0, out=p),
    "data =": data_replaced,
    "data = twice": lambda p, v: data_replaced(p, torch.zeros(4, 4), v),
    "data = computed": lambda p, v: data_replaced(p, p.data * 0 + v, (p.data * 0 + v) * 1),
    "data offloaded": data_offloaded,
    "vector_to_parameters": lambda p, v: torch.nn.utils.vector_to_parameters(v.flatten().clone(), [p]),
    "set_": lambda p, v: p.set_(v.clone()),
    "converted and back": converted_and_back,
    "load_state_dict": lambda p, v: module_with(p).load_state_dict({"weight": v}),
    "optimizer through data": lambda p, v: Through(p, v).step(),
    "optimizer interrupted": optimizer_interrupted,
    "optimizer fused": optimizer_fused,
}
BETWEEN: dict[str, Write] = {       # seen between regions; inside one torch.amp, too, goes on with the cast it has
    "data transposed": lambda p, v: setattr(p, "data", p.data.t()),
    "scatter": lambda p, v: dist.scatter(p, [v]),
    "all_to_all": lambda p, v: dist.all_to_all_single(p, v.contiguous()),
    "array that lives": lambda p, v: written(p.detach().numpy(), v.numpy()),
    "capsule that lives": lambda p, v: written(torch.from_dlpack(p.detach()), v),
    "data that lives": lambda p, v: written(p.data, v),
    "flat buffer": flat_buffer,
    "shared memory": shared_memory,
}
UNSEEN: dict[str, Write] = {        # clear() is needed
    "data in place": lambda p, v: p.data.copy_(v),
    "array": lambda p, v: written(p.detach().numpy(), v.numpy()),
    "capsule": lambda p, v: written(torch.from_dlpack(p.detach()), v),
    "storage": storage,
    "unsafe view": lambda p, v: torch.ops.aten._unsafe_view(p, (4, 4)).copy_(v),
    "version preserved": version_preserved,
    "fused without an optimizer": lambda p, v: torch._fused_sgd_(
        [p], [p.detach() - v], [], weight_decay=0.0, momentum=0.0, lr=1.0, dampening=0.0, nesterov=False,
        maximize=False, is_first_step=False,
    ),
}
WRITES = SEEN | BETWEEN | UNSEEN


@torch.no_grad()
def write(name: str, p: Parameter, v: Tensor) -> Any:
    """Write, and return the alias that is to live on, if there is one."""
    alias = WRITES[name](p, v)
    return alias if name in BETWEEN else None


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """Collectives of one rank write as those of many."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def values(draw: random.Random) -> Tensor:
    """Unlike any before, and what bfloat16 can hold."""
    return torch.tensor([float(draw.randrange(1, 128)) for _ in range(16)]).view(4, 4)


def used(p: Parameter) -> Tensor:
    """What a region takes the weight for."""
    return torch.mm(X, p).detach()


def fresh(p: Parameter) -> Tensor:
    return p.detach().to(BF16)


def program(draw: random.Random, cache: WeightCache | None, frozen: bool) -> None:
    """Some uses and writes of three weights, in some regions, each use compared with a fresh cast."""
    weights = [Parameter(values(draw), not frozen) for _ in range(3)]
    alive: list[list[Any]] = [[], [], []]       # aliases of each weight, which live until it is used
    told: list[str] = []
    torch_is_stale: set[int] = set()    # trained, written unseen in the open region, and not cleared

    def step(open_region: bool) -> None:
        n = draw.randrange(3)
        p = weights[n]
        if open_region and draw.random() < 0.6:
            with draw.choice([contextlib.nullcontext, torch.no_grad, torch.inference_mode])():
                got = used(p)
            told.append(f"use {n}")
            assert n in torch_is_stale or torch.equal(got, fresh(p)), "\n".join(told)
            if draw.random() < 0.5:
                alive[n].clear()
            return
        table = draw.choice([SEEN, BETWEEN, UNSEEN])
        name = draw.choice([name for name in table if name != "data transposed"])      # others need it contiguous
        alive[n].append(write(name, p, values(draw)))
        told.append(f"{name} {n}")
        torch_is_stale.discard(n)
        if table is SEEN or (not open_region and (table is BETWEEN or cache is None)):
            return
        if cache is not None:
            cache.clear()
        elif not frozen and draw.random() < 0.5:
            torch_is_stale.add(n)
        elif not frozen:
            clear_autocast_cache()
            torch_is_stale.clear()

    for _ in range(draw.randrange(2, 6)):
        with autocast("cpu", BF16, cache=cache):
            told.append("region")
            for _ in range(draw.randrange(12)):
                step(open_region=True)
        torch_is_stale.clear()
        told.append("left")
        for _ in range(draw.randrange(4)):
            step(open_region=False)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("kept", [False, True], ids=["region", "kept"])
def test_no_use_is_stale(kept, frozen):
    for draw in rounds(f"writes, {'kept' if kept else 'region'}, {'frozen' if frozen else 'trained'}", share=0.1):
        program(draw, WeightCache() if kept else None, frozen)


@pytest.mark.parametrize("name", WRITES)
def test_writes_write(name):
    """And each as its table says: what moves the version counter is not called unseen."""
    p, new = Parameter(torch.eye(4) * torch.arange(1.0, 5.0)), values(random.Random(0))
    version = p._version
    kept = write(name, p, new)
    assert torch.equal(p.detach(), p.detach() if name == "data transposed" else new)
    assert name in SEEN or p._version == version
    del kept


@pytest.mark.parametrize("name", BETWEEN)
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_seen_between_regions(name, frozen):
    cache, p = WeightCache(), Parameter(torch.arange(16.0).view(4, 4), not frozen)
    with autocast("cpu", BF16, cache=cache):
        used(p)
    kept = write(name, p, torch.full((4, 4), 3.0))
    with autocast("cpu", BF16, cache=cache):
        assert torch.equal(used(p), fresh(p))
    del kept
