"""The scaler's benchmark measures equal work, and refuses to time a wrong answer."""

import json

import pytest
import torch

from benchmarks import scaler as benchmark


def test_it_measures_and_writes(tmp_path, capsys) -> None:
    rows = benchmark.main(["--quick", "--json", str(tmp_path / "rows.json")])
    assert all(row.ampkit_us > 0 and row.ratio_20 <= row.ratio <= row.ratio_80 for row in rows)
    written = json.loads((tmp_path / "rows.json").read_text())
    assert [row["name"] for row in written["rows"]] == [case.name for case in benchmark.QUICK]
    assert written["setting"]["torch"] == torch.__version__
    assert "20-80 %" in capsys.readouterr().out


def test_a_wrong_answer_is_not_timed(monkeypatch) -> None:
    def breaks(self, optimizer, *, allow_repeat=False):
        optimizer.param_groups[0]["params"][0].grad.zero_()

    monkeypatch.setattr(benchmark.GradScaler, "unscale_", breaks)
    with pytest.raises(RuntimeError, match="left different gradients; nothing is timed"):
        benchmark.measure(benchmark.QUICK[0], 5)
