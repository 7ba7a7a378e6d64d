"""Check the plain English of pages, docstrings and comments: `python -m tests.tools.prose [FILE ...]`, in `make lint`.

Each pattern below is a way of writing that a reader of torch's documentation stumbles over. Code blocks, code in
backquotes, links' targets and HTML comments are not read. ruff (D401) checks that docstrings of functions begin with
an imperative. An allowed hit is written down in `ALLOWED`, with its reason.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 40  # words of a sentence outside tables

# Why a hit is hard to read, and the words that make it.
PATTERNS = {
    "name the thing instead of a clause with 'what'": [r"[Ww]hat (?!to\b|if\b)\w+(?=[^.?!]*(?:[.!]|$))"],
    "name the noun: 'that of', 'those that'": ["[Tt]hat of", "[Tt]hose (?:of|that|which|by|in|with|from|whose)"],
    "'is not a' instead of 'is no'": ["(?:is|are|was|be) no\\b(?! longer)"],
    "objects do not ask, know, tell, want or judge": [
        "asks?|asked|knows?|known|tells?|told|wants|wanted|meets?|met|says?|said|sees|saw|heeds?|judges?|judged|answers"
    ],
    "'if' or 'when' for a condition": [
        r"(?:^|(?<=[.;:] ))Where\b(?![^.!]*\?)",
        "where (?:there (?:is|are)|no|none|it is|they are)",
    ],
    "a word of this house": [
        "beside|[Dd]ear|[Mm]end(?:s|ed|ing)?|kin|oracle|verdict|meanwhile|shall",
        "[Ll]ooks? (?:at|for|like)",
    ],
    "bitwise identical": ["to the bit", r"(?:has|have|with|gives?) [\w.]+'s bits"],
    "a compound noun: '16-bit weights'": [
        "(?:in|of) 16 bits|(?:in|of) half(?! (?:precision|of|the|a)\\b)",
        "(?:weights|moments|models|masters|tensors|operators|casts|rules|gradients|norms) of b?float[0-9]+",
    ],
    "'also', 'too', 'alone', 'at once' in this place": [
        r"too(?=[,.;:])",
        "also (?:where|in|if|under|by|as|with|when|from|for|to|those|at|of)",
        "alone|at once",
    ],
    "a number with its unit": [
        "[Ss]o (?:many|much)",
        "some (?:minutes|seconds|microseconds|times|thirty|[0-9]+)",
        "takes? (?:about )?[0-9.]+ of",
        "of (?:its|torch.amp.s) time",
    ],
    "a verb of state, not of motion": [
        "stays?|goes (?:to|on)|go on|going on|comes? (?:in|up|back|from)|came in|ends? at",
        "(?:is|are) left|(?:is|are) gone|puts? back|put back",
    ],
    "'see X' or 'X lists': pages do not have, say or give": [
        r"[^\[\]\s]*\]\([^)]*\) (?:has|have|says?|goes|gives|is about|follows|tells)"
    ],
    "a connective of everyday English": ["in place of|but for|apart|in the terms of", "(?<=[,;] )else"],
    "14%, without a space": ["[0-9]+ %"],
    "PyTorch, or this PyTorch version": [r"(?:a|this|another|newer|every|any) torch\b(?!\.| function| operator)"],
    "American spelling": [
        r"\w*(?:initial|normal|synchron|quant|serial|optim|organ|special)is(?:e[ds]?|ing|ation)",
        "behaviour|colour",
    ],
}
PATTERNS = {
    why: re.compile("|".join(rf"(?<![\w`])(?:{words})(?![\w`])" for words in patterns), re.MULTILINE)
    for why, patterns in PATTERNS.items()
}
PATTERNS["one fact for each sentence: two semicolons"] = re.compile(r";[^;.|\n]*;")

# (page, hit in its words) -> why it is right there.
ALLOWED: dict[tuple[str, str], str] = {}

IGNORED = re.compile(r"^```.*?^```$|<!--.*?-->|`[^`\n]*`|(?<=\]\()[^)\s]*(?=\))", re.MULTILINE | re.DOTALL)


class Hit(NamedTuple):
    """A place in a file that a pattern matches."""

    line: int
    words: str
    why: str


def files() -> list[Path]:
    """Return the pages of the repository, and the Python files whose docstrings and comments are checked."""
    top = [ROOT / name for name in ("README.md", "CHANGELOG.md", "SECURITY.md")]
    folders = (ROOT / ".github", ROOT / "docs", ROOT / "tests")
    packages = (ROOT / "ampkit", ROOT / "kernels" / "ampkit_kernels", ROOT / "examples")
    pages = [page for folder in folders for page in sorted(folder.rglob("*.md"))]
    return [*top, *pages, *(file for package in packages for file in sorted(package.rglob("*.py")))]


def of_python(source: str) -> str:
    """Return the docstrings and comments of Python source, each on its lines; the lines of code are empty.

    A comment behind code is made the row of a table, which is not joined with the lines around it.
    """
    lines = source.split("\n")
    text = [""] * len(lines)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for n in range(node.lineno - 1, node.end_lineno or node.lineno):
                text[n] = lines[n][node.col_offset :].replace('"""', "")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            is_line = not lines[token.start[0] - 1][: token.start[1]].strip()
            text[token.start[0] - 1] = token.string.lstrip("# ") if is_line else f"| {token.string}"
    return "\n".join(text)


def prose_of(page: str) -> str:
    """Return a page's text with the same lines, with `x` for code in backquotes and nothing for other ignored parts."""

    def blank(found: re.Match[str]) -> str:
        lines = "\n" * found[0].count("\n")
        return "x" if found[0].startswith("`") and not found[0].startswith("```") else lines

    return IGNORED.sub(blank, page)


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yield the sentences outside tables and headings, each with the number of the line on which it begins."""
    for found in re.finditer(r"(?:^(?!\s*$|[|#:]|    ).*\n?)+", text, re.MULTILINE):
        start = found.start()
        for item in re.split(r"(?<=[.?!:])\s+|\n(?=\s*(?:[-*]|\d+\.) )", found[0]):
            place = text.index(item, start) if item else start
            yield text.count("\n", 0, place) + 1, item
            start = place + len(item)


def hits(name: str, page: str) -> list[Hit]:
    """Return what a reader would stumble over in a page, in the order of lines."""
    text = prose_of(page)
    joined = re.sub(r"(?<=\S)\n(?=[^\s|#>*0-9-])", " ", text)  # a sentence may be broken between two lines
    found = []
    for why, pattern in PATTERNS.items():
        for hit in pattern.finditer(joined):
            words = hit[0].strip()
            if (name, words) not in ALLOWED:
                found.append(Hit(_line_of(text, joined, hit.start()), words, why))
    for line, sentence in sentences(text):
        if len(sentence.split()) > LONGEST:
            words = " ".join(sentence.split()[:6])
            found.append(Hit(line, f"{words} ...", f"a sentence of {len(sentence.split())} words; at most {LONGEST}"))
    return sorted(found)


def _line_of(text: str, joined: str, position: int) -> int:
    """Return the line of a position in the text whose lines were joined; both have the same length."""
    assert len(text) == len(joined)
    return text.count("\n", 0, position) + 1


def main(names: list[str]) -> int:
    """Print the hits of the named files, or of all; return 1 if there are any."""
    n_hits = 0
    for path in [Path(name).resolve() for name in names] or files():
        name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        found = hits(name, of_python(text) if path.suffix == ".py" else text)
        n_hits += len(found)
        for hit in found:
            print(f"{name}:{hit.line}: {hit.words!r}: {hit.why}")
    return 1 if n_hits else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
