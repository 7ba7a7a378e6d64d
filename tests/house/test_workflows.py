"""The workflows of GitHub Actions call only what this repository has, and run every check."""

import re
from typing import Any

import pytest

from tests.helpers.paths import ROOT

yaml = pytest.importorskip("yaml", reason="it is in ampkit[dev]")

TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
WORKFLOWS: dict[str, dict[str, Any]] = {
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
}


def commands(workflow: dict[str, Any]) -> list[list[str]]:
    """The words of every line that a workflow runs."""
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    return [line.split() for step in steps for line in step.get("run", "").splitlines()]


def test_workflows_run_what_is_there_for_a_limited_time() -> None:
    """A target of the Makefile or a script of the repository; actions of a fixed version."""
    assert set(WORKFLOWS) == {"matrix", "package", "tests"}
    for name, workflow in WORKFLOWS.items():
        unknown = [
            words for words in commands(workflow)
            if not (words[0] == "make" and words[1] in TARGETS) and not (ROOT / words[0]).is_file()
        ]
        assert (name, unknown) == (name, [])
        assert workflow["permissions"] == {"contents": "read"}
        for job in workflow["jobs"].values():
            assert job["timeout-minutes"] <= 120
            assert all(re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step.get("uses", "a/b@v1")) for step in job["steps"])


def test_the_workflows_run_every_check() -> None:
    """What CI runs, every torch that the noxfile names, the wheel and the documentation."""
    assert [".ci/run"] in commands(WORKFLOWS["tests"])
    assert {"wheel", "docs"} <= {words[1] for words in commands(WORKFLOWS["package"])}
    versions = re.search(r"^VERSIONS = \((.*)\)$", (ROOT / "noxfile.py").read_text(encoding="utf-8"), re.MULTILINE)
    assert versions is not None
    torch = WORKFLOWS["matrix"]["jobs"]["suite"]["strategy"]["matrix"]["torch"]
    assert torch == re.findall(r'"([\d.]+)"', versions[1])
