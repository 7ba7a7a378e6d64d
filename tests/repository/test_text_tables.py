"""Tables in plain text: columns are aligned, and on a terminal no line is wider than it."""

import io
import os

import pytest

from ampkit.text_tables import table, terminal_width

ROWS = [
    ("module", "operator", "ms"),
    ("model.layers.0.self_attn.q_proj", "aten::linear", "12.5"),
    ("head", "aten::_scaled_dot_product_flash_attention_for_cpu", "3"),
]


def test_columns_are_as_wide_as_their_cells() -> None:
    assert table([("a", "n"), ("bbb", "1"), ("c", "22")], {"n"}) == ["a     n", "bbb   1", "c    22"]


@pytest.mark.parametrize("width", [90, 60, 40, 26])
def test_a_table_fits_the_width(width: int) -> None:
    """The widest cells are shortened first, in their middle; numbers and headers never are."""
    lines = table(ROWS, {"ms"}, width)
    assert max(map(len, lines)) == min(width, max(map(len, table(ROWS, {"ms"}))))
    assert [line.split()[-1] for line in lines] == ["ms", "12.5", "3"]
    assert lines[0].split() == ["module", "operator", "ms"]
    for line, row in zip(lines, ROWS, strict=True):
        for shown, cell in zip(line.split(), row, strict=True):
            at = (len(shown) - 3) // 2
            ends = cell.startswith(shown[:at]) and cell.endswith(shown[at + 3 :])
            assert shown == cell or (shown[at : at + 3] == "..." and ends)


def test_a_width_that_is_too_small_leaves_what_numbers_and_headers_need() -> None:
    assert table(ROWS, {"ms"}, 5) == table(ROWS, {"ms"}, 22)


def test_only_a_terminal_has_a_width(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert terminal_width() is None
    monkeypatch.setattr("sys.stdout", Terminal())
    monkeypatch.setitem(os.environ, "COLUMNS", "57")
    assert terminal_width() == 57
