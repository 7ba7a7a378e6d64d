"""What a run of the demo leaves behind, as plain data: the JSON file is the whole record."""

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import ampkit
from ampkit.demo.fault import Fault
from ampkit.demo.lanes import Lane, Record
from ampkit.demo.tasks import Task


@dataclass
class LaneResult:
    """One way of training, with everything it recorded."""

    name: str
    dtype: str
    record: Record

    @property
    def median_ms(self) -> float | None:
        """Median time per step in milliseconds."""
        return 1e3 * statistics.median(self.record.seconds) if self.record.seconds else None


@dataclass
class TaskResult:
    """One task with its lanes. `finished` is False where the run was interrupted."""

    name: str
    title: str
    metric: str
    steps: int
    lanes: list[LaneResult]
    finished: bool = False


@dataclass
class Results:
    """A run: where it ran, with which seed, and what each task showed."""

    seed: int
    device: str
    tasks: list[TaskResult] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)
    fault: Fault | None = None

    def add(self, task: Task, lanes: Sequence[Lane], steps: int) -> TaskResult:
        """Start a task's entry; it shares the lanes' records and so follows the training."""
        rows = [LaneResult(lane.name, lane.dtype, lane.record) for lane in lanes]
        entry = TaskResult(task.name, task.title, task.metric, steps, rows)
        self.tasks.append(entry)
        return entry

    def write(self, path: Path) -> None:
        """Write everything as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Versions and hardware that a reader of the numbers needs."""
    module = torch.get_device_module(device)
    named = getattr(module, "get_device_name", None)
    return {
        "device_name": named(device) if named and device.type != "cpu" else platform.machine(),
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "ampkit": ampkit.__version__,
    }
