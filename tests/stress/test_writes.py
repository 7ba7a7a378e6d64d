"""Weights are written in every way that docs/performance.md lists, anywhere in random programs: no cast is stale.

The oracle is a new cast at each use. `UNSEEN` has the writes that a cache cannot see; programs call `clear()` after
those, as the docstring of `WeightCache` says.
"""

import contextlib
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ampkit import WeightCache, autocast, clear_autocast_cache
from ampkit.engine import weight_cache
from tests.stress.budget import rounds

pytestmark = pytest.mark.timeout(300 + float(os.environ.get("AMPKIT_SOAK_SECONDS") or 0))

BF16 = torch.bfloat16
X = torch.eye(4, dtype=BF16)


class Through(torch.optim.Optimizer):
    """An optimizer that writes through `.data`, as many outside torch do, and may be interrupted after the write."""

    def __init__(self, p: Parameter, values: Tensor, interrupted: bool = False) -> None:
        super().__init__([p], {})
        self.p, self.values, self.interrupted = p, values, interrupted

    def step(self, closure: Any = None) -> Any:
        self.p.data.copy_(self.values)
        if self.interrupted:
            raise KeyboardInterrupt


def converted_and_loaded(p: Parameter, v: Tensor) -> None:
    module = nn.Module()
    module.weight = p
    module.half().float().load_state_dict({"weight": v})


def optimizer_interrupted(p: Parameter, v: Tensor) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        Through(p, v, interrupted=True).step()


def optimizer_fused(p: Parameter, v: Tensor) -> None:
    kept, p.grad = p.grad, p.detach() - v
    torch.optim.SGD([p], lr=1.0, fused=True).step()
    p.grad = kept


def written(alias: Any, v: Any) -> Any:
    """Write to an alias of the weight, and return the alias to keep it alive."""
    alias[:] = v
    return alias


def added(p: Parameter, v: Tensor) -> None:
    """As adapters are merged into a weight."""
    p.data += v - p.detach()


def flat_buffer(p: Parameter, v: Tensor) -> Any:
    """As in FSDP and ZeRO: the weight is a piece of a buffer that other code fills."""
    flat = torch.zeros(32)
    p.data = flat[:16].view(4, 4)
    flat[:16].copy_(v.flatten())
    return flat


def shared_memory(p: Parameter, v: Tensor) -> None:
    """Another process may write from here on; this one does."""
    p.data = p.data.clone().share_memory_()
    p.data.copy_(v)


def data_transposed(p: Parameter, v: Tensor) -> None:
    """The same memory in another layout."""
    p.data.copy_(v.t())
    p.data = p.data.t()


# A write gives a weight new values, with gradients off. The aliases that writes of BETWEEN return are kept alive.
Write = Callable[[Parameter, Tensor], Any]
SEEN: dict[str, Write] = {  # wherever the weight is cached
    "in place": lambda p, v: p.copy_(v),
    "in place, detached": lambda p, v: torch.enable_grad()(p.detach().copy_)(v),
    "in inference mode": lambda p, v: torch.inference_mode()(p.copy_)(v),
    "through views": lambda p, v: (p[1:, :2].copy_(v[1:, :2]), p[1:, 2:].copy_(v[1:, 2:]), p[0].copy_(v[0])),
    "out": lambda p, v: torch.add(v, 0.0, out=p),
    # The second storage may have the address of the first.
    "data offloaded": lambda p, v: (setattr(p, "data", torch.empty(0)), setattr(p, "data", v.clone())),
    "set_": lambda p, v: p.set_(v.clone()),  # pyright: ignore[reportArgumentType]  its stubs know storages only
    "converted and loaded": converted_and_loaded,
    "optimizer through data": lambda p, v: Through(p, v).step(),
    "optimizer interrupted": optimizer_interrupted,
    "optimizer fused": optimizer_fused,
}
BETWEEN: dict[str, Write] = {  # seen between regions; inside a region torch.amp, too, goes on with its cast
    "data transposed": data_transposed,
    "array that lives": lambda p, v: written(p.detach().numpy(), v.numpy()),
    "data that lives": lambda p, v: written(p.data, v),
    "flat buffer": flat_buffer,
    "shared memory": shared_memory,
}
IN_A_WEIGHT_CACHE: dict[str, Write] = {  # seen between regions, and of frozen weights in them, by a `WeightCache`
    "data in place": lambda p, v: p.data.copy_(v),
    "data added to": lambda p, v: added(p, v),
}
UNSEEN: dict[str, Write] = {  # clear() is needed
    "array": lambda p, v: written(p.detach().numpy(), v.numpy()),
    "fused without an optimizer": lambda p, v: torch._fused_sgd_(
        [p],
        [p.detach() - v],
        [],
        weight_decay=0.0,
        momentum=0.0,
        lr=1.0,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    ),
}
WRITES = SEEN | BETWEEN | IN_A_WEIGHT_CACHE | UNSEEN


@torch.no_grad()
def write(name: str, p: Parameter, v: Tensor) -> Any:
    """Write, and return the alias to keep alive, if there is one. A write that bumps the version counter is in SEEN."""
    version = p._version
    alias = WRITES[name](p, v)
    assert torch.equal(p, v)
    assert name in SEEN or p._version == version
    return alias if name in BETWEEN else None


def values(draw: random.Random) -> Tensor:
    """Values that bfloat16 can hold."""
    return torch.tensor([float(draw.randrange(1, 128)) for _ in range(16)]).view(4, 4)


def program(draw: random.Random, cache: WeightCache | None, frozen: bool) -> None:
    """Some uses and writes of three weights, in some regions, each use compared with a fresh cast."""
    weights = [Parameter(values(draw), not frozen) for _ in range(3)]
    alive: list[list[Any]] = [[], [], []]  # aliases of each weight, which live until it is used
    history: list[str] = []
    torch_is_stale: set[int] = set()  # trained, written unseen in the open region, and not cleared

    def step(open_region: bool) -> None:
        n = draw.randrange(3)
        p = weights[n]
        if open_region and draw.random() < 0.6:
            with draw.choice([contextlib.nullcontext, torch.no_grad, torch.inference_mode])():
                product = torch.mm(X, p).detach()
            history.append(f"use {n}")
            assert n in torch_is_stale or torch.equal(product, p.detach().to(BF16)), "\n".join(history)
            if draw.random() < 0.5:
                alive[n].clear()
            return
        table = draw.choice([SEEN, BETWEEN, IN_A_WEIGHT_CACHE, UNSEEN])
        name = draw.choice(list(table))
        alive[n].append(write(name, p, values(draw)))
        history.append(f"{name} {n}")
        torch_is_stale.discard(n)
        if table is SEEN or (not open_region and (table is BETWEEN or cache is None)):
            return
        if table is IN_A_WEIGHT_CACHE and cache is not None and (frozen or not open_region):
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
            history.append("region")
            for _ in range(draw.randrange(12)):
                step(open_region=True)
        torch_is_stale.clear()
        history.append("left")
        for _ in range(draw.randrange(4)):
            step(open_region=False)


def test_no_use_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """In regions with a `WeightCache` and without, of trained and of frozen weights, connected or cast again."""
    for draw in rounds("writes", 120):
        monkeypatch.setattr(weight_cache, "SMALLEST_CONNECTED", draw.choice([0, 0, 1 << 16]))
        for kept in (False, True):
            for frozen in (False, True):
                program(draw, WeightCache() if kept else None, frozen)
