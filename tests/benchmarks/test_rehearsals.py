"""The runner of `benchmarks.rehearse` writes a line for each report, and whether it is right."""

import json
from pathlib import Path

import pytest

from benchmarks import rehearse
from benchmarks.fragile_models import MODELS, loss_of


def test_a_report_and_a_truth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearse, "STEPS", 2)
    out = tmp_path / "reports.jsonl"
    arguments = ["positions to 1024", "diffusion", "--seeds", "1", "--steps", "2", "--warm-up", "0", "--out", str(out)]
    assert rehearse.main(arguments) == 1  # two steps are too few to find anything
    assert rehearse.main([*arguments, "--truth"]) == 0
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [(row["model"], row["fragile"], row.get("right")) for row in rows] == [
        ("positions to 1024", True, False),
        ("diffusion", False, True),
        ("positions to 1024", True, None),
        ("diffusion", False, None),
    ]
    assert abs(rows[-1]["gap"]) < 0.01


@pytest.mark.parametrize("model", [model for model in MODELS if model.everyday], ids=lambda model: model.name)
def test_each_model_takes_its_batches(model: rehearse.Model) -> None:
    module, (batch,) = rehearse.drawn(model, 0, 1)
    with rehearse.region(model, module):
        assert loss_of(module, batch).isfinite()
    assert {*model.place} <= {path for path, _ in module.named_modules()}
