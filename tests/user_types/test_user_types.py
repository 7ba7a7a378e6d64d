"""ampkit's types under a strict type checker: a correct script passes, and each mistake is found."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

import ampkit
from tests.helpers.paths import ROOT

HERE = Path(__file__).parent
# Errors that follow from another mistake in the same expression.
FOLLOWS = {"reportUnknownMemberType", "reportUnknownVariableType"}


class Found(NamedTuple):
    """An error that pyright reports."""

    line: int
    rule: str
    message: str


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Found]]:
    """Pyright, strict, in a project of the user's own, where ampkit is an installed package with `py.typed`."""
    pytest.importorskip("pyright", reason="it is in ampkit[dev]")
    project = tmp_path_factory.mktemp("project")
    for name in ("training.py", "mistakes.py"):
        shutil.copy(HERE / name, project)
    (project / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict", "pythonVersion": "3.11"}')
    command = [sys.executable, "-m", "pyright", "-p", str(project), "--pythonpath", sys.executable, "--outputjson"]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths})
    report = json.loads(ran.stdout)
    assert report["summary"]["filesAnalyzed"] == 2, ran.stderr

    def of(name: str) -> list[Found]:
        return [
            Found(error["range"]["start"]["line"] + 1, error["rule"], error["message"])
            for error in report["generalDiagnostics"]
            if Path(error["file"]).name == name
        ]

    return of


@pytest.mark.slow
def test_a_strict_user_has_nothing_to_mend(complaints: Callable[[str], list[Found]]) -> None:
    """Every `assert_type` holds, and every type is known."""
    assert complaints("training.py") == []


@pytest.mark.slow
def test_every_mistake_is_found(complaints: Callable[[str], list[Found]]) -> None:
    """In its line, for its reason, and nothing else."""
    expected = {
        (number, rule)
        for number, line in enumerate((HERE / "mistakes.py").read_text().splitlines(), 1)
        for rule in re.findall(r"report\w+", line.partition("#")[2])
    }
    assert len(expected) >= 20
    assert {(error.line, error.rule) for error in complaints("mistakes.py") if error.rule not in FOLLOWS} == expected


def test_the_script_uses_every_public_name() -> None:
    """Of the package and of `ampkit.amp`."""
    nodes = list(ast.walk(ast.parse((HERE / "training.py").read_text())))
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    reached = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    assert set(ampkit.__all__) - used - reached == set()
    assert set(ampkit.amp.__all__) - reached == set()
