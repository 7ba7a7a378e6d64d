"""Tables in plain text, for the reports and commands that print them."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Collection, Sequence

SHORTEST = 8  # characters that a shortened cell keeps, "..." among them


def table(rows: Sequence[tuple[str, ...]], flush_right: Collection[str], width: int | None = None) -> list[str]:
    """Return the lines of a table.

    Args:
        rows: The cells. The first row is the header.
        flush_right: The names of the columns of numbers.
        width: The most characters of a line, for which the cells of the widest other columns are shortened, headers
            excepted; None for lines as long as the cells are. `terminal_width()` is the user's.

    Returns:
        A line for each row.
    """
    header = rows[0]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    least = [
        size if name in flush_right else min(size, max(len(name), SHORTEST))
        for name, size in zip(header, widths, strict=True)
    ]
    excess = sum(widths) + 2 * (len(widths) - 1) - width if width is not None else 0
    while excess > 0 and widths != least:
        spare = [size - low for size, low in zip(widths, least, strict=True)]
        widest = max(range(len(widths)), key=lambda i: (spare[i] > 0, widths[i]))
        widths[widest] -= 1
        excess -= 1
    return [
        "  ".join(
            cell.rjust(size) if column in flush_right else shortened(cell, size).ljust(size)
            for column, cell, size in zip(header, row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]


def shortened(cell: str, width: int) -> str:
    """Return the cell, or its beginning and end around "...": module paths and files differ at both."""
    if len(cell) <= width:
        return cell
    n_shown = width - 3
    return f"{cell[: n_shown // 2]}...{cell[len(cell) - (n_shown - n_shown // 2) :]}"


def terminal_width() -> int | None:
    """Return the columns of the terminal that stdout writes to; None for a file or a pipe, to shorten no lines."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
