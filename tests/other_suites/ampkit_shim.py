"""A pytest plugin that puts ampkit in the place of torch.amp for the tests of other projects.

`AMPKIT_SHIM=1` puts it there; `AMPKIT_OUTCOMES` names a file that gets the outcome of every test as JSON. Used by
`tests.other_suites`; its modules are not imported by ampkit's own tests.
"""

import json
import os
from collections import defaultdict
from typing import Any

import pytest
import torch

import ampkit

WORST = ("passed", "skipped", "failed")
_outcomes: dict[str, str] = defaultdict(lambda: "passed")


class Autocast(ampkit.autocast):
    """`ampkit.autocast` with torch.amp's own operator list where no other policy is given."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"policy": "torch", **options})


def replace_torch_amp() -> None:
    """What a program can import from torch's public names."""
    torch.autocast = torch.amp.autocast = Autocast      # type: ignore[misc]
    torch.amp.GradScaler = ampkit.GradScaler        # type: ignore[misc]  (pickles name torch.amp.grad_scaler's)
    torch.amp.custom_fwd, torch.amp.custom_bwd = ampkit.custom_fwd, ampkit.custom_bwd


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module is imported."""
    if os.environ.get("AMPKIT_SHIM") == "1":
        replace_torch_amp()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """The worst outcome of a test's phases."""
    _outcomes[report.nodeid] = max(_outcomes[report.nodeid], report.outcome, key=WORST.index)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A module that cannot be collected fails as a whole."""
    if report.failed:
        _outcomes[report.nodeid] = "failed"


def pytest_sessionfinish() -> None:
    """Leave the outcomes where they were asked for."""
    if name := os.environ.get("AMPKIT_OUTCOMES"):
        with open(name, "w", encoding="utf-8") as file:
            json.dump(_outcomes, file)
