"""Tests of the engine open regions: they start from, and may leave behind, what tests of regions do."""

from tests.region.conftest import _nothing_left_behind

__all__ = ["_nothing_left_behind"]
