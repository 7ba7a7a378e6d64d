"""Live progress: one bar per lane with rich on a terminal, a plain line every tenth otherwise."""

import statistics
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib.util import find_spec
from types import TracebackType
from typing import Self

from ampkit.demo.lanes import Lane


class Progress(ABC):
    """Shows lanes while they train. A context manager, so that the terminal is restored on Ctrl-C too."""

    @abstractmethod
    def update(self, done: int, lanes: Sequence[Lane]) -> None:
        """Show the state after `done` steps of every lane."""

    @abstractmethod
    def note(self, line: str) -> None:
        """Print a line above whatever is live."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the terminal as it was found."""
        return


def open_progress(total: int, lanes: Sequence[Lane]) -> Progress:
    """Bars where there is a terminal and rich is installed, plain lines otherwise."""
    if sys.stdout.isatty() and find_spec("rich"):
        return RichProgress(total, lanes)
    return PlainProgress(total)


def state_of(lane: Lane) -> str:
    """One lane's last step in a few words."""
    record = lane.record
    words = f"loss {record.losses[-1]:.3f}  {1e3 * statistics.median(record.seconds):6.1f} ms/step"
    if record.scales:
        words += f"  scale {record.scales[-1]:.0f}"
    return words


class PlainProgress(Progress):
    """One line every tenth of the way: for pipes, logs and terminals without rich."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.every = max(1, total // 10)

    def update(self, done: int, lanes: Sequence[Lane]) -> None:
        if done % self.every == 0 or done == self.total:
            losses = "  ".join(f"{lane.name} {lane.record.losses[-1]:.3f}" for lane in lanes)
            self.note(f"  step {done}/{self.total}  loss: {losses}")

    def note(self, line: str) -> None:
        print(line, flush=True)


class RichProgress(Progress):
    """A bar per lane with its loss, median time per step and loss scale."""

    def __init__(self, total: int, lanes: Sequence[Lane]) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bars

        self.bars = Bars(
            TextColumn("  {task.description:10s}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
        )
        self.rows = [self.bars.add_task(lane.name, total=total, state="") for lane in lanes]

    def update(self, done: int, lanes: Sequence[Lane]) -> None:
        for row, lane in zip(self.rows, lanes, strict=True):
            self.bars.update(row, completed=done, state=state_of(lane))

    def note(self, line: str) -> None:
        self.bars.console.print(line, highlight=False)

    def __enter__(self) -> Self:
        self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bars.stop()
