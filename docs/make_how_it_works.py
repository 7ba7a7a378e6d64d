"""Write the one-page programs of `examples/` into how-it-works.md. Run: python docs/make_how_it_works.py

A test compares the page with the programs by the same function.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = Path(__file__).with_name("how-it-works.md")
PROGRAM = re.compile(
    r"(?P<head>^<!-- not run: (?P<path>examples/\w+\.py), [^\n]*-->\n```python\n).*?(?P<tail>^```$)",
    re.MULTILINE | re.DOTALL,
)


def render(page: str) -> str:
    """Return the page with each program as its file is now."""

    def current(found: re.Match[str]) -> str:
        return found["head"] + (ROOT / found["path"]).read_text(encoding="utf-8") + found["tail"]

    return PROGRAM.sub(current, page)


if __name__ == "__main__":
    TARGET.write_text(render(TARGET.read_text(encoding="utf-8")), encoding="utf-8")
