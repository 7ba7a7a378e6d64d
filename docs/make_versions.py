"""Write the row of docs/install.md for the running torch, from a report of the whole suite: see `make matrix`.

For the torch of `.venv`, without another environment:

    make test ARGS=--junitxml=build/report.xml; .venv/bin/python docs/make_versions.py build/report.xml
"""

import importlib.metadata
import platform
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import torch

PAGE = Path(__file__).with_name("install.md")
TABLE = re.compile(r"(?P<head>^\| torch \|.*\n\| --- .*\n)(?P<rows>(?:^\| 2.*\n)*)", re.MULTILINE)


def counts(report: Path) -> tuple[int, int, int, int, float, str]:
    """Return the numbers of passed, failed, skipped and xfailed tests, the seconds, and the day."""
    suite = ElementTree.parse(report).getroot().find("testsuite")
    if suite is None:
        raise ValueError(f"{report} holds no test suite; expected what pytest writes with --junitxml")
    expected = sum(skip.get("type") == "pytest.xfail" for skip in suite.iter("skipped"))
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    skipped = int(suite.attrib["skipped"]) - expected
    passed = int(suite.attrib["tests"]) - failed - skipped - expected
    return passed, failed, skipped, expected, float(suite.attrib["time"]), suite.attrib["timestamp"][:10]


def with_row(page: str, row: str) -> str:
    """Return the page with a row added, or replaced if it has one of the same version, in order of versions."""

    def table(found: re.Match[str]) -> str:
        rows = {line.split()[1]: line for line in [*found["rows"].splitlines(), row]}
        return found["head"] + "".join(f"{rows[version]}\n" for version in sorted(rows, key=_key))

    return TABLE.sub(table, page)


def _key(version: str) -> list[int]:
    return [int(part) for part in version.partition("+")[0].split(".")]


def main(report: Path) -> None:
    """Write the row."""
    passed, failed, skipped, expected, seconds, day = counts(report)
    versions = torch.__version__, importlib.metadata.version("triton"), platform.python_version()
    cells = *versions, passed, failed, skipped, expected, round(seconds), day
    row = f"| {' | '.join(map(str, cells))} |"
    PAGE.write_text(with_row(PAGE.read_text(encoding="utf-8"), row), encoding="utf-8")
    print(row)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
