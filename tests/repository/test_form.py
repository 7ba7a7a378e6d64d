"""Rules for the form of the repository's text. One test reports every violation.

Docstrings, function bodies that fit on a screen, imports in layers without a circle, torch's private names in one
package, nothing of the machine that a text was written on. Each check returns its offenders.
"""

import ast
import re
import runpy
import subprocess
from collections.abc import Iterable, Mapping
from graphlib import TopologicalSorter
from pathlib import Path

import ampkit
from tests.helpers.paths import ROOT

ARCHITECTURE = ROOT / "docs" / "architecture.md"
TOOLS = runpy.run_path(str(ROOT / "docs" / "make_architecture.py"))
MOST_LINES = 60
HALVES = ("region", "scaler")  # used together, and neither imports the other
KERNEL_MODULES = {"ampkit_kernels", "ampkit_kernels.reference", "ampkit_kernels.triton_ops"}  # what ampkit may import
# What only its writer can follow: a folder of one computer (tests use tmp_path), a number in place of a link.
UNREACHABLE = re.compile(r"(?<![\w.])/(?:home|mnt|root|tmp|Users|work)/\w|\bissues? #?\d{1,3}\b")


def test_form() -> None:
    """Every check below, over all sources and all tracked text."""
    folders = [ROOT / name for name in ("ampkit", "kernels", "benchmarks", "tests", "examples", "docs")]
    files = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    sources = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files}
    packages: dict[str, str] = TOOLS["source_texts"]()
    graph = TOOLS["import_graph"](packages)
    violations = [
        *(f"ampkit.{name} has no docstring" for name in ampkit.__all__ if not getattr(ampkit, name).__doc__),
        *long_functions(sources),
        *imports_that_reach_too_far(graph),
        *private_names_elsewhere(packages),
        *(f"{name}: {line}" for name, text in tracked_texts() for line in unreachable_lines(text)),
    ]
    assert not violations, "\n" + "\n".join(violations)


def test_the_architecture_page_is_what_the_sources_say() -> None:
    """The drawing of the layers. Tests and benchmarks import without a circle too."""
    page = ARCHITECTURE.read_text(encoding="utf-8")
    assert page == TOOLS["render"](page), "run: python docs/make_architecture.py"
    for name in ("benchmarks", "tests"):
        TopologicalSorter(TOOLS["import_graph"](TOOLS["source_texts"]({name: ROOT / name}))).prepare()


def long_functions(texts: Mapping[str, str]) -> list[str]:
    """Functions whose body is longer than a screen; signature and docstring are not counted."""
    return [
        f"{name}:{function.lineno}: the body of {function.name} has {lines} lines; at most {MOST_LINES}"
        for name, text in texts.items()
        for function in ast.walk(ast.parse(text))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and (lines := body_lines(function)) > MOST_LINES
    ]


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from the first statement, which is not the docstring, to the end of the function."""
    statements = function.body if ast.get_docstring(function) is None else function.body[1:]
    return (function.end_lineno or 0) - statements[0].lineno + 1 if statements else 0


def test_a_body_has_no_signature_and_no_docstring() -> None:
    signature, docstring, body = "def f(\n  x,\n):\n", '    """One.\n\n    Two."""\n', "    y = x\n\n    return y\n"
    for text, lines in ((signature + body, 3), (signature + docstring + body, 3), (signature + docstring, 0)):
        (function,) = ast.parse(text).body
        assert isinstance(function, ast.FunctionDef)
        assert body_lines(function) == lines, text


def imports_that_reach_too_far(graph: Mapping[str, set[str]]) -> list[str]:
    """Imports of `ampkit` by `ampkit_kernels`, of one half by the other, of the kernels' inner modules by `ampkit`."""
    packages = TOOLS["package_graph"](graph)
    return [
        *(f"ampkit_kernels imports {package}" for package in below(packages, "ampkit_kernels")),
        *(f"{half} reaches {other}" for half, other in (HALVES, HALVES[::-1]) if other in below(packages, half)),
        *(
            f"{name} imports {other}"
            for name, imported in graph.items()
            if not name.startswith("ampkit_kernels")
            for other in imported - KERNEL_MODULES
            if other.startswith("ampkit_kernels")
        ),
    ]


def below(packages: Mapping[str, set[str]], package: str) -> set[str]:
    """All packages that this one imports, directly or through others."""
    return packages[package].union(*(below(packages, other) for other in packages[package]))


def private_names_elsewhere(texts: Mapping[str, str]) -> list[str]:
    """Names that torch does not promise, used outside files named `torch_private` and `ampkit_kernels`."""
    return [
        f"{name} uses {private}; take it through ampkit.torch_private"
        for name, text in texts.items()
        if not name.startswith("ampkit_kernels") and not name.endswith(".torch_private")
        for private in sorted(TOOLS["private_names"](text))
    ]


def tracked_texts() -> Iterable[tuple[str, str]]:
    """Name and text of every text file under version control; none in an unpacked archive."""
    if not (ROOT / ".git").exists():
        return
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listing.stdout.split("\0")):
        try:
            yield name, Path(ROOT, name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
            continue  # pictures, and files that are deleted and not yet committed


def unreachable_lines(text: str) -> list[str]:
    """Lines with a path or a number that a reader cannot follow."""
    return [line.strip()[:100] for line in text.splitlines() if UNREACHABLE.search(line)]
