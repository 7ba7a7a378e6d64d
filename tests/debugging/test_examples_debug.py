"""The debugging examples run, and show what they say they show."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_debugging_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("debug_*.py")} == {
        "debug_monitor", "debug_nonfinite", "debug_precision", "debug_scaler", "debug_search",
    }


def test_nonfinite(capsys: pytest.CaptureFixture[str]) -> None:
    report = load("debug_nonfinite").main()
    assert report.findings[0].origin.op == "aten::bmm"
    assert report.findings[0].origin.module == "1"
    assert report.findings[0].suggestion.verified
    assert "debug_nonfinite.py:" in capsys.readouterr().out


def test_scaler() -> None:
    healthy, broken = load("debug_scaler").main()
    assert not healthy
    assert healthy.skipped
    assert broken.findings[0].cause.kind == "undefined"
    assert broken.findings[0].origin.module == "1"


def test_precision() -> None:
    report = load("debug_precision").main()
    assert report.gradient_error > 0.02
    worst = max(report.operators, key=lambda one: one.amplification)
    assert worst.op == "aten::sub.Tensor"
    assert worst.module == "1"


def test_monitor() -> None:
    sample = load("debug_monitor").main().last
    assert sample["step"] == 40
    assert sample["lost_updates"]["0.weight"] > 0.5


def test_search() -> None:
    result = load("debug_search").main()
    assert result.status == "found"
    assert result.kept == ("2.inner", "4.inner")
