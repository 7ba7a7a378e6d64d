"""Host time of a step, of unscaling and of clipping, without the launches themselves.

Every side runs all of its Python; its launches are replaced by no-ops. On ampkit's side that is the launch of a Triton
kernel, on torch's the operator over the whole list: the times contain neither Triton's binding of arguments (some
microseconds a launch, for any list) nor torch's packing of addresses in C++, nor a GPU's driver. Small scalar
operations run on both sides. The checks whether kernels can run are patched, so this needs Triton and no GPU; tensors
are short and on the CPU.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ampkit import GradScaler
from ampkit.optim import SGD, AdamW
from benchmarks.case import AMPKIT, TORCH_OPERATORS, Aim, Case, Side, UnavailableError

SCALE = 2.0
SIZES = (1, 150, 1000)
STEPS = ("AdamW step", "SGD step")
LIMITS = {"AdamW step": 1.0, "SGD step": 1.0, "unscale": 1.2, "clip": 1.2}
_IN_PLACE = (
    "_fused_adamw_",
    "_fused_sgd_",
    "_foreach_add_",
    "_foreach_sub_",
    "_foreach_mul_",
    "_amp_foreach_non_finite_check_and_unscale_",
)


def nothing(*_: Any, **__: Any) -> None:
    """In place of a launch."""


@contextlib.contextmanager
def without_launches(norms: list[Tensor]) -> Iterator[None]:
    """Replace the launches of both sides; `norms` is the result of torch's norm of a list."""
    from ampkit_kernels import implementation
    from ampkit_kernels.triton_ops.unscale import unscale_kernel

    stand_ins: list[tuple[Any, str, Any]] = [
        *((torch, name, nothing) for name in _IN_PLACE),
        (torch, "_foreach_norm", lambda *_, **__: norms),
        (type(unscale_kernel), "__getitem__", lambda *_, **__: nothing),
        (implementation, "why_not_triton", nothing),
        (implementation, "AUTO", ("cuda", "cpu")),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, stand_in in stand_ins:
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield


@dataclass(frozen=True, kw_only=True)
class Host(Case):
    """One job on `count` parameters in `groups` parameter groups. `moving`: gradients have new addresses each time."""

    job: str
    count: int
    groups: int = 1
    moving: bool = False
    family: str = "host"
    devices: tuple[str, ...] = ("cpu",)
    base: str = TORCH_OPERATORS
    everyday: bool = False
    sample_seconds: float = 5e-3

    def sides(self, device: torch.device) -> dict[str, Side]:
        if find_spec("triton") is None:
            raise UnavailableError("Triton is not installed")
        return {AMPKIT: self._side(True), TORCH_OPERATORS: self._side(False)}

    def _side(self, ours: bool) -> Side:
        params = [torch.nn.Parameter(torch.zeros(8)) for _ in range(self.count)]
        grads = [[torch.zeros(8) for _ in params] for _ in range(2 if self.moving else 1)]
        norms = [torch.ones(()) for _ in params]
        groups = [{"params": params[i :: self.groups]} for i in range(self.groups)]
        optimizer = self._optimizer(groups, ours)
        scaler = (GradScaler if ours else torch.amp.GradScaler)("cpu", SCALE)
        scaler.scale(torch.ones((), requires_grad=True))
        job = self._job(optimizer, scaler, params)
        turns = itertools.cycle(grads)

        def put() -> None:
            for param, grad in zip(params, next(turns), strict=True):
                param.grad = grad

        put()

        def run(calls: int) -> None:
            with without_launches(norms):
                for _ in range(calls):
                    if self.moving:
                        put()
                    job()

        return Side(run)

    def _optimizer(self, groups: list[dict[str, Any]], ours: bool) -> torch.optim.Optimizer:
        if self.job == "SGD step":
            if ours:
                return SGD(groups, lr=1e-3, momentum=0.9, impl="triton")
            return torch.optim.SGD(groups, lr=1e-3, momentum=0.9, fused=True)
        return AdamW(groups, impl="triton") if ours else torch.optim.AdamW(groups, fused=True)

    def _job(self, optimizer: Any, scaler: Any, params: list[torch.nn.Parameter]) -> Callable[[], object]:
        if self.job in STEPS:
            return optimizer.step
        if self.job == "clip":
            optimizer = torch.optim.SGD(params, lr=1.0)  # takes no multiplier: clipping rewrites gradients

        def job() -> None:
            scaler._per_optimizer_states.clear()  # READY again without update(), which is timed elsewhere
            if self.job == "clip" and isinstance(scaler, GradScaler):
                scaler.clip_grad_norm_(optimizer, 1.0)
                return
            scaler.unscale_(optimizer)
            if self.job == "clip":
                torch.nn.utils.clip_grad_norm_(params, 1.0)

        return job


def cases() -> list[Case]:
    """Every job on lists of three lengths, and steps under harder conditions."""

    def case(job: str, count: int, label: str = "", **more: Any) -> Host:
        name = f"{job}, {count} parameter{'s' * (count > 1)}{label}"
        aims = (Aim(AMPKIT, LIMITS[job], TORCH_OPERATORS),)
        return Host(name=name, job=job, count=count, aims=aims, **more)

    all_cases: list[Case] = [case(job, count) for job in LIMITS for count in SIZES]
    all_cases += [case(job, 1000, ", moving gradients", moving=True) for job in LIMITS]
    return [*all_cases, *(case(job, 140, ", a group each", groups=140) for job in STEPS)]
