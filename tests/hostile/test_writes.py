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

# A write gives a weight new values and returns what is to be kept alive until the program's end.
Write = Callable[[Parameter, Tensor], Any]
SEEN: dict[str, Write] = {}         # wherever the weight is cached
BETWEEN: dict[str, Write] = {}      # seen between regions; inside one torch.amp, too, goes on with the cast it has
UNSEEN: dict[str, Write] = {}       # clear() is needed


def write(table: dict[str, Write]) -> Callable[[Write], Write]:
    """Put a write into the table of those alike, under its name."""
    def put(function: Write) -> Write:
        table[function.__name__] = function
        return function

    return put


@write(SEEN)
def in_place(p: Parameter, values: Tensor) -> None:
    p.detach().copy_(values)


@write(SEEN)
def under_no_grad(p: Parameter, values: Tensor) -> None:
    with torch.no_grad():
        p.copy_(values)


@write(SEEN)
def in_inference_mode(p: Parameter, values: Tensor) -> None:
    with torch.inference_mode():
        p.copy_(values)


@write(SEEN)
def through_a_view(p: Parameter, values: Tensor) -> None:
    p.detach().view(-1)[2:].copy_(values.flatten()[2:])
    p.detach()[0].copy_(values[0])


@write(SEEN)
def foreach(p: Parameter, values: Tensor) -> None:
    with torch.no_grad():
        torch._foreach_copy_([p], [values])


@write(SEEN)
def out_argument(p: Parameter, values: Tensor) -> None:
    with torch.no_grad():
        torch.add(values, 0.0, out=p)


@write(SEEN)
def data_replaced(p: Parameter, values: Tensor) -> None:
    p.data = values.clone()


@write(SEEN)
def data_replaced_twice(p: Parameter, values: Tensor) -> None:
    """The second storage may lie where the weight's own was."""
    p.data = torch.zeros(4, 4)
    p.data = values.clone()


@write(SEEN)
def data_computed(p: Parameter, values: Tensor) -> None:
    p.data = p.data * 0 + values
    p.data = p.data * 1


@write(SEEN)
def data_offloaded(p: Parameter, values: Tensor) -> None:
    p.data = torch.empty(0)
    gc.collect(0)
    p.data = values.clone()


@write(SEEN)
def vector_to_parameters(p: Parameter, values: Tensor) -> None:
    torch.nn.utils.vector_to_parameters(values.flatten().clone(), [p])


@write(SEEN)
def set_(p: Parameter, values: Tensor) -> None:
    with torch.no_grad():
        p.set_(values.clone())


@write(SEEN)
def converted_and_back(p: Parameter, values: Tensor) -> None:
    module = nn.Module()
    module.weight = p
    module.half()
    p.data.copy_(values)
    module.float()


@write(SEEN)
def load_state_dict(p: Parameter, values: Tensor) -> None:
    module = nn.Module()
    module.weight = p
    module.load_state_dict({"weight": values})


class Through(torch.optim.Optimizer):
    """Writes through `.data`, as many optimizers outside torch do."""

    def __init__(self, p: Parameter, values: Tensor) -> None:
        super().__init__([p], {})
        self.write = lambda: p.data.copy_(values)

    def step(self, closure=None):
        self.write()


@write(SEEN)
def optimizer_through_data(p: Parameter, values: Tensor) -> None:
    Through(p, values).step()


class Interrupted(Through):
    def step(self, closure=None):
        self.write()
        raise KeyboardInterrupt


@write(SEEN)
def optimizer_interrupted(p: Parameter, values: Tensor) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        Interrupted(p, values).step()


@write(SEEN)
def optimizer_fused(p: Parameter, values: Tensor) -> None:
    kept, p.grad = p.grad, p.detach() - values
    torch.optim.SGD([p], lr=1.0, fused=True).step()
    p.grad = kept


@write(BETWEEN)
def data_transposed(p: Parameter, values: Tensor) -> None:
    p.data = p.data.t()


