"""Parameters that are replicated on several ranks and differ.

Ranks exchange checksums through the store that they were started with, and never wait for each other: a rank reads the
checksums that are there already. So a rank may take fewer steps, and at least the slower of two ranks finds a
difference. Compared are parameters under `DistributedDataParallel`, and others whose gradients are the same on both
ranks: gradients that a loop averages itself. Parameters that become equal again are averaged by the loop, as in local
SGD, and differ on purpose. Not compared are shards (DTensor, FSDP), and buffers: between two forwards each rank has
its own statistics of batch norm.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ampkit.debugging.checks.check import Add, Check, is_plain
from ampkit.debugging.finding import Cause
from ampkit.debugging.observe.observer import Observer
from ampkit.debugging.observe.ranks import rank
from ampkit.gradients.collect import parameters as parameters_of
from ampkit.torch_private import is_flat, loaded

_SLOTS = 8  # comparisons that the store holds
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_sessions = itertools.count()  # examinations of this process


class _Checksums(NamedTuple):
    """The checksums of a rank before a step."""

    step: int
    values: list[int]
    gradients: list[int]


class Replicas(Check):
    """Compares checksums of each optimizer's parameters and gradients. Needs no dispatch mode and no collective."""

    name = "replicas"
    needs_operators = False

    def __init__(self, run: Observer, add: Add) -> None:
        super().__init__(run, add)
        self._session = next(_sessions)
        self._store: Any = None
        self._rank, self._ranks = 0, 1
        self._replicated: set[int] = set()  # identities of parameters under DistributedDataParallel
        self._steps: dict[Optimizer, int] = {}
        self._own: dict[str, tuple[Optimizer, _Checksums]] = {}  # by key of the store
        # By optimizer and other rank: the first step with a difference, the parameter, whether the gradients are the
        # same; and the last step in which all parameters were equal.
        self._differs: dict[tuple[Optimizer, int], tuple[int, Tensor, bool]] = {}
        self._equal: dict[tuple[Optimizer, int], int] = {}

    def step_starts(self, optimizer: Optimizer, closure: bool) -> None:
        step = self._steps[optimizer] = self._steps.get(optimizer, -1) + 1
        self.place_of(optimizer)
        if rank() is not None and torch.distributed.is_initialized():
            self._exchange(optimizer, str(step % _SLOTS))

    def ended(self) -> None:
        for optimizer in self._steps if self._store is not None else ():
            self._steps[optimizer] += 1
            self._exchange(optimizer, "end")
        found = {key: each for key, each in self._differs.items() if each[0] > self._equal.get(key, -1)}
        for (optimizer, other), (step, p, same) in [*found.items()][:1]:
            why = "their gradients are the same: they differed when training began, or a rank changed them since"
            fix = "broadcast the parameters of rank 0 before the first step, and change them on all ranks alike"
            if not same:
                why = "their gradients differ: DistributedDataParallel does not average them"
                fix = "call the wrapped model, not its `module`; find_unused_parameters=True; "
                fix += "backward outside of no_sync()"
            what = f"{self.run.names_of([p])} differs on ranks {min(self._rank, other)} and {max(self._rank, other)}"
            self.found(self.place_of(optimizer), "error", Cause("differs", why), what, fix, step=step)

    def _exchange(self, optimizer: Optimizer, slot: str) -> None:
        """Publish the checksums of an optimizer, and compare the ones that other ranks have published."""
        if self._store is None:
            self._store = loaded("distributed.distributed_c10d", "_get_default_store")()
            self._rank, self._ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
            for module in gc.get_objects():
                if type(module) is DistributedDataParallel:
                    named = module.module.named_parameters()
                    self._replicated |= {id(p) for name, p in named if name not in module.parameters_to_ignore}
        parameters = _plain(optimizer)
        gradients = [p.grad for p in parameters if p.grad is not None and is_plain(p.grad)]
        own = _Checksums(self._steps[optimizer], _checksums(parameters), _checksums(gradients))
        key = f"ampkit/{self._session}/{[*self._steps].index(optimizer)}/{slot}"
        self._own[key] = optimizer, own
        with contextlib.suppress(RuntimeError):  # the process that holds the store has ended
            self._store.set(f"{key}/{self._rank}", json.dumps(own))
            self._compare()

    def _compare(self) -> None:
        for key, (optimizer, own) in self._own.items():
            for other in {(self._rank + 1) % self._ranks, (self._rank - 1) % self._ranks}:
                if not self._store.check([f"{key}/{other}"]):
                    continue
                theirs = _Checksums(*json.loads(self._store.get(f"{key}/{other}")))
                if own.step != theirs.step or len(own.values) != len(theirs.values):
                    continue
                pairs = zip(_plain(optimizer), own.values, theirs.values, strict=True)
                different, of = [p for p, value, their_value in pairs if value != their_value], (optimizer, other)
                if not different:
                    self._equal[of] = max(own.step, self._equal.get(of, -1))
                same = own.gradients == theirs.gradients and any(own.gradients)
                p = next((p for p in different if same or id(p) in self._replicated), None)
                if p is not None and own.step < self._differs.get(of, (math.inf, p, same))[0]:
                    self._differs[of] = own.step, p, same


def _plain(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer that are whole tensors."""
    return [p for p in parameters_of(optimizer) if is_plain(p) and not is_flat(p)]


def _checksums(tensors: Sequence[Tensor]) -> list[int]:
    """Return the sum of the bits of each tensor, as integers: it does not depend on the order of the additions."""
    with torch.no_grad():
        bits = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors]
        sums = [each.view(_INTEGERS[each.element_size()]).sum(dtype=torch.int64) for each in bits]
        return torch.stack([each.to(sums[0].device) for each in sums]).tolist() if sums else []
