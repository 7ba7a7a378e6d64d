"""Result files, reports and comparisons."""

import json
from pathlib import Path

import pytest

from benchmarks import compare, report, results
from benchmarks.case import AMPKIT
from benchmarks.environment import ROOT
from tests.benchmarks.helpers import sample_row, write_rows


def test_results_come_back_from_a_file_and_other_files_are_refused(tmp_path: Path):
    path = write_rows(tmp_path / "results.jsonl", [sample_row("a", 0.123456789), sample_row("b", 1.0)])
    first, second = results.load(path)
    assert first["sides"][AMPKIT]["ratio"]["median"] == 0.123457
    assert results.key(second) == ("training", "b")
    whole = path.read_text()
    path.write_text(whole + whole[:20])     # a process that ended while it wrote
    assert len(results.load(path)) == 2
    results.mend(path)
    assert path.read_text() == whole
    for text, message in (("{", "line 1: not JSON"), ('{"a": 1}', "line 1: not a row"), ("", "holds no results")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            results.load(path)


def test_a_report_shows_figures_aims_losses_failures_and_checks(tmp_path: Path):
    pytest.importorskip("matplotlib")
    rows = [sample_row("fast", 0.8), sample_row("slow", 1.2)]
    rows.append({"family": "training", "name": "broken", "error": "boom", "environment": rows[0]["environment"]})
    path = write_rows(tmp_path / "results.jsonl", rows)
    (tmp_path / "checks.json").write_text(json.dumps({"first": None, "second": "AssertionError: 3 differ"}))
    assert report.main([str(path)]) == 0
    text = (tmp_path / "report.md").read_text()
    for wanted in (
        "# ampkit beside torch.amp: a machine", "ampkit at abc with uncommitted changes", "all passed",
        "| training/fast | ampkit | torch.amp | 1.00 | 0.80 (0.79-0.81) | reached |",
        "| training/slow | ampkit | torch.amp | 1.00 | 1.20 (1.19-1.21) | **missed** |",
        "| fast | torch.amp | 2 ms | 1.00 (0.99-1.01) | 1.00 | 2000 | 3 MiB | 7 | 0.2500 | 25% |",
        "## Not measured\n\n- training/broken: boom",
        "## checks: 1 of 2 passed\n\n- second: AssertionError: 3 differ\n",
    ):
        assert wanted in text, wanted
    assert "(ratios.png)" in text
    assert (tmp_path / "ratios.png").read_bytes().startswith(b"\x89PNG")
    assert report.main([str(tmp_path / "absent.jsonl")]) == 1


def test_the_roof_is_the_larger_of_the_two_floors():
    """1e6 bytes at 10 GB/s are 0.1 ms, 4e6 FLOPs at 8 GFLOP/s are 0.5 ms."""
    row = sample_row("a", 1.0)
    assert report.under_roof(row, 1e-3) == pytest.approx(0.5)
    row["work"]["flops"] = 0
    assert report.under_roof(row, 1e-3) == pytest.approx(0.1)
    assert [report.duration(s) for s in (1.234e-6, 0.0456, 7.0)] == ["1.23 us", "45.6 ms", "7 s"]
    assert [report.amount(b) for b in (12, 2048, 3 << 20, 5 << 30)] == ["12 B", "2 KiB", "3 MiB", "5 GiB"]


def test_a_comparison_finds_what_changed_beyond_its_spread(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    old = [sample_row("slower", 1.0), sample_row("faster", 1.0), sample_row("same", 1.0), sample_row("gone", 1.0)]
    old += [sample_row("noisy", 1.0, width=0.5), sample_row("little", 1.0, width=0.001)]
    new = [sample_row("slower", 1.3), sample_row("faster", 0.7), sample_row("same", 1.005), sample_row("new", 9.0)]
    new += [sample_row("noisy", 1.3, width=0.5), sample_row("little", 1.02, width=0.001)]
    verdicts = {change.case: change.verdict for change in compare.compare(old, new)}
    assert verdicts == {
        "training/slower": "slower", "training/faster": "faster", "training/same": "same", "training/noisy": "same",
        "training/little": "same",
    }
    files = [str(write_rows(tmp_path / name, rows)) for name, rows in (("old", old), ("new", new))]
    assert compare.main(files) == 0
    text = capsys.readouterr().out
    assert "| training/slower | ampkit | 1.00 (0.99-1.01) | 1.30 (1.29-1.31) | 1.30 |" in text
    assert "5 compared, 3 the same" in text
    assert compare.main([*files, "--fail"]) == 1
    assert compare.main([files[0], files[0], "--fail"]) == 0
    assert compare.main([str(tmp_path / "absent"), files[0]]) == 2


@pytest.mark.parametrize(
    "path", sorted((ROOT / "benchmarks" / "results").rglob("*.jsonl")), ids=lambda path: path.parent.name
)
def test_results_of_earlier_versions_are_still_reported_and_compared(path: Path):
    rows = results.load(path)
    written = (path.parent / "report.md").read_text()
    assert all(line in written for line in report.markdown(rows).splitlines() if line.startswith("|"))
    assert {change.verdict for change in compare.compare(rows, rows)} == {"same"}
