"""The workflows of GitHub Actions call only targets and scripts of this repository, and run every check."""

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


def test_workflows_run_every_check_and_only_what_is_there() -> None:
    """Targets of the Makefile or scripts, for a limited time; every torch that the noxfile names, wheel and pages."""
    for name, workflow in WORKFLOWS.items():
        run = commands(workflow)
        assert not [words for words in run if words[:1] != ["make"] and not (ROOT / words[0]).is_file()], name
        assert {words[1] for words in run if words[0] == "make"} <= TARGETS, name
        assert {key: job for key, job in workflow["jobs"].items() if job["timeout-minutes"] > 120} == {}, name
    assert [".ci/run"] in commands(WORKFLOWS["tests"])
    assert {"wheel", "docs"} <= {words[1] for words in commands(WORKFLOWS["package"])}
    versions = re.search(r"^VERSIONS = \((.*)\)$", (ROOT / "noxfile.py").read_text(encoding="utf-8"), re.MULTILINE)
    assert versions is not None
    torch = WORKFLOWS["matrix"]["jobs"]["suite"]["strategy"]["matrix"]["torch"]
    assert torch == re.findall(r'"([\d.]+)"', versions[1])
