"""What loss scaling costs: unscale, norm, clip and step over lists of gradients, and the scaler's own Python.

Before every sample the gradients are restored, untimed, so that they do not shrink to zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ampkit import GradScaler
from ampkit.optim import AdamW
from benchmarks.case import AMPKIT, OWN_OPTIMIZER, TORCH, Aim, Case, Side, WrongAnswerError

SCALE = 2.0  # not 1, and exact


class Idle(torch.optim.SGD):
    """An optimizer whose step does nothing, to time the scaler alone."""

    def step(self, closure: Any = None) -> None:
        del closure


@dataclass(frozen=True, kw_only=True)
class Scaling(Case):
    """One scaler iteration's work on `tensors` float32 gradients of `elements` each.

    `job`: "unscale" (`unscale_`), "clip" (unscale, check, norm and clip), "clip + AdamW" (that and a fused step),
    "AdamW" (the scaled step alone, and `update`), or "python" (`scale`, `step`, `update` around an optimizer that does
    nothing; elements are few).
    """

    job: str = "unscale"
    tensors: int = 1
    elements: int = 4
    family: str = "scaler"

    def sides(self, device: torch.device) -> dict[str, Side]:
        if "AdamW" not in self.job:
            return {TORCH: self._side(torch.amp.GradScaler, Idle, device), AMPKIT: self._side(GradScaler, Idle, device)}
        fused = functools.partial(torch.optim.AdamW, fused=True)
        return {
            TORCH: self._side(torch.amp.GradScaler, fused, device),
            AMPKIT: self._side(GradScaler, fused, device),
            OWN_OPTIMIZER: self._side(GradScaler, functools.partial(AdamW, fused=True), device),
        }

    def _side(self, make_scaler: Callable[..., Any], make_optimizer: Callable[..., Any], device: torch.device) -> Side:
        generator = torch.Generator(device).manual_seed(0)
        params = [torch.nn.Parameter(torch.zeros(self.elements, device=device)) for _ in range(self.tensors)]
        grads = [torch.randn(self.elements, device=device, generator=generator) for _ in params]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        optimizer = make_optimizer(params, lr=1e-6)
        scaler = make_scaler(device.type, SCALE, growth_interval=2**30)
        loss = torch.ones((), device=device, requires_grad=True)
        scaler.scale(loss)

        def clip() -> None:
            if isinstance(scaler, GradScaler):
                scaler.clip_grad_norm_(optimizer, 1.0)
            else:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(params, 1.0)

        def step() -> None:
            scaler.step(optimizer)
            scaler.update()

        jobs: dict[str, tuple[Callable[[], object], ...]] = {
            # Cleared, the scaler is READY again without update(), which is timed elsewhere.
            "unscale": (lambda: scaler.unscale_(optimizer), scaler._per_optimizer_states.clear),
            "clip": (clip, scaler._per_optimizer_states.clear),
            "clip + AdamW": (clip, step),
            "AdamW": (lambda: None, step),
            "python": (lambda: scaler.scale(loss), step),
        }
        first, then = jobs[self.job]

        def run(calls: int) -> None:
            for _ in range(calls):
                first()
                then()

        def restore() -> None:
            with torch.no_grad():
                torch._foreach_copy_([_grad(param) for param in params], grads)

        def result() -> list[torch.Tensor]:
            return [param.detach() if "AdamW" in self.job else _grad(param) for param in params]

        return Side(run, before=restore, result=result)

    def check(self, sides: Mapping[str, Side]) -> None:
        """Every side computed the base's gradients, or parameters where there is a step, to within rounding."""
        for side in sides.values():
            if side.before is not None:
                side.before()
            side.run(1)
        wanted = sides[self.base].result()
        # On a GPU the norms add up in another order than torch's, and the fused steps round differently.
        rtol = 2e-6 if wanted[0].device.type == "cpu" else 2e-5
        for name, side in sides.items():
            for ours, theirs in zip(side.result(), wanted, strict=True):
                if not torch.allclose(ours, theirs, rtol=rtol, atol=1e-12):
                    raise WrongAnswerError(f"{self.name}: {name} computed other values than {self.base}")


def _grad(param: torch.Tensor) -> torch.Tensor:
    if param.grad is None:
        raise WrongAnswerError("a scaler dropped a gradient")
    return param.grad


def cases() -> list[Case]:
    """Large lists, bound by bytes; small lists, bound by Python; the scaler's own Python; one tensor."""
    aims = {"unscale": (Aim(AMPKIT, 1.1),), "clip": (Aim(AMPKIT, 0.75),)}
    small = (Aim(AMPKIT, 1.1), Aim(OWN_OPTIMIZER, 1.1))
    all_cases: list[Case] = [
        Scaling(
            name=f"{job}, {tensors} x {label}",
            job=job,
            tensors=tensors,
            elements=elements,
            aims=aims.get(job, ()),
            seconds=2.5,
        )
        for job in ("unscale", "clip", "clip + AdamW")
        for tensors, elements, label in ((50, 200_000, "200k"), (8, 4_000_000, "4M"))
    ]
    all_cases += [
        Scaling(name=f"{job}, 100 x 1k", job=job, tensors=100, elements=1000, aims=small)
        for job in ("AdamW", "clip + AdamW")
    ]
    all_cases += [
        Scaling(
            name=f"scale + step + update, {count} parameter{'s' * (count > 1)}",
            job="python",
            tensors=count,
            sample_seconds=1e-3,
            aims=(Aim(AMPKIT, 1.0),),
            seconds=1.5,
        )
        for count in (1, 10, 100, 1000)
    ]
    return all_cases + [
        Scaling(
            name=f"clip, one tensor of 1e{power}",
            job="clip",
            elements=10**power,
            seconds=1.5,
            devices=("cpu", "cuda") if power <= 7 else ("cuda",),
        )
        for power in (3, 5, 7, 9)
    ]
