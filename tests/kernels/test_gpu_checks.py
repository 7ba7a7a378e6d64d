"""How the checks are run without pytest: what a check that ends the process, or loses the device, leaves behind."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.device import DeviceLostError
from tests.gpu_checks import __main__ as runner
from tests.gpu_checks import operations, tools


def fails(_: torch.device) -> None:
    raise AssertionError("3 differ")


def passes(_: torch.device) -> None:
    return None


def test_a_check_that_ends_the_process_leaves_the_others_results(tmp_path: Path) -> None:
    def ends(_: torch.device) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "checks.json"
    registry: dict[str, tools.Check] = {"good": passes, "bad": fails, "deadly": ends, "after": passes}
    with pytest.raises(KeyboardInterrupt):
        runner.run(torch.device("cpu"), registry, path)
    found = {"good": None, "bad": "AssertionError: 3 differ", "deadly": "did not finish", "after": "not run"}
    assert json.loads(path.read_text()) == found
    # A fresh process goes on behind it, and repeats nothing.
    registry["good"] = ends
    assert runner.run(torch.device("cpu"), registry, path, resume=True) == {**found, "after": None}
    assert runner.run(torch.device("cpu"), {"good": passes}, path) == {"good": None}


def test_a_device_that_is_lost_ends_the_run_with_a_code_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever runs after an illegal access in the same process fails as well, and says nothing."""
    alive = True

    def breaks(_: torch.device) -> None:
        nonlocal alive
        alive = False
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def must_answer(device: torch.device) -> None:
        if not alive:
            raise DeviceLostError("cuda:0 answers no more")

    monkeypatch.setattr(runner, "must_answer", must_answer)
    monkeypatch.setattr(operations, "CHECKS", {"good": passes, "bad": breaks, "after": passes})
    arguments = ["--dry-run", "--out", str(tmp_path)]
    assert runner.main(arguments) == 3
    assert "answers no more" in capsys.readouterr().err
    found = json.loads((tmp_path / "checks.json").read_text())
    assert "illegal memory access" in found.pop("bad")
    assert found == {"good": None, "after": "not run"}
    alive = True
    assert runner.main([*arguments, "--resume"]) == 1
    assert json.loads((tmp_path / "checks.json").read_text())["after"] is None
