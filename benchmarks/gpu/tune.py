"""Try other launch parameters for the streaming kernels and say which would have been fastest.

What to expect, written before any run: the kernels are bound by memory, so every configuration that keeps about 40 KB
in flight per multiprocessor should come within a few percent of the others; 1024-element blocks with 4 warps should
lose on long lists, programs per multiprocessor above what registers allow should change nothing.
"""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .device import must_answer
from .jobs import Material
from .lists import LISTS, REHEARSAL
from .timing import interleaved, quantiles

BLOCKS = (1024, 2048, 4096, 8192)
WARPS = (4, 8)
PROGRAMS = (2, 4, 8)


def tune(out: Path, device: torch.device, rehearsal: bool, seconds: float) -> None:
    """Time unscale, norm and AdamW over the grid, best first, into `out/tuning.jsonl`."""
    from ampkit_kernels.configs import Config

    name = next(iter(REHEARSAL if rehearsal else LISTS))
    material = Material((REHEARSAL if rehearsal else LISTS)[name](), device, torch.float32)
    grid = [Config(b, w, max(b, 65536), p) for b in BLOCKS for w in WARPS for p in PROGRAMS]
    if rehearsal:
        grid = grid[:2]
    started = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    with (out / "tuning.jsonl").open("w") as rows:
        runs = candidates(material)
        for position, (kernel, (shipped, run)) in enumerate(runs.items()):
            share = started + seconds * (1 + position) / len(runs)
            for config in [shipped, *grid]:
                if time.perf_counter() > share:
                    break
                taken = _time(run, config, device, rehearsal)
                line = {"kernel": kernel, "list": name, "block": config.block, "warps": config.num_warps}
                line |= {"programs": config.programs_per_multiprocessor, "shipped": config is shipped, **taken}
                rows.write(json.dumps(line) + "\n")
                rows.flush()


def candidates(m: Material) -> dict[str, tuple[Any, Callable[[Any], object]]]:
    """The configuration that each kernel ships with, and its launcher with the configuration left open."""
    from ampkit_kernels import adamw, norm, unscale

    masters, first, second = [param.detach() for param in m.params], m.states(), m.states()
    steps: Sequence[torch.Tensor] = [torch.zeros((), device=m.device) for _ in m.params]
    options = {
        "lr": 1e-6, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False,
        "maximize": False, "multiplier": None, "grad_scale": None, "found_inf": None, "copies": None,
    }  # fmt: skip
    return {
        "unscale": (
            unscale.CONFIGS[4], lambda config: unscale.unscale_(m.grads, m.inv_scale, m.found_inf, config)
        ),
        "norm": (
            norm.CONFIGS[4], lambda config: norm.norm_and_check(m.grads, m.inv_scale, m.found_inf, 2.0, config)
        ),
        "adamw": (
            adamw.CONFIGS[4],
            lambda config: adamw.adamw_(masters, m.grads, first, second, [], steps, config=config, **options),
        ),
    }


def _time(run: Callable[[Any], object], config: Any, device: torch.device, rehearsal: bool) -> dict:
    try:
        samples = interleaved({"it": lambda: run(config)}, device, 3 if rehearsal else 10, 2, 0.5)["it"]
    except Exception as error:  # a configuration that does not fit is a result too
        must_answer(device)
        return {"error": repr(error)[:200]}
    return {"device_ms": quantiles([s.device_ms for s in samples])[0]}
