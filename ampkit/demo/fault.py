"""What ampkit alone shows: a gradient that overflows somewhere, the step that is skipped, the report that names it."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ampkit.demo.lanes import Lane
from ampkit.demo.tasks import Task
from ampkit.scaler.grad_scaler import GradScaler
from ampkit.scaler.overflow_report import OverflowReport

STEPS, PLANTED = 3, 2


@dataclass
class FaultStep:
    """One step: its loss, the scale after it, whether it was skipped, and whether any parameter has changed."""

    loss: float
    scale: float
    skipped: bool
    changed: bool


@dataclass
class Fault:
    """Three steps with an overflow in the second, planted in the gradient of the output of `module`."""

    task: str
    module: str
    steps: list[FaultStep]
    first_bad: list[str]
    report: str

    def lines(self) -> Iterator[str]:
        """What happened, and what the scaler says of it."""
        yield f"a fault: in step {PLANTED} of {STEPS} the gradient of {self.module}'s output overflows"
        for number, step in enumerate(self.steps, 1):
            words = "skipped, no parameter changed" if step.skipped and not step.changed else "taken"
            yield f"  step {number}  loss {step.loss:.3f}  scale {step.scale:.0f}  {words}"
        yield "scaler.overflow_report():"
        yield from (f"  {line}" for line in self.report.splitlines())
        yield "torch.amp skips such a step too, and does not say where it began."


def show_fault(task: Task, lane: Lane, seed: int) -> Fault:
    """Train a copy of a lane's model on, as a user would, with the fault; the lane stays as it is."""
    model = copy.deepcopy(lane.model)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=task.peak_lr / 10)
    path, module = _middle(model)
    generator = torch.Generator().manual_seed(seed)
    batch = task.batch(generator)
    scaler = GradScaler(batch[0].device, init_scale=256.0)
    steps: list[FaultStep] = []
    report = OverflowReport()
    for number in range(1, STEPS + 1):
        before = [param.detach().clone() for param in model.parameters()]
        optimizer.zero_grad()
        handle = module.register_forward_hook(_overflow) if number == PLANTED else None
        with lane.region():
            loss = task.loss(model, batch)
        if handle is not None:
            handle.remove()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if number == PLANTED:
            report = scaler.overflow_report()
        changed = any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
        steps.append(FaultStep(loss.item(), scaler.get_scale(), not scaler.stepped(optimizer), changed))
        batch = task.batch(generator)
    return Fault(task.name, path, steps, list(report.first_bad), str(report))


def _middle(model: nn.Module) -> tuple[str, nn.Module]:
    """A module with parameters of its own, half way through the model."""
    found = [entry for entry in model.named_modules() if next(entry[1].parameters(recurse=False), None) is not None]
    path, module = found[len(found) // 2]
    return path or type(model).__name__, module


def _overflow(module: nn.Module, args: object, output: Tensor) -> None:
    """Forward hook: let the gradient of the output be inf in one element."""

    def spoil(grad: Tensor) -> Tensor:
        spoiled = grad.clone(memory_format=torch.contiguous_format)
        spoiled.view(-1)[0] = torch.inf
        return spoiled

    output.register_hook(spoil)
