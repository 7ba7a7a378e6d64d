"""Drawing a history into a file."""

import builtins

import pytest

from ampkit.scaler.plotting import plot_history

ROWS = [
    {"update": 1, "scale": 65536.0, "overflow": True, "grad_norm": float("inf")},
    {"update": 2, "scale": 32768.0, "overflow": False, "grad_norm": 0.5},
    {"update": 3, "scale": 32768.0, "overflow": False, "grad_norm": None},
]


@pytest.mark.parametrize("rows", [ROWS, [{**row, "grad_norm": None} for row in ROWS]], ids=["norms", "no_norms"])
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_file_is_drawn(tmp_path, rows, suffix) -> None:
    pytest.importorskip("matplotlib")
    path = plot_history(rows, tmp_path / f"history.{suffix}", title="a run")
    assert path.stat().st_size > 5000
    if suffix == "svg":
        text = path.read_text()
        assert ("gradient norm" in text) == (rows is ROWS)
        assert "overflow (1)" in text


def test_an_empty_history_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="the history is empty"):
        plot_history([], tmp_path / "history.png")


def test_a_missing_matplotlib_is_explained(tmp_path, monkeypatch) -> None:
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install matplotlib"):
        plot_history(ROWS, tmp_path / "history.png")
