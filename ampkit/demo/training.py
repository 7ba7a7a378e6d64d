"""Step the lanes in turn on the same batches, so that whatever disturbs the machine disturbs all of them."""

import math
import time
from collections.abc import Sequence
from typing import Any

import torch

from ampkit.demo.lanes import Lane
from ampkit.demo.progress import Progress
from ampkit.demo.tasks import Batch, Task


def train(task: Task, lanes: Sequence[Lane], steps: int, seed: int, progress: Progress) -> None:
    """Train every lane for `steps` steps, then measure it on the held-out data.

    Step by step each lane gets the same batch; which lane goes first rotates. A KeyboardInterrupt passes
    through, with what was recorded until then left in the lanes' records.
    """
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        batch = task.batch(generator)
        first = step % len(lanes)
        for lane in (*lanes[first:], *lanes[:first]):
            for group in lane.optimizer.param_groups:
                group["lr"] = task.peak_lr * schedule(step, steps)
            measured_step(lane, task, batch)
        progress.update(step + 1, lanes)
    for lane in lanes:
        lane.evaluate(task)


def schedule(step: int, steps: int) -> float:
    """Fraction of the peak learning rate: a linear rise over the first tenth, then half a cosine."""
    rise = max(1, steps // 10)
    if step < rise:
        return (step + 1) / rise
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def measured_step(lane: Lane, task: Task, batch: Batch) -> None:
    """Take one step of a lane; record its loss, seconds, loss scale and, where reported, memory.

    Waits for the device before and after, so that the seconds are this step's alone.
    """
    record, device = lane.record, batch[0].device
    allocator = allocator_of(device)
    live = 0
    scale_before = lane.scaler.get_scale()
    wait_for(device)
    if allocator is not None:
        allocator.reset_peak_memory_stats(device)
        live = allocator.memory_allocated(device)

    start = time.perf_counter()
    loss = lane.step(task, batch)
    wait_for(device)
    record.seconds.append(time.perf_counter() - start)

    if allocator is not None:
        needed = allocator.max_memory_allocated(device) - live
        record.step_bytes = max(needed, record.step_bytes or 0)
    record.losses.append(loss.item())
    if lane.scaler.is_enabled():
        record.scales.append(lane.scaler.get_scale())
        if record.scales[-1] < scale_before:  # lowered after a skipped step and never otherwise
            record.skipped_steps.append(len(record.losses))


def allocator_of(device: torch.device) -> Any:
    """The torch module that counts the device's memory, or None where none does (CPU, MPS)."""
    module = None if device.type == "cpu" else torch.get_device_module(device)
    return module if hasattr(module, "reset_peak_memory_stats") else None


def wait_for(device: torch.device) -> None:
    """Block until the device has finished what was queued; a CPU always has."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
