"""Planted faults are answered: operator, module, line, cause, change; and no change is shown that failed."""

import pytest

from tests.debugging.battery import FAULTS, Fault, judged

# What is not answered, with what is missing.
MISSING = {
    "positions_in_bfloat16": {"change"},
    "times_in_float16": {"change"},
    "a_filled_tensor": {"change"},
    "a_cast_of_large_numbers": {"cause", "change"},
    "moving_average_of_weights": {"op", "line", "cause", "change"},
    "update_by_hand": {"op", "line", "cause", "change"},
    "gradients_that_vanish": {"line", "change"},
}


@pytest.mark.filterwarnings("ignore:std.*degrees of freedom")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault(fault: Fault) -> None:
    answers, text = judged(fault)
    assert {name for name, right in answers.items() if not right} == MISSING.get(fault.name, set()), text
    assert "not verified: with it" not in text
