"""The page about debugging, and the README, show the output of the commands and of the debugging examples."""

import contextlib
import io
import re
import runpy

import pytest

from ampkit.__main__ import main
from tests.helpers.paths import EXAMPLES, ROOT

PAGES = ROOT / "README.md", ROOT / "docs" / "debugging.md"
SHOWN = re.compile(r"<!-- output of (?P<command>[^\n]+) -->\n```text\n(?P<text>.*?)```", re.DOTALL)
FOUND = [found for page in PAGES for found in SHOWN.finditer(page.read_text(encoding="utf-8"))]


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("found", FOUND, ids=lambda found: found["command"])
def test_shown_output_is_real(found: re.Match[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers may differ in their last digit between builds of torch, and how many operators run; words may not."""
    monkeypatch.chdir(ROOT)
    command = found["command"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        if command.startswith("examples/"):
            runpy.run_path(command)["main"]()
        else:
            main(command.split()[1:])

    def words(text: str) -> str:
        return re.sub(r"\d+\.\d+(e[+-]\d+)?|\d+(?= operators)", "#", text)

    assert words(out.getvalue()) == words(found["text"])


def test_the_pages_show_every_debugging_example() -> None:
    shown = {found["command"].rpartition("/")[2].removesuffix(".py") for found in FOUND}
    assert {path.stem for path in EXAMPLES.glob("debug_*.py")} <= shown
