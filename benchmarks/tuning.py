"""Launch parameters for the streaming kernels, compared with the shipped ones, timed by CUDA events.

Expected, written before any run: the kernels are bound by memory, so every configuration that keeps about 40 KB
in flight per multiprocessor should come within a few percent of the others; 1024-element blocks with 4 warps should
lose on long lists, programs per multiprocessor above what registers allow should change nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

import ampkit_kernels
from ampkit_kernels.configs import Config
from benchmarks.case import Case, Side, UnavailableError
from benchmarks.device import must_answer
from benchmarks.kernels import Material
from benchmarks.parameter_lists import LISTS, REHEARSAL
from benchmarks.timing import Run

SHIPPED = "shipped"
GRID = [Config(b, w, max(b, 65536), p) for b in (1024, 2048, 4096, 8192) for w in (4, 8) for p in (2, 4, 8)]


@dataclass(frozen=True, kw_only=True)
class Tuning(Case):
    """One kernel on one list; a side is a configuration. One that does not fit the device is left out.

    Compiling takes a second per configuration: no further one is begun after `compile_seconds`.
    """

    kernel: str = "unscale"
    family: str = "tuning"
    base: str = SHIPPED
    everyday: bool = False
    events: bool = True
    seconds: float = 2.0
    compile_seconds: float = 11.0

    def sides(self, device: torch.device) -> dict[str, Side]:
        reason = ampkit_kernels.why_not_triton(device)
        if reason is not None:
            raise UnavailableError(reason)
        on_gpu = device.type == "cuda"
        shapes = next(iter((LISTS if on_gpu else REHEARSAL).values()))()
        shipped, launch = launcher(self.kernel, Material(shapes, device, torch.float32))
        found = {f"{SHIPPED}: {describe(shipped)}": shipped}
        found |= {describe(config): config for config in (GRID if on_gpu else GRID[:2])}
        sides: dict[str, Side] = {}
        deadline = time.perf_counter() + self.compile_seconds
        for name, config in found.items():
            if sides and time.perf_counter() > deadline:
                break
            try:
                launch(config)
                must_answer(device)
            except Exception as error:
                must_answer(device)
                if not sides:
                    raise RuntimeError(f"{self.kernel} does not run as shipped: {error}") from error
                continue
            shown = name if sides else SHIPPED
            sides[shown] = Side(_repeated(launch, config), facts=lambda name=name: {"configuration": name})
        return sides


def describe(config: Config) -> str:
    """A configuration in words."""
    return f"block {config.block}, warps {config.num_warps}, programs {config.programs_per_multiprocessor}"


def _repeated(launch: Callable[[Config], object], config: Config) -> Run:
    def run(calls: int) -> None:
        for _ in range(calls):
            launch(config)

    return run


# The module of a kernel, and what launches it. Triton is imported late.
def _unscale(m: Material) -> tuple[Any, Callable[[], object]]:
    from ampkit_kernels.triton_ops import unscale

    return unscale, lambda: unscale.unscale_(m.grads, m.inv_scale, m.found_inf)


def _norm(m: Material) -> tuple[Any, Callable[[], object]]:
    from ampkit_kernels.triton_ops import norm

    return norm, lambda: norm.norm_and_check(m.grads, m.inv_scale, m.found_inf)


def _adamw(m: Material) -> tuple[Any, Callable[[], object]]:
    from ampkit_kernels.triton_ops import adamw

    masters, first, second = [param.detach() for param in m.params], m.states(), m.states()
    steps = [torch.zeros((), device=m.device) for _ in m.params]
    options: dict[str, Any] = {"lr": 1e-6, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
    return adamw, lambda: adamw.adamw_(masters, m.grads, first, second, [], steps, **options)


LAUNCHERS = {"unscale": _unscale, "norm": _norm, "adamw": _adamw}


def launcher(kernel: str, material: Material) -> tuple[Config, Callable[[Config], object]]:
    """The configuration that a kernel ships with, and what launches it with another."""
    module, run = LAUNCHERS[kernel](material)

    def launch(config: Config) -> None:
        with mock.patch.object(module, "CONFIGS", dict.fromkeys(module.CONFIGS, config)):
            run()

    return module.CONFIGS[4], launch


def cases() -> list[Case]:
    """A case per kernel."""
    return [Tuning(name=kernel, kernel=kernel) for kernel in LAUNCHERS]
