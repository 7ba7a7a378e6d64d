"""`ampkit debug search` on a factory of the user's own."""

from pathlib import Path

import pytest

from ampkit.__main__ import main

FACTORY = """
import os
from tests.debugging.plants import PLANTS, build, error_of, passes

def make():
    plant = PLANTS[int(os.environ.get("PLANT", "1"))]
    model, batch, _ = build(plant)
    inner, count = error_of(model, batch, plant.dtype), 0

    def evaluate(policy):
        nonlocal count
        count += 1
        if count == int(os.environ.get("INTERRUPT", "0")):
            raise KeyboardInterrupt
        return inner(policy)

    made = {"evaluate": evaluate, "model": model}
    return made if "CHECK" in os.environ else {**made, "passes": passes(plant.dtype)}

def nothing():
    return 3

def wrong():
    return {**make(), "evaluate": lambda policy: 1 / 0}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / f"factory_{tmp_path.name}.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def factory(folder: Path) -> list[str]:
    return ["debug", "search", "--factory", f"factory_{folder.name}:make"]


def test_found(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(factory(folder)) == 1
    out = capsys.readouterr().out
    assert '.for_modules(model, {"1.inner": torch.float32, "6.inner": torch.float32})' in out
    assert "it fails without any one of the 2" in out


def test_interrupted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERRUPT", "5")
    assert main(factory(folder)) == 130


def test_a_command_that_checks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHECK", "1")
    check = "python -c 'import sys; sys.exit(not float(sys.argv[1]) < 0.02)'"
    assert main([*factory(folder), "--check", check]) == 1
    assert main([*factory(folder), "--check", "true"]) == 0
    assert main([*factory(folder), "--check", "false"]) == 3


def test_a_budget(folder: Path) -> None:
    assert main([*factory(folder), "--max-evaluations", "4"]) == 3


def test_a_metric_that_raises_is_inconclusive(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["debug", "search", "--factory", f"factory_{folder.name}:wrong"]) == 3
    assert "ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "says"), [
    ("factory_{}", "expected 'pkg.mod:function'"),
    ("nosuchmodule:make", "--factory is 'nosuchmodule:make': No module named 'nosuchmodule'"),
    ("factory_{}:other", "expected 'pkg.mod:function'"),
    ("factory_{}:nothing", "returned 3; expected a dict with 'evaluate', 'model'"),
])
def test_bad_factories(name: str, says: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["debug", "search", "--factory", name.format(folder.name)]) == 2
    assert says in capsys.readouterr().err
