"""Every test of whole models starts without an `initialize` in memory: `amp.state_dict()` means the only one."""

import pytest

from ampkit import amp


@pytest.fixture(autouse=True)
def _forget_other_tests() -> None:
    amp._sessions.clear()
