"""Fixtures for tests that run the command `ampkit debug`."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ampkit.debugging import cli, trials


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the processes that the command starts as calls in this one."""

    def run(command: list[str], **options: Any) -> Any:
        torch.manual_seed(0)
        code = cli.main(command[command.index("debug") + 1 :])
        return SimpleNamespace(stderr=f"exit code {code}")

    monkeypatch.setattr(trials.subprocess, "run", run)
