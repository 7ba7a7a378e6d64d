"""Whole training steps: fp32, torch.amp and ampkit on the same batches from the same weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks import counts, workloads
from benchmarks.case import (
    AMPKIT,
    OUTER,
    OWN_OPTIMIZER,
    REMAINDERS,
    SAME_LIST,
    STOCHASTIC,
    TORCH,
    Aim,
    Case,
    Side,
    WrongAnswerError,
)
from benchmarks.trainer import Trainer, Variant, ways
from benchmarks.workloads import Batch, Workload

WARM_UP = 3


@dataclass(frozen=True, kw_only=True)
class Training(Case):
    """Training steps of one workload in one variant. One call is one optimizer step."""

    workload: Callable[[], Workload]
    variant: Variant = field(default_factory=Variant)
    family: str = "training"
    seconds: float = 2.5

    def sides(self, device: torch.device) -> dict[str, Side]:
        workload = _drawn_once(self.workload())
        if self.variant.run in ("compiled", "around"):
            torch.compiler.reset()  # trainers share code objects; after eight recompilations torch runs one eagerly
        return {way: self.side(workload, way, device) for way in ways(self.variant, device)}

    def side(self, workload: Workload, way: str, device: torch.device) -> Side:
        """Training of the workload in one way."""
        trainer = Trainer(workload, self.variant, way, device)

        def run(calls: int) -> None:
            for _ in range(calls):
                trainer.step()

        def result() -> list[torch.Tensor]:
            while trainer.steps < WARM_UP:
                trainer.step()
            return [] if trainer.loss is None else [trainer.loss.float().mean()]

        def facts() -> dict[str, Any]:
            values: dict[str, Any] = {} if self.variant.run == "inference" else {"final_loss": result()[0].item()}
            if self.variant.run in ("eager", "inference"):
                # Otherwise the step frees gradients whose allocation the profiler may not have seen.
                trainer.optimizer.zero_grad()
                values |= counts.peak_and_copies(trainer.step, device)
            values["launches"] = counts.launches(trainer.step, device)
            return values

        return Side(run, result=result, facts=facts)

    def check(self, sides: Mapping[str, Side]) -> None:
        """With torch.amp's list the loss is torch.amp's after `WARM_UP` steps: on a CPU to the last bit.

        On a GPU atomic additions may change the order of sums, and clipping rounds once instead of twice.
        """
        exact = not self.variant.clip and self.variant.run in ("eager", "inference")
        losses = {name: side.result()[0] for name, side in sides.items()}
        wanted = losses[TORCH]
        for name in (SAME_LIST, OUTER):
            if name not in losses:
                continue
            loss = losses[name]
            equal = (
                torch.equal(loss, wanted)
                if exact and loss.device.type == "cpu"
                else torch.allclose(loss, wanted, rtol=2e-2, atol=1e-3)
            )
            if not equal:
                raise WrongAnswerError(
                    f"{self.name}: after {WARM_UP} steps the loss of {name} is {loss.item()}, "
                    f"that of {TORCH} {wanted.item()}"
                )


def _drawn_once(workload: Workload) -> Workload:
    """Return the workload with its micro-batches cached: all ways use the same, and some take gigabytes."""
    drawn: dict[int, list[Batch]] = {}

    def batches(count: int, generator: torch.Generator) -> list[Batch]:
        if count not in drawn:
            drawn[count] = workload.batches(count, generator)
        return drawn[count]

    return replace(workload, batches=batches)


BF16, FP16 = torch.bfloat16, torch.float16
EQUAL = (Aim(SAME_LIST, 1.0),)


# Without AVX-512 a CPU has no 16-bit LSTM, and a step of a larger model takes a second.
EVERYWHERE = ("cpu", "cuda")
FAST = EVERYWHERE if torch.ops.mkldnn._is_mkldnn_bf16_supported() else ("cuda",)


def small() -> list[Case]:
    """Return steps of about a millisecond, in which overhead is largest, with a scaler, with and without clipping."""
    models: tuple[tuple[str, Callable[[], Workload], tuple[str, ...]], ...] = (
        ("transformer, d=32, 2 x 16 tokens", lambda: workloads.gpt(32, 4, 2, 16, 256, 2), EVERYWHERE),
        ("convolutions, batch norm", lambda: workloads.resnet(8, (1, 1), 4, 32, 10), EVERYWHERE),
        ("LSTM, d=32, 4 x 16 tokens", lambda: workloads.lstm(32, 2, 4, 16, 64), FAST),
    )
    return [
        Training(
            name=f"{name}, {variant}",
            family="small",
            workload=workload,
            variant=variant,
            devices=devices,
            aims=(Aim(AMPKIT, 1.1),),
            seconds=2.5,
        )
        for name, workload, devices in models
        for variant in (Variant(scaled=True), Variant(scaled=True, clip=True))
    ]


def compiled() -> list[Case]:
    """Return a region around a compiled model, and one that is compiled with it."""
    all_cases: list[Case] = [
        Training(
            name=f"d={width}, 2 x 16 tokens, region around",
            family="compiled",
            variant=Variant(run="around"),
            workload=lambda width=width: workloads.gpt(width, 4, 2, 16, 256, 2),
            aims=(Aim(AMPKIT, 1.02),),
        )
        for width in (32, 128)
    ]
    variant = Variant(run="compiled")
    return all_cases + [
        Training(
            name=f"{name}, inductor, region inside",
            family="compiled",
            workload=workload,
            variant=variant,
            devices=devices,
            everyday=False,
        )
        for name, workload, devices in MODELS
    ]


MODELS: tuple[tuple[str, Callable[[], Workload], tuple[str, ...]], ...] = (
    ("digits CNN", workloads.digits, EVERYWHERE),
    ("char-GPT", workloads.characters, FAST),
    ("LSTM", lambda: workloads.lstm(128, 2, 16, 32), FAST),
)


def models() -> list[Case]:
    """Models that a CPU trains in seconds."""
    all_cases: list[Case] = []
    for name, workload, devices in MODELS:
        variants = [Variant(), Variant(accumulation=8) if name == "LSTM" else Variant(clip=True)]
        all_cases += [
            Training(name=f"{name}, {variant}", workload=workload, variant=variant, devices=devices)
            for variant in variants + [Variant(FP16)] * (name == "digits CNN")
        ]
        graph = Variant(run="graph")
        all_cases.append(Training(name=f"{name}, {graph}", workload=workload, variant=graph, devices=("cuda",)))
    return all_cases


def widths() -> list[Case]:
    """Return the same models at growing width, from overhead to arithmetic: a transformer of four blocks, an MLP."""
    transformers = {32: 1.09, 64: 1.08, 128: 1.04, 256: 1.02, 512: 1.01}
    mlps = {32: 1.12, 128: 1.10, 256: 1.06, 512: 1.02}
    all_cases: list[Case] = [
        Training(
            name=f"d={width}, 2 x 16 tokens",
            family="width",
            aims=(Aim(AMPKIT, limit),),
            devices=EVERYWHERE if width <= 128 else FAST,
            workload=lambda width=width: workloads.gpt(width, 4, 2, 16, 256, 2),
        )
        for width, limit in transformers.items()
    ]
    return all_cases + [
        Training(
            name=f"d={width}, 16 rows",
            family="mlp",
            aims=(Aim(AMPKIT, limit),),
            seconds=1.25,
            devices=EVERYWHERE if width <= 128 else FAST,
            workload=lambda width=width: workloads.mlp(width),
        )
        for width, limit in mlps.items()
    ]


def inference() -> list[Case]:
    """One forward in one region, without gradients: every weight is cast and used once."""
    variant = Variant(run="inference")
    models: tuple[tuple[str, Callable[[], Workload], float, float], ...] = (
        ("MLP, d=32", lambda: workloads.mlp(32), 1.35, 1.2),
        ("transformer, d=32", lambda: workloads.gpt(32, 4, 2, 16, 256, 2), 1.28, 1.12),
        ("transformer, d=256", lambda: workloads.gpt(256, 4, 2, 16, 256, 2), 1.08, 1.0),
    )
    return [
        Training(
            name=name,
            family="inference",
            seconds=2.0,
            variant=variant,
            workload=workload,
            aims=(Aim(AMPKIT, limit), Aim(OUTER, outer_limit)),
            devices=FAST if "256" in name else EVERYWHERE,
        )
        for name, workload, limit, outer_limit in models
    ]


def accumulation() -> list[Case]:
    """Eight micro-batches of few tokens, where casting the weights is much of the work."""
    variant = Variant(BF16, 8)
    return [
        Training(
            name=f"d={width}, {blocks} blocks, 1 x 8 tokens, {variant}",
            family="accumulation",
            variant=variant,
            seconds=seconds,
            workload=lambda width=width, blocks=blocks: workloads.gpt(width, blocks, 1, 8, 256, 2),
            aims=(Aim(OUTER, limit),),
        )
        for width, blocks, limit, seconds in ((32, 4, 1.25, 3.0), (256, 2, 1.0, 5.0))
    ]


def bfloat16_weights() -> list[Case]:
    """bfloat16 weights that lose no updates, compared with float32 weights and torch's fused AdamW."""
    return [
        Training(
            name=f"d={width}, 2 x 16 tokens",
            family="bfloat16 weights",
            seconds=0.8,
            variant=Variant(low=True),
            workload=lambda width=width: workloads.gpt(width, 4, 2, 16, 256, 2),
            aims=(Aim(REMAINDERS, remainders), Aim(STOCHASTIC, stochastic)),
            devices=EVERYWHERE if width <= 128 else FAST,
        )
        for width, remainders, stochastic in ((32, 1.2, 1.8), (128, 1.1, 1.7), (256, 1.0, 1.6))
    ]


