"""A trainer: one workload, trained in one way, with a loop as a user would write it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import ampkit
import ampkit.optim
from ampkit import Policy, autocast
from benchmarks.case import AMPKIT, OUTER, OWN_OPTIMIZER, REMAINDERS, SAME_LIST, STOCHASTIC, TORCH
from benchmarks.workloads import Batch, Workload, loss_of

FP32 = "fp32"
BATCHES = 4  # steps with different micro-batches, which then repeat
CLIP = 1.0
OPTIONS: dict[str, dict[str, Any]] = {  # of ampkit.optim.AdamW
    OWN_OPTIMIZER: {},
    REMAINDERS: {"masters": "remainder"},
    STOCHASTIC: {"rounding": "stochastic"},
}

Region = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class Variant:
    """How a step is put together.

    `scaled`: with a gradient scaler, as float16 always has. `run`: "eager", "compiled" (forward and loss, with the
    region in it, through `torch.compile`), "around" (the region around a model that "aot_eager" has compiled),
    "inference" (the model's forward alone, without gradients) or "graph" (forward and backward of a micro-batch,
    captured as a CUDA graph; the optimizer steps outside it). `low`: with bfloat16 weights besides.
    """

    dtype: torch.dtype = torch.bfloat16
    accumulation: int = 1
    clip: bool = False
    run: str = "eager"
    scaled: bool = False
    low: bool = False

    def __str__(self) -> str:
        parts = [{torch.float16: "fp16", torch.bfloat16: "bf16"}[self.dtype]]
        if self.accumulation > 1:
            parts.append(f"x{self.accumulation}")
        if self.scaled:
            parts.append("scaled")
        if self.clip:
            parts.append("clipped")
        if self.low:
            parts.append("bfloat16 weights")
        if self.run != "eager":
            parts.append(self.run)
        return " ".join(parts)


class Trainer:
    """Trains one copy of the workload's model. `way` is one of the names above."""

    def __init__(self, workload: Workload, variant: Variant, way: str, device: torch.device, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.variant = variant
        self.model = workload.build().to(device)
        if way in (REMAINDERS, STOCHASTIC):
            self.model.bfloat16()
        generator = torch.Generator().manual_seed(seed)
        drawn = workload.batches(BATCHES * variant.accumulation, generator)
        self.batches: list[Batch] = [(inputs.to(device), targets.to(device)) for inputs, targets in drawn]
        self.region = _region(way, device.type, variant.dtype)
        self.outer: Region = lambda: autocast(device.type, enabled=False) if way == OUTER else contextlib.nullcontext()
        # torch's is fused, the fastest of its kinds, so that the optimizer does not hide the differences; ampkit's has
        # its defaults.
        params = self.model.parameters()
        self.optimizer: torch.optim.Optimizer = (
            ampkit.optim.AdamW(params, lr=workload.lr, **OPTIONS[way])
            if way in OPTIONS
            else torch.optim.AdamW(params, lr=workload.lr, fused=True)
        )
        scaled = (variant.scaled or variant.dtype is torch.float16) and way != FP32
        scaler = ampkit.GradScaler if way.startswith("ampkit") else torch.amp.GradScaler
        self.scaler: Any = scaler(device.type, enabled=scaled, growth_interval=100)
        self.steps = 0
        self.loss: Tensor | None = None
        self.micro, self.forward = self._eager, self.model
        if variant.run == "around":
            self.forward = torch.compile(self.model, backend="aot_eager")
        elif variant.run == "compiled":
            compiled = torch.compile(self._forward)
            self.micro = lambda batch: self._backward(compiled(*batch))
        elif variant.run == "graph":
            self.micro = self._captured(device)

    def step(self) -> None:
        """Take one optimizer step over `accumulation` micro-batches, or run inference on each batch, a region each.

        Synchronizes only if the scaler or AdamW does.
        """
        if self.variant.run == "inference":
            with torch.no_grad(), self.outer():
                for inputs, _ in self.batches:
                    with self.region():
                        self.loss = self.model(inputs)
            self.steps += 1
            return
        count = self.variant.accumulation
        start = self.steps % BATCHES * count
        self.optimizer.zero_grad(set_to_none=self.variant.run != "graph")
        with self.outer():
            for batch in self.batches[start : start + count]:
                self.loss = self.micro(batch)
        self.steps += 1
        if self.variant.clip:
            self._clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _clip(self) -> None:
        if isinstance(self.scaler, ampkit.GradScaler):
            self.scaler.clip_grad_norm_(self.optimizer, CLIP)
        else:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)

    def _forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with self.region():
            return loss_of(self.forward(inputs), targets)

    def _backward(self, loss: Tensor) -> Tensor:
        self.scaler.scale(loss / self.variant.accumulation).backward()
        return loss.detach()

    def _eager(self, batch: Batch) -> Tensor:
        return self._backward(self._forward(*batch))

    def _captured(self, device: torch.device) -> Callable[[Batch], Tensor]:
        """One micro-batch as a CUDA graph, replayed on copies of each batch. Gradients keep their addresses."""
        if device.type != "cuda":
            raise ValueError(f"a CUDA graph needs a CUDA device, got {device}; use run='eager'")
        inputs, targets = (part.clone() for part in self.batches[0])
        for param in self.model.parameters():
            param.grad = torch.zeros_like(param)
        # Warm up on a side stream, as capture requires, so that libraries allocate before it.
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._eager((inputs, targets))
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self._eager((inputs, targets))

        def replay(batch: Batch) -> Tensor:
            inputs.copy_(batch[0])
            targets.copy_(batch[1])
            graph.replay()
            return loss

        return replay


def _region(way: str, device: str, dtype: torch.dtype) -> Region:
    """Return the function that opens the region of a way."""
    if way == FP32:
        return contextlib.nullcontext
    if way == TORCH:
        return lambda: torch.autocast(device, dtype)
    if way == AMPKIT or way in OPTIONS:
        return lambda: autocast(device, dtype)
    policy = Policy.torch(device)
    if way in (SAME_LIST, OUTER):
        return lambda: autocast(device, dtype, policy=policy)
    raise ValueError(f"unknown way {way!r}")


def ways(variant: Variant, device: torch.device) -> list[str]:
    """Return the ways to train that are compared for a variant on a device."""
    if variant.low:
        return [FP32, TORCH, SAME_LIST, REMAINDERS, STOCHASTIC]
    names = [FP32, TORCH, AMPKIT, SAME_LIST]
    if variant.run == "inference" or (variant.accumulation > 1 and variant.run == "eager"):
        names.append(OUTER)
    if variant.scaled or (variant.clip and device.type == "cuda"):
        names.append(OWN_OPTIMIZER)
    return names
