"""Whole training steps: fp32, torch.amp and ampkit on the same batches from the same weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks import counts, workloads
from benchmarks.case import KEPT, OWN_OPTIMIZER, SAME_LIST, TORCH, Aim, Case, Side, WrongAnswerError
from benchmarks.trainer import Trainer, Variant, ways
from benchmarks.work import Work, training_bytes
from benchmarks.workloads import Batch, Workload

WARM_UP = 3


@dataclass(frozen=True, kw_only=True)
class Training(Case):
    """Training steps of one workload in one variant. One call is one optimizer step."""

    workload: Callable[[], Workload]
    variant: Variant = field(default_factory=Variant)
    family: str = "training"
    seconds: float = 3.5

    def sides(self, device: torch.device) -> dict[str, Side]:
        workload = _drawn_once(self.workload())
        if self.variant.run == "compiled":
            torch.compiler.reset()      # trainers share code objects; after eight recompilations torch runs one eagerly
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
            return [] if trainer.loss is None else [trainer.loss.float()]

        def facts() -> dict[str, Any]:
            found: dict[str, Any] = {
                "steps": trainer.steps,
                "final_loss": result()[0].item(),
                "samples_per_step": workload.samples * self.variant.accumulation,
                "parameters": sum(param.numel() for param in trainer.model.parameters()),
            }
            if self.variant.run == "eager":
                # Otherwise the step frees gradients whose allocation the profiler may not have seen.
                trainer.optimizer.zero_grad()
                found |= counts.peak_and_copies(trainer.step, device)
            found["launches"] = counts.launches(trainer.step, device)
            return found

        return Side(run, result=result, facts=facts)

    def check(self, sides: Mapping[str, Side]) -> None:
        """With torch.amp's list the loss is torch.amp's after `WARM_UP` steps: on a CPU to the last bit.

        On a GPU atomic additions may change the order of sums, and clipping rounds once instead of twice.
        """
        exact = not self.variant.clip and self.variant.run == "eager"
        losses = {name: side.result()[0] for name, side in sides.items()}
        wanted = losses[TORCH]
        for name in (SAME_LIST, KEPT):
            if name not in losses:
                continue
            found = losses[name]
            equal = torch.equal(found, wanted) if exact and found.device.type == "cpu" else torch.allclose(
                found, wanted, rtol=2e-2, atol=1e-3
            )
            if not equal:
                raise WrongAnswerError(
                    f"{self.name}: after {WARM_UP} steps the loss of {name} is {found.item()}, "
                    f"that of {TORCH} {wanted.item()}"
                )

    def work(self) -> Work:
        workload = self.workload()
        with torch.device("meta"):
            parameters = sum(param.numel() for param in workload.build().parameters())
        count = self.variant.accumulation
        return Work(
            workload.flops * count, training_bytes(parameters, count),
            "matrix products forward and backward; fp32 weights, gradients and AdamW once",
        )


def _drawn_once(workload: Workload) -> Workload:
    """The workload with its micro-batches cached: all ways use the same, and some take gigabytes."""
    kept: dict[int, list[Batch]] = {}

    def batches(count: int, generator: torch.Generator) -> list[Batch]:
        if count not in kept:
            kept[count] = workload.batches(count, generator)
        return kept[count]

    return replace(workload, batches=batches)


BF16, FP16 = torch.bfloat16, torch.float16
EQUAL = (Aim(SAME_LIST, 1.0),)


def small() -> list[Case]:
    """Models that a CPU trains in seconds, where overhead shows."""
    found: list[Case] = []
    # oneDNN's 16-bit LSTM needs AVX-512; on other CPUs torch.amp raises.
    lstm = ("cpu", "cuda") if torch.ops.mkldnn._is_mkldnn_bf16_supported() else ("cuda",)
    for name, workload, variants in (
        ("digits CNN", workloads.digits, (Variant(BF16), Variant(BF16, clip=True), Variant(FP16))),
        ("char-GPT", workloads.characters, (Variant(BF16), Variant(BF16, clip=True))),
        ("LSTM", lambda: workloads.lstm("LSTM", 128, 2, 16, 32), (Variant(BF16), Variant(BF16, 8))),
    ):
        able = lstm if name == "LSTM" else ("cpu", "cuda")
        found += [
            Training(name=f"{name}, {variant}", workload=workload, variant=variant, devices=able)
            for variant in variants
        ]
        for run, devices in (("compiled", able), ("graph", ("cuda",))):
            variant = Variant(BF16, run=run)
            found.append(Training(
                name=f"{name}, {variant}", workload=workload, variant=variant, devices=devices, everyday=run == "graph",
            ))
    return found


def widths() -> list[Case]:
    """The same four-block transformer at growing width: where overhead ends and arithmetic begins."""
    found: list[Case] = []
    for width in (32, 64, 128, 256, 512):
        aims = EQUAL if width >= 256 else ()
        found.append(Training(
            name=f"d={width}", family="width", aims=aims, seconds=4.5,
            workload=lambda width=width: workloads.gpt(f"d={width}", width, 4, 4, 32, 256, max(2, width // 64)),
        ))
    return found


def accumulation() -> list[Case]:
    """Eight micro-batches of 1 x 8 tokens on wide layers, where casting the weights is much of the work."""
    variant = Variant(BF16, 8)
    return [Training(
        name=f"d=768, 4 blocks, 1 x 8 tokens, {variant}", family="accumulation", variant=variant, seconds=10.0,
        workload=lambda: workloads.gpt("accumulation", 768, 4, 1, 8, 256, 12), aims=(Aim(KEPT, 0.85),),
    )]


def large() -> list[Case]:
    """Models of real size, for a GPU."""
    models: dict[str, Callable[[], Workload]] = {
        "GPT-2 124M": lambda: workloads.gpt("GPT-2 124M", 768, 12, 8, 1024, 50257, 12),
        "ResNet-50": lambda: workloads.resnet("ResNet-50", 64, (3, 4, 6, 3), 128, 224, 1000),
    }
    # The variant; whether the default run has it, as a run should take minutes; its aims.
    variants: dict[Variant, tuple[bool, tuple[Aim, ...]]] = {
        Variant(BF16): (True, EQUAL), Variant(FP16): (False, EQUAL), Variant(BF16, 8): (True, (Aim(KEPT, 0.95),)),
        Variant(BF16, clip=True): (False, (Aim(OWN_OPTIMIZER, 0.95),)),
        Variant(FP16, clip=True): (True, (Aim(OWN_OPTIMIZER, 0.95),)),
        Variant(BF16, run="compiled"): (False, ()), Variant(BF16, run="graph"): (False, ()),
    }
    return [
        Training(
            name=f"{name}, {variant}", workload=workload, variant=variant, devices=("cuda",), everyday=everyday,
            aims=aims, seconds=8.0,
        )
        for name, workload in models.items() for variant, (everyday, aims) in variants.items()
    ]


def cases() -> list[Case]:
    """Every training case."""
    return accumulation() + widths() + small() + large()


