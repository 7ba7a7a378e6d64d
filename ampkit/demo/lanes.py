"""A lane is one way to train the task's model: plain fp32, torch.amp, or ampkit."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ampkit.demo.tasks import Batch, Task
from ampkit.region.autocast import autocast
from ampkit.scaler.grad_scaler import GradScaler

# torch's default of 2,000 steps would never grow the scale in a demo. Both scalers get the same interval.
GROWTH_INTERVAL = 20


@dataclass
class Record:
    """What a lane has shown so far, one entry per step."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped_steps: list[int] = field(default_factory=list)
    step_bytes: int | None = None       # most memory that a step needed on top of what was live before it
    held_out: float | None = None


@dataclass
class Lane:
    """A model with its optimizer, autocast region and loss scaler."""

    name: str
    dtype: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    region: Callable[[], AbstractContextManager]
    scaler: torch.amp.GradScaler
    record: Record = field(default_factory=Record)

    def step(self, task: Task, batch: Batch) -> Tensor:
        """One training step, as a user would write it. Returns the loss, on the device."""
        self.optimizer.zero_grad()
        with self.region():
            loss = task.loss(self.model, batch)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def evaluate(self, task: Task) -> None:
        """Measure the held-out metric in the lane's own precision and record it."""
        self.model.eval()
        with torch.no_grad(), self.region():
            self.record.held_out = task.held_out(self.model)
        self.model.train()


def make_lanes(task: Task, device: torch.device, dtype: torch.dtype, seed: int) -> list[Lane]:
    """Three lanes that start from the same weights. The loss scale is on for fp16 only."""
    torch.manual_seed(seed)
    origin = task.model()
    kind, scaled = device.type, dtype is torch.float16
    short = {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    options = {"growth_interval": GROWTH_INTERVAL, "enabled": scaled}
    ways = [
        ("fp32", "fp32", nullcontext, torch.amp.GradScaler(kind, enabled=False)),
        ("torch.amp", short, lambda: torch.autocast(kind, dtype), torch.amp.GradScaler(kind, **options)),
        ("ampkit", short, lambda: autocast(kind, dtype), GradScaler(kind, **options)),
    ]
    lanes = []
    for name, shown, region, scaler in ways:
        model = copy.deepcopy(origin).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=task.peak_lr)
        lanes.append(Lane(name, shown, model, optimizer, region, scaler))
    return lanes
