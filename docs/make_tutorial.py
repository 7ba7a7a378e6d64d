"""Write the programs of `examples/tutorial/`, each as its difference to the one before, into tutorial.md.

Run: python docs/make_tutorial.py. A test compares the page with the programs by the same function.
"""

import difflib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = Path(__file__).with_name("tutorial.md")
STEPS = sorted((ROOT / "examples" / "tutorial").glob("step*.py"))
SHOWN = re.compile(
    r"(?P<head>^<!-- not run: examples/tutorial/(?P<step>\w+)\.py, [^\n]*-->\n)```\w+\n.*?^```$",
    re.MULTILINE | re.DOTALL,
)


def lines(path: Path) -> list[str]:
    """Return a program without its docstring, since the page has a sentence for it."""
    return path.read_text(encoding="utf-8").partition('"""\n\n')[2].splitlines()


def difference(before: Path, after: Path) -> str:
    """Return the changed lines with two lines around them, as in a patch without its line numbers."""
    parts = list(difflib.unified_diff(lines(before), lines(after), n=2, lineterm=""))[2:]
    return "\n".join("..." if part.startswith("@@") else part.rstrip() for part in parts).removeprefix("...\n")


def render(page: str) -> str:
    """Return the page with the programs as they are now."""
    numbers = {path.stem: number for number, path in enumerate(STEPS)}

    def current(found: re.Match[str]) -> str:
        number = numbers[found["step"]]
        if number == 0:
            return "{}```python\n{}\n```".format(found["head"], "\n".join(lines(STEPS[0])))
        return f"{found['head']}```diff\n{difference(STEPS[number - 1], STEPS[number])}\n```"

    return SHOWN.sub(current, page)


if __name__ == "__main__":
    TARGET.write_text(render(TARGET.read_text(encoding="utf-8")), encoding="utf-8")
