"""The page about debugging shows what the commands print."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from ampkit.__main__ import main
from tests.debugging.test_examples_debug import load

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "debugging.md"
SHOWN = re.compile(r"<!-- output of (?P<command>[^\n]+) -->\n```text\n(?P<text>.*?)```", re.DOTALL)


@pytest.mark.parametrize("found", list(SHOWN.finditer(PAGE.read_text())), ids=lambda found: found["command"])
def test_shown_output_is_real(found: re.Match[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers may differ in their last digit between builds of torch; words may not."""
    monkeypatch.chdir(ROOT)
    command = found["command"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        if command.startswith("examples/"):
            load(Path(command).stem).main()
        else:
            main(command.split()[1:])

    def words(text: str) -> str:
        return re.sub(r"\d+\.\d+(e[+-]\d+)?", "#", text)

    assert words(out.getvalue()) == words(found["text"])


def test_the_page_shows_outputs() -> None:
    assert len(SHOWN.findall(PAGE.read_text())) == 6
