"""The workflows of GitHub Actions: well formed, and calling only what this repository has."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.paths import ROOT

yaml = pytest.importorskip("yaml", reason="it is in ampkit[dev]")

FOLDER = ROOT / ".github" / "workflows"
FILES = sorted(FOLDER.glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
TOP = {"name", "on", "permissions", "concurrency", "jobs"}
JOB = {"name", "runs-on", "timeout-minutes", "strategy", "steps"}
STEP = {"name", "uses", "with", "run"}


def load(text: str) -> dict[str, Any]:
    """A workflow; in YAML 1.1 its key `on` reads as true."""
    found = yaml.safe_load(text)
    return {"on" if key is True else key: value for key, value in found.items()}


def faults(workflow: dict[str, Any]) -> list[str]:
    """What GitHub or a runner would stumble over."""
    found = [f"unknown key {key}" for key in workflow.keys() - TOP]
    found += [f"no {key}" for key in ("on", "permissions", "jobs") if not workflow.get(key)]
    for name, job in workflow.get("jobs", {}).items():
        found += [f"{name}: unknown key {key}" for key in job.keys() - JOB]
        found += [f"{name}: no {key}" for key in ("runs-on", "timeout-minutes", "steps") if not job.get(key)]
        variables = {f"matrix.{key}" for key in job.get("strategy", {}).get("matrix", {})}
        used = set(re.findall(r"\$\{\{ *(matrix\.[\w-]+) *\}\}", str(job)))
        found += [f"{name}: no {variable}" for variable in used - variables]
        for step in job.get("steps", []):
            found += [f"{name}: unknown key {key}" for key in step.keys() - STEP]
            if ("uses" in step) == ("run" in step):
                found.append(f"{name}: a step that does not either run or use something")
            if not re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step.get("uses", "a/b@v1")):
                found.append(f"{name}: {step['uses']} has no version")
            found += [f"{name}: no command {command}" for command in unknown_commands(step.get("run", "make help"))]
    return found


def unknown_commands(script: str) -> list[str]:
    """Lines that call neither a target of the Makefile nor a script of the repository."""
    lines = [line.split() for line in script.strip().splitlines()]
    return [
        " ".join(words)
        for words in lines
        if not (words[0] == "make" and words[1] in TARGETS) and not (ROOT / words[0]).is_file()
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_workflow_is_well_formed(path: Path) -> None:
    assert faults(load(path.read_text(encoding="utf-8"))) == []


def test_the_faults_of_a_workflow_are_found() -> None:
    """Each of those that are looked for."""
    broken = load("""
        on: {push: }
        job: {}
        jobs:
          a:
            runs-on: ubuntu-latest
            steps:
              - uses: actions/checkout
              - run: make nothing
              - run: ./nowhere.sh ${{ matrix.python }}
              - {uses: actions/checkout@v4, run: make help}
    """)
    assert sorted(faults(broken)) == [
        "a: a step that does not either run or use something",
        "a: actions/checkout has no version",
        "a: no command ./nowhere.sh ${{ matrix.python }}",
        "a: no command make nothing",
        "a: no matrix.python",
        "a: no timeout-minutes",
        "no permissions",
        "unknown key job",
    ]


def test_the_workflows_run_every_check() -> None:
    """What CI runs, every torch that the noxfile names, the wheel and the documentation."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in FILES}
    assert "run: .ci/run" in texts["tests"]
    assert {"make wheel", "make docs"} <= set(re.findall(r"make \w+", texts["package"]))
    noxfile = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    versions = re.search(r"^VERSIONS = \((.*)\)$", noxfile, re.MULTILINE)
    assert versions is not None
    torch = load(texts["matrix"])["jobs"]["suite"]["strategy"]["matrix"]["torch"]
    assert torch == re.findall(r'"([\d.]+)"', versions[1])
