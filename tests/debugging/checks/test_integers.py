"""Integers that become equal in 16 bits."""

import pytest
import torch

from tests.debugging.planted import B16, findings, line_of, only


def test_positions_in_16_bits() -> None:
    found = only(lambda: torch.arange(600, dtype=B16) / 600)  # positions
    assert (found.grade, found.place.line) == ("precision loss", line_of(__file__, "positions"))
    assert findings(lambda: torch.arange(256, dtype=B16)) == []


@pytest.mark.parametrize(("start", "grade"), [(65536, "precision loss"), (200, "note")])
def test_positions_that_a_region_casts(start: int, grade: str) -> None:
    """As in a rotary embedding under a region: of a grid far from 0 all positions become the same."""
    frequencies, positions = torch.tensor([[1.0], [0.1]]), torch.arange(start, start + 64).float()[None]

    def run() -> None:
        with torch.autocast("cpu", B16):
            frequencies @ positions  # positions of a grid

    found = only(run)
    assert (found.grade, found.place.line) == (grade, line_of(__file__, "positions of a grid"))
    assert "of 64 integers become equal" in found.what
