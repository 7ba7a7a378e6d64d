"""Planted faults are answered: operator, module, line, cause, change; and no change is shown that failed."""

import pytest

from tests.debugging.battery import FAULTS, Fault, judged

# What is not answered, with what is missing.
MISSING: dict[str, set[str]] = {}


@pytest.mark.filterwarnings("ignore:std.*degrees of freedom")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault(fault: Fault) -> None:
    answers, text = judged(fault)
    assert {name for name, right in answers.items() if not right} == MISSING.get(fault.name, set()), text
    assert "not verified: with it" not in text
