"""`make other-suites`: a failure that is not expected, and one that no longer happens, are both reported."""

import sys
import tomllib
from pathlib import Path

import pytest

from tests.other_suites import __main__ as other_suites

# `same` fails with torch too; `scaler` is whether ampkit's is in the place of torch's.
TESTS = """
import torch

def test_scaler():
    assert "ampkit" not in torch.amp.GradScaler.__module__ + str(torch.amp.GradScaler.__mro__[0].scale.__module__)

def test_dtype():
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.ones(2, 2).mm(torch.ones(2, 2)).dtype is torch.bfloat16

def test_same():
    raise OSError
"""


def test_only_what_differs_from_torch_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "test_it.py").write_text(TESTS)
    expected = tmp_path / "expected.toml"
    expected.write_text('[here]\n"*::test_dtype" = "long gone"\n')
    monkeypatch.setattr(other_suites, "SUITES", {"here": other_suites.Suite(".", ("test_it.py",))})
    monkeypatch.setattr(other_suites, "EXPECTED", expected)
    monkeypatch.setattr(sys, "argv", ["other_suites", str(tmp_path)])
    assert other_suites.main() == 1
    assert capsys.readouterr().out == (
        "here: 1 passed, 0 skipped, 2 failed (1 of them with torch too)\n"
        "  not expected to fail: test_it.py::test_scaler\n"
        "  expected to fail, and does not: *::test_dtype\n"
    )
    failed = {"test_it.py::test_scaler": "failed"}
    assert other_suites.compare(failed, {}, {"*::test_scaler": "it is ampkit's"}) == ([], [])


def test_every_expectation_has_a_reason() -> None:
    expected = tomllib.loads(Path(other_suites.__file__).with_name("expected.toml").read_text())
    assert set(expected) <= set(other_suites.SUITES)
    assert all(len(reason) > 10 for suite in expected.values() for reason in suite.values())
