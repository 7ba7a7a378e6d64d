"""What the repository's text keeps to: docstrings, small files, nothing of the machine it was written on."""

import ast
import inspect
import re
import subprocess
from pathlib import Path

import pytest

import ampkit
from tests.helpers.paths import ROOT

SOURCES = {"ampkit": ROOT / "ampkit", "ampkit_kernels": ROOT / "kernels" / "ampkit_kernels"}
FILES = sorted(path for folder in SOURCES.values() for path in folder.rglob("*.py"))
MOST_LINES = 400
MOST_TEST_LINES = 500


@pytest.mark.parametrize("name", ampkit.__all__ if hasattr(ampkit, "__all__") else [])
def test_public_names_are_documented(name: str) -> None:
    """Every public name exists and has a docstring of its own."""
    value = getattr(ampkit, name)
    own = vars(value).get("__doc__") if inspect.isclass(value) else inspect.getdoc(value)
    assert len((own or "").split()) >= 3, f"ampkit.{name} has no docstring"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_introduce_themselves_and_stay_small(path: Path) -> None:
    """A module says in its first lines what may enter it, and is short enough to be one room."""
    text = path.read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(text)), "no module docstring"
    assert text.count("\n") <= MOST_LINES, f"over {MOST_LINES} lines: split it"


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("*.py")), ids=lambda path: path.name)
def test_test_files_stay_small(path: Path) -> None:
    """One file is one subject."""
    assert path.read_text(encoding="utf-8").count("\n") <= MOST_TEST_LINES, f"over {MOST_TEST_LINES} lines: split it"


def tracked_files() -> list[Path]:
    """Files under version control; the test is skipped in an unpacked archive."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for name in listing.stdout.split("\0") if name and (path := ROOT / name).is_file()]


# Written in pieces so that this file passes its own test.
FOREIGN = re.compile("|".join((
    "(?<![\\w.])/(?:wo" "rk|fa" "rm|ro" "ot|ho" "me/[a-z]+)/",     # somebody's folders
    "/t" "mp/\\w",                                                # tests use tmp_path
    "\\bis" "sues? \\d{1,2}\\b",                                  # a tracker that readers cannot see
)))


def foreign_lines(text: str) -> list[str]:
    """Lines that only make sense on the machine where they were written."""
    return [line.strip() for line in text.splitlines() if FOREIGN.search(line)]


def test_the_foreign_line_check_can_fail() -> None:
    """It finds what it is for, and leaves links and Python's own words alone."""
    assert len(foreign_lines("cd /wo" "rk/main\nsee is" "sue 7\nopen('/t" "mp/a')")) == 3
    assert foreign_lines("pytorch/pytorch#112583 https://x.org/work/a\nframework/x\ntmp_path / 'a'") == []


def test_tracked_files_name_no_machine_and_no_tracker() -> None:
    """A clone anywhere reads the same."""
    found = []
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue        # pictures
        found += [f"{path.relative_to(ROOT)}: {line[:100]}" for line in foreign_lines(text)]
    assert not found, "\n".join(found)
