"""Fixtures for tests that run the command `ampkit debug`."""

import contextlib
import io
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
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            code = cli.main(command[command.index("debug") + 1 :])
        return SimpleNamespace(stderr=f"exit code {code}")

    monkeypatch.setattr(trials.subprocess, "run", run)
