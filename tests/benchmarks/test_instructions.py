"""Counted instructions: what is made of callgrind's files, and what is said where counting is not possible."""

import shutil
from pathlib import Path

import pytest

from benchmarks import instructions


def test_a_count_is_without_what_a_side_does_once(tmp_path: Path) -> None:
    """Each side is counted twice, with fewer and with more calls: the difference is per call."""
    for n, (side, calls, total) in enumerate([("torch.amp", 1, 900), ("torch.amp", 5, 2900), ("ampkit", 5, 4300)]):
        name = f"desc: Trigger: Client Request: regions/a, b|{side}|{calls}"
        (tmp_path / f"counts.{n}").write_text(f"version: 1\n{name}\n\nsummary: 0\n\ntotals: {total}\n")
    (tmp_path / "counts.3").write_text("desc: Trigger: Client Request: regions/a, b|ampkit|1\ntotals: 300\n")
    (tmp_path / "counts").write_text("desc: Trigger: Program termination\ntotals: 7\n")
    counts = instructions.per_call(tmp_path.glob("counts*"))
    assert counts == {"regions/a, b": {"ampkit": 1000, "torch.amp": 500}}


def test_the_table_has_the_base_and_differences_from_it() -> None:
    text = instructions.table({"regions/make, enter and leave": {"ampkit": 50_000, "torch.amp": 20_000}})
    assert "| regions/make, enter and leave | +30.0 (2.50) | 20.0 |" in text


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert instructions.main(["nothing/*"]) == 1
    assert "no case for 'cpu' matches 'nothing/*'" in capsys.readouterr().err
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert instructions.main([]) == 1
    assert "needs valgrind and a C compiler" in capsys.readouterr().err
