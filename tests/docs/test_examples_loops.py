"""The examples for other libraries' loops run, and show what they say they show."""

import importlib.util
from typing import Any

import pytest

from tests.helpers.paths import ROOT


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_accelerate(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("accelerate", reason="it is in ampkit[dev]")
    assert load("loops_accelerate").main() == pytest.approx(0.01 * 0.99**7)    # eight steps, one of them skipped
    said = "step 5 was skipped:\nfinite down to 0.bias; first bad: 0.weight\n  0.weight: 0 inf, 1 NaN"
    assert said in capsys.readouterr().out


def test_transformers() -> None:
    pytest.importorskip("transformers", reason="it is in ampkit[dev]")
    pytest.importorskip("accelerate", reason="it is in ampkit[dev]")
    rows = [row for row in load("loops_transformers").main() if "grad_norm" in row]
    assert len(rows) == 8
    assert all(row["grad_norm"] < 2.0 and row["loss_scale"] > 1.0 for row in rows)


@pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::DeprecationWarning:lightning")
@pytest.mark.filterwarnings("ignore::FutureWarning:lightning")
def test_lightning() -> None:
    pytest.importorskip("lightning", reason="it is in ampkit[dev]")
    metrics, loss = load("loops_lightning").main()
    assert set(metrics) == {"loss_scale", "skipped_steps"}
    assert loss < 12.0
