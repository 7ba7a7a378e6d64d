"""Tables in plain text, for reports that print them."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def table(rows: Sequence[tuple[str, ...]], flush_right: Collection[str]) -> list[str]:
    """The lines of a table. The first row is the header; `flush_right` names the columns of numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if column in flush_right else cell.ljust(width)
            for column, cell, width in zip(rows[0], row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]
