"""Launch parameters for the streaming kernels, compared with the shipped ones, timed by CUDA events.

Expected, written before any run: the kernels are bound by memory, so every configuration that keeps about 40 KB
in flight per multiprocessor should come within a few percent of the others; 1024-element blocks with 4 warps should
lose on long lists, programs per multiprocessor above what registers allow should change nothing.
"""

from __future__ import annotations

import importlib
import time
from dataclasses import dataclass
from unittest import mock

import torch

import ampkit_kernels
from ampkit_kernels.configs import Config
from benchmarks.case import AMPKIT, Case, Side, UnavailableError
from benchmarks.device import must_answer
from benchmarks.kernels import JOBS, Material
from benchmarks.parameter_lists import LISTS, REHEARSAL

SHIPPED = "shipped"
GRID = [Config(b, w, max(b, 65536), p) for b in (1024, 2048, 4096, 8192) for w in (4, 8) for p in (2, 4, 8)]
# By job the kernel whose configurations are compared; the job with factor 1 is the norm alone.
KERNELS = {"unscale": "unscale", "unscale + clip, factor 1": "norm", "AdamW step": "optimizer_step"}


@dataclass(frozen=True, kw_only=True)
class Tuning(Case):
    """One kernel on one list; a side is a configuration. One that does not fit the device is left out.

    Compiling takes a second per configuration: no further one is begun after `compile_seconds`.
    """

    job: str
    family: str = "tuning"
    base: str = SHIPPED
    everyday: bool = False
    events: bool = True
    compile_seconds: float = 11.0

    def sides(self, device: torch.device) -> dict[str, Side]:
        reason = ampkit_kernels.why_not_triton(device)
        if reason is not None:
            raise UnavailableError(reason)
        on_gpu = device.type == "cuda"
        shapes = next(iter((LISTS if on_gpu else REHEARSAL).values()))()
        material = Material(shapes, device, torch.float32, impl="triton")
        sides = {SHIPPED: self.side(material, None)}
        sides[SHIPPED].run(1)
        deadline = time.perf_counter() + self.compile_seconds
        for config in GRID if on_gpu else GRID[:2]:
            if time.perf_counter() > deadline:
                break
            side = self.side(material, config)
            try:
                side.run(1)
                must_answer(device)
            except Exception:
                must_answer(device)
                continue
            warps, programs = config.num_warps, config.programs_per_multiprocessor
            sides[f"block {config.block}, warps {warps}, programs {programs}"] = side
        return sides

    def side(self, material: Material, config: Config | None) -> Side:
        """Return the job with another configuration of its kernel, or as it is shipped."""
        job = JOBS[self.job][0](material)[0][AMPKIT]
        module = importlib.import_module(f"ampkit_kernels.triton_ops.{KERNELS[self.job]}")
        configs = module.CONFIGS if config is None else dict.fromkeys(module.CONFIGS, config)

        def run(calls: int) -> None:
            with mock.patch.object(module, "CONFIGS", configs):
                for _ in range(calls):
                    job()

        return Side(run)


def cases() -> list[Case]:
    """Return a case per kernel."""
    return [Tuning(name=kernel, job=job) for job, kernel in KERNELS.items()]
