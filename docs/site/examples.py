"""Turn docstrings into Markdown, with their examples and indented blocks as code."""

import re
import textwrap
from typing import Any

from griffe import Extension

DOCTEST = re.compile(r"^(?P<indent> *)>>> .*(?:\n(?! *$).*)*", re.MULTILINE)
LITERAL = re.compile(r"::\n\n(?P<block>(?:(?: {4,}.*)?\n)+)")


class Examples(Extension):
    """Has the documentation show `>>> ` examples, and what follows `::`, as Python."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Rewrite the docstring of an object. Called by griffe with every object that it has read."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """Return a docstring with fences around its code."""

    def literal(found: re.Match[str]) -> str:
        return f":\n\n```python\n{textwrap.dedent(found['block']).strip()}\n```\n\n"

    def doctest(found: re.Match[str]) -> str:
        indent = found["indent"]
        return f"{indent}```pycon\n{found[0]}\n{indent}```"

    return DOCTEST.sub(doctest, LITERAL.sub(literal, f"{text}\n")).rstrip("\n")