@write(BETWEEN)
def scatter(p: Parameter, values: Tensor) -> None:
    with torch.no_grad():
        dist.scatter(p, [values])


@write(BETWEEN)
def all_to_all(p: Parameter, values: Tensor) -> None:
    with torch.no_grad():
        dist.all_to_all_single(p, values.contiguous())


@write(BETWEEN)
def array_that_lives(p: Parameter, values: Tensor) -> Any:
    array = p.detach().numpy()
    array[:] = values.numpy()
    return array


@write(BETWEEN)
def capsule_that_lives(p: Parameter, values: Tensor) -> Any:
    alias = torch.from_dlpack(p.detach())
    alias.copy_(values)
    return alias


@write(BETWEEN)
def data_that_lives(p: Parameter, values: Tensor) -> Any:
    data = p.data
    data.copy_(values)
    return data


@write(BETWEEN)
def flat_buffer(p: Parameter, values: Tensor) -> Any:
    """As FSDP and ZeRO do it: the weight is a piece of something that others fill."""
    flat = torch.zeros(32)
    p.data = flat[:16].view(4, 4)
    flat[:16].copy_(values.flatten())
    return flat


@write(BETWEEN)
def shared_memory(p: Parameter, values: Tensor) -> None:
    """Another process may write from here on; this one does."""
    p.data = p.data.clone().share_memory_()
    p.data.copy_(values)


@write(UNSEEN)
def data_in_place(p: Parameter, values: Tensor) -> None:
    p.data.copy_(values)


@write(UNSEEN)
def array(p: Parameter, values: Tensor) -> None:
    p.detach().numpy()[:] = values.numpy()


@write(UNSEEN)
def capsule(p: Parameter, values: Tensor) -> None:
    torch.from_dlpack(p.detach()).copy_(values)


@write(UNSEEN)
def storage(p: Parameter, values: Tensor) -> None:
    rest = p.untyped_storage().nbytes() // 4 - 16
    p.untyped_storage().copy_(torch.cat([values.flatten(), torch.zeros(rest)]).untyped_storage())


@write(UNSEEN)
def unsafe_view(p: Parameter, values: Tensor) -> None:
    with torch.no_grad():
        torch.ops.aten._unsafe_view(p, (4, 4)).copy_(values)


@write(UNSEEN)
def version_preserved(p: Parameter, values: Tensor) -> None:
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(p):
        p.copy_(values)


@write(UNSEEN)
def fused_without_optimizer(p: Parameter, values: Tensor) -> None:
    with torch.no_grad():
        torch._fused_sgd_(
            [p], [p.detach() - values], [], weight_decay=0.0, momentum=0.0, lr=1.0, dampening=0.0, nesterov=False,
            maximize=False, is_first_step=False,
        )


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
        name = draw.choice([name for name in table if name != "data_transposed"])      # others need it contiguous
        alive[n].append(table[name](p, values(draw)))
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


@pytest.mark.parametrize("name", [*SEEN, *BETWEEN, *UNSEEN])
def test_writes_write(name):
    """And each as its table says: what moves the version counter is not called unseen."""
    p, new = Parameter(torch.eye(4) * torch.arange(1.0, 5.0)), values(random.Random(0))
    version = p._version
    kept = {**SEEN, **BETWEEN, **UNSEEN}[name](p, new)
    assert torch.equal(p.detach(), p.detach() if name == "data_transposed" else new)
    assert name in SEEN or p._version == version
    del kept


@pytest.mark.parametrize("name", BETWEEN)
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_seen_between_regions(name, frozen):
    cache, p = WeightCache(), Parameter(torch.arange(16.0).view(4, 4), not frozen)
    with autocast("cpu", BF16, cache=cache):
        used(p)
    kept = BETWEEN[name](p, torch.full((4, 4), 3.0))
    with autocast("cpu", BF16, cache=cache):
        assert torch.equal(used(p), fresh(p))
    del kept
