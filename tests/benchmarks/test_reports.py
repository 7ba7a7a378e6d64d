"""Result files, reports and comparisons."""

from pathlib import Path

import pytest

from benchmarks import compare, report, results
from benchmarks.case import AMPKIT, SAME_LIST, TORCH
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


def test_a_report_has_a_table_for_each_question(tmp_path: Path):
    """A line for each case; aims, losses and failures shown; a page gets the tables of times."""
    rows = [sample_row("fast", 0.8), sample_row("slow", 1.2), sample_row("small", 1.1, family="small")]
    rows[0]["sides"][SAME_LIST] = sample_row("", 0.9)["sides"][AMPKIT]
    rows.append({name: rows[0][name] for name in results._NEEDED} | {"name": "broken", "error": "no"})
    path, page = write_rows(tmp_path / "results.jsonl", rows), tmp_path / "page.md"
    page.write_text(f"before\n\n{report.BEGIN}old{report.END}\n\nafter\n")
    assert report.main([str(path), "--page", str(page)]) == 0
    text = (tmp_path / "report.md").read_text()
    for wanted in (
        "# ampkit beside torch.amp", "a machine, 20", "at abc with uncommitted changes", "Tests first: all passed",
        "| region | 12 / 15 | 4 / 7 |",
        "| case | torch.amp | ampkit | ampkit, torch's list |",
        "| fast | 2 ms, 2 ms | 0.80 (0.79-0.81), 0.80 | 0.90 (0.89-0.91), 0.90 |",
        "| training/fast | ampkit | torch.amp | 1.00 | 0.80 (0.79-0.81) | reached |",
        "| training/slow | ampkit | torch.amp | 1.00 | 1.20 (1.19-1.21) | **missed** |",
        "## Peak memory: training steps\n\n| case | torch.amp | ampkit | ampkit, torch's list |",
        "| slow | 3 MiB | 3 MiB |  |", "## Not measured\n\n- training/broken: no",
    ):
        assert wanted in text, wanted
    assert text.index("small models") < text.index("Training steps")
    assert "Launches" not in text
    shown = page.read_text()
    assert shown.startswith(f"before\n\n{report.BEGIN}")
    assert shown.endswith(f"{report.END}\n\nafter\n")
    assert "### Training steps\n\n| case |" in shown
    assert "old" not in shown
    assert "Peak memory" not in shown
    assert report.main([str(path), "--page", str(path)]) == report.main([str(tmp_path / "absent.jsonl")]) == 1


def test_units_and_sides_that_are_shown():
    assert [report.duration(s) for s in (1.234e-6, 0.0456, 7.0)] == ["1.23 us", "45.6 ms", "7 s"]
    assert [report.amount(b) for b in (12, 2048, 3 << 20, 5 << 30)] == ["12 B", "2 KiB", "3 MiB", "5 GiB"]
    row = sample_row("", 1.0, clock="events")
    side = {**row["sides"][AMPKIT], "facts": {"bytes_moved": 4e6}}
    row["sides"] = {TORCH: side} | {f"s{n}": {**side, "wall": {"median": 1.0 - n / 99}} for n in range(20)}
    (shown,) = report.shown([row])
    assert list(shown["sides"]) == [TORCH, "s19", "s18", "s17"]
    assert "| 2 |  |" not in report.table([shown], report.FACTS["GB/s"])
    assert report.table([shown], report.FACTS["GB/s"]).splitlines()[2].startswith("|  | 2 | 0.00495")


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


def test_the_page_shows_the_results_that_are_kept():
    """One dated folder, from which `python -m benchmarks.report RESULTS --page docs/performance.md` writes the page."""
    (path,) = (ROOT / "benchmarks" / "results").glob("*/results.jsonl")
    rows = results.load(path)
    assert (path.parent / "report.md").read_text() == report.markdown(rows)
    assert "\n\n".join(report.tables(rows, "###")) in (ROOT / "docs" / "performance.md").read_text()
    assert {change.verdict for change in compare.compare(rows, rows)} == {"same"}
