"""Write the row of docs/versions.md for the running torch, from a report of the whole suite: see `make matrix`.

For the torch of `.venv`, without another environment:

    make test ARGS=--junitxml=build/report.xml; .venv/bin/python docs/make_versions.py build/report.xml
"""

import importlib.metadata
import platform
import sys
from pathlib import Path
from xml.etree import ElementTree

import torch

import ampkit.debugging.torch_private  # noqa: F401  (looks up the names that debugging needs)
from ampkit.dispatch.dispatcher import KEY_NAMES
from ampkit.torch_private import SUPPORTED, looked_up

PAGE = Path(__file__).with_name("versions.md")
HEAD = f"""# Versions of torch

Supported are {SUPPORTED}, on Python 3.11 and newer. Every row is a run of the whole suite by `make matrix`, which
writes it; CUDA builds ran on a CPU. Skipped tests need a GPU, a package or an instruction that the machine lacks, or
what that torch does not have; tests that are expected to fail (xfail) watch a defect of torch.

The first region of a process tests a newer torch, and `ampkit doctor` reports the result.

| torch | triton | Python | passed | failed | skipped | xfail | seconds | on |
| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | --- |
"""
FOOT = f"""
## What ampkit needs and torch does not promise

The dispatch keys `{"` and `".join(KEY_NAMES.values())}` are there in every version
of the table, and so are the names below: a test holds that, and what happens where one is not. None has a public
counterpart. Without one, importing ampkit fails and names it.

{{}}
"""


def counts(report: Path) -> tuple[int, int, int, int, float, str]:
    """Passed, failed, skipped and xfailed tests, seconds, and the day."""
    suite = ElementTree.parse(report).getroot().find("testsuite")
    if suite is None:
        raise ValueError(f"{report} holds no test suite; expected what pytest writes with --junitxml")
    expected = sum(skip.get("type") == "pytest.xfail" for skip in suite.iter("skipped"))
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    skipped = int(suite.attrib["skipped"]) - expected
    passed = int(suite.attrib["tests"]) - failed - skipped - expected
    return passed, failed, skipped, expected, float(suite.attrib["time"]), suite.attrib["timestamp"][:10]


def with_row(page: str, row: str | None = None) -> str:
    """The page with a row added, or put in the place of the one for the same version, in order of versions."""
    rows = {line.split()[1]: line for line in [*page.splitlines(), row or ""] if line.startswith("| 2")}
    names = "\n".join(f"- `torch.{path}`" for path in sorted(set(looked_up)))
    return HEAD + "".join(f"{rows[version]}\n" for version in sorted(rows, key=_key)) + FOOT.format(names)


def _key(version: str) -> list[int]:
    return [int(part) for part in version.partition("+")[0].split(".")]


def main(report: Path) -> None:
    """Write the row."""
    passed, failed, skipped, expected, seconds, day = counts(report)
    versions = torch.__version__, importlib.metadata.version("triton"), platform.python_version()
    cells = *versions, passed, failed, skipped, expected, round(seconds), day
    row = f"| {' | '.join(map(str, cells))} |"
    PAGE.write_text(with_row(PAGE.read_text(encoding="utf-8") if PAGE.exists() else "", row), encoding="utf-8")
    print(row)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