def large() -> list[Case]:
    """Models of real size, for a GPU."""
    models: dict[str, Callable[[], Workload]] = {
        "GPT-2 124M": lambda: workloads.gpt(768, 12, 8, 1024, 50257, 12),
        "ResNet-50": lambda: workloads.resnet(64, (3, 4, 6, 3), 128, 224, 1000),
    }
    # The variant; whether the default run has it, as a run should take minutes; its aims.
    variants: dict[Variant, tuple[bool, tuple[Aim, ...]]] = {
        Variant(BF16): (True, EQUAL),
        Variant(FP16): (False, EQUAL),
        Variant(BF16, 8): (True, (Aim(OUTER, 0.95),)),
        Variant(BF16, clip=True): (False, (Aim(OWN_OPTIMIZER, 0.95),)),
        Variant(FP16, clip=True): (True, (Aim(OWN_OPTIMIZER, 0.95),)),
        Variant(BF16, run="compiled"): (False, ()),
        Variant(BF16, run="graph"): (False, ()),
    }
    return [
        Training(
            name=f"{name}, {variant}",
            workload=workload,
            variant=variant,
            devices=("cuda",),
            everyday=everyday,
            aims=aims,
            seconds=8.0,
        )
        for name, workload in models.items()
        for variant, (everyday, aims) in variants.items()
    ]


def cases() -> list[Case]:
    """Every training case."""
    return small() + compiled() + inference() + accumulation() + bfloat16_weights() + widths() + models() + large()
