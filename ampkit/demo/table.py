"""The closing table: one row per task and lane."""

import sys
from importlib.util import find_spec

from ampkit.demo.results import LaneResult, Results, TaskResult

HEADER = (
    "task", "lane", "dtype", "last loss", "held out", "ms/step", "vs torch.amp", "skipped", "memory/step"
)
MISSING = "-"


def rows_of(results: Results) -> list[tuple[str, ...]]:
    """The table's cells as text. A value that a run did not reach, or a device does not report, is a dash."""
    return [_row(task, lane) for task in results.tasks for lane in task.lanes if lane.record.losses]


def print_table(results: Results) -> None:
    """Print the table: with rich on a terminal, as aligned plain text otherwise."""
    rows = rows_of(results)
    if sys.stdout.isatty() and find_spec("rich"):
        from rich.console import Console
        from rich.table import Table

        table = Table(*HEADER)
        for row in rows:
            table.add_row(*row, end_section=row[1] == "ampkit")
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(HEADER, *rows, strict=True)]
    for row in (HEADER, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _row(task: TaskResult, lane: LaneResult) -> tuple[str, ...]:
    record = lane.record
    native = next(other.median_ms for other in task.lanes if other.name == "torch.amp")
    return (
        task.name,
        lane.name,
        lane.dtype,
        f"{record.losses[-1]:.4f}",
        MISSING if record.held_out is None else f"{record.held_out:.2f} {_unit(task)}",
        MISSING if lane.median_ms is None else f"{lane.median_ms:.1f}",
        MISSING if lane.median_ms is None or native is None else f"{lane.median_ms / native:.2f}x",
        f"{len(record.skipped_steps)}/{len(record.losses)}" if record.scales else MISSING,
        MISSING if record.step_bytes is None else f"{record.step_bytes / 2**20:.1f} MiB",
    )


def _unit(task: TaskResult) -> str:
    return "%" if "%" in task.metric else "bits/char"
