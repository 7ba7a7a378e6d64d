"""Tables in plain text, as reports print them."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def table(rows: Sequence[tuple[str, ...]], flush_right: Collection[str]) -> list[str]:
    """The lines of a table whose first row is its header; `flush_right` has the columns of numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if name in flush_right else cell.ljust(width)
            for name, cell, width in zip(rows[0], row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]
