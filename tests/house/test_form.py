"""What the repository's text keeps to, checked in one go that reports every offender.

Docstrings, functions that fit on a screen, imports in layers without a circle, torch's private names in one package,
nothing of the machine that a text was written on. Each check returns its offenders.
"""

import ast
import inspect
import re
import runpy
import subprocess
from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import ModuleType

import ampkit
from tests.helpers.paths import ROOT

ARCHITECTURE = ROOT / "docs" / "architecture.md"
TOOLS = runpy.run_path(str(ROOT / "docs" / "make_architecture.py"))
MOST_LINES = 60
# The two halves are used together and import nothing of each other.
APART = ("ampkit.region", "ampkit.scaler")
KERNEL_MODULES = {"ampkit_kernels", "ampkit_kernels.reference", "ampkit_kernels.triton_ops"}    # what ampkit may import
# Written in pieces so that this file passes its own test.
FOREIGN = re.compile("|".join((
    "(?<![\\w.])/(?:wo" "rk|fa" "rm|ro" "ot|ho" "me/[a-z]+)/",     # somebody's folders
    "/t" "mp/\\w",                                                # tests use tmp_path
    "\\bis" "sues? \\d{1,2}\\b",                                  # a tracker that readers cannot see
)))


def test_form() -> None:
    """Every offender of every check below."""
    folders = [ROOT / name for name in ("ampkit", "kernels", "benchmarks", "tests", "examples", "docs")]
    files = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    sources = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files}
    packages: dict[str, str] = TOOLS["source_texts"]()
    graph = TOOLS["import_graph"](packages)
    offenders = [
        *undocumented(ampkit),
        *long_functions(sources),
        *circles(graph),
        *circles(TOOLS["room_graph"](graph)),
        *upward_imports(graph),
        *private_names_elsewhere(packages),
        *(f"{name}: {line}" for name, text in tracked_texts() for line in foreign_lines(text)),
    ]
    for name in ("benchmarks", "tests"):
        offenders += circles(TOOLS["import_graph"](TOOLS["source_texts"]({name: ROOT / name})))
    assert not offenders, "\n" + "\n".join(offenders)


def test_the_architecture_page_is_what_the_sources_say() -> None:
    """The drawing of the layers and the list of private names."""
    page = ARCHITECTURE.read_text(encoding="utf-8")
    assert page == TOOLS["render"](page), "run: python docs/make_architecture.py"


def undocumented(module: ModuleType) -> list[str]:
    """Public names without a docstring of their own."""
    found = []
    for name in module.__all__:
        value = getattr(module, name)
        own = vars(value).get("__doc__") if inspect.isclass(value) else inspect.getdoc(value)
        if len((own or "").split()) < 3:
            found.append(f"{module.__name__}.{name} has no docstring")
    return found


def long_functions(texts: Mapping[str, str]) -> list[str]:
    """Functions longer than a screen, docstring included."""
    return [
        f"{name}:{node.lineno}: {node.name} has {lines} lines; at most {MOST_LINES}"
        for name, text in texts.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or 0) - node.lineno + 1) > MOST_LINES
    ]


def circles(graph: Mapping[str, set[str]]) -> list[str]:
    """The modules of a circle of imports, if there is one."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [f"import circle: {' -> '.join(error.args[1])}"]
    return []


def upward_imports(graph: Mapping[str, set[str]]) -> list[str]:
    """Kernels that know the package above them, a half that reaches the other, `ampkit` inside the kernels' package."""
    found = []
    for name in graph:
        reached = reached_from(graph, name)
        forbidden = {"ampkit"} if name.startswith("ampkit_kernels") else set()
        for one, other in (APART, APART[::-1]):
            if name.startswith(f"{one}."):
                forbidden.add(other)
        found += [
            f"{name} imports {other}" for other in sorted(reached)
            if any(other == above or other.startswith(f"{above}.") for above in forbidden)
        ]
        if not name.startswith("ampkit_kernels"):
            inside = {other for other in graph[name] if other.startswith("ampkit_kernels")} - KERNEL_MODULES
            found += [f"{name} imports {other}" for other in sorted(inside)]
    return found


def reached_from(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """Every module that importing `start` brings in, directly or through others."""
    seen: set[str] = set()
    pending = [start]
    while pending:
        for name in graph.get(pending.pop(), set()) - seen:
            seen.add(name)
            pending.append(name)
    return seen


def private_names_elsewhere(texts: Mapping[str, str]) -> list[str]:
    """Names that torch does not promise, used outside `torch_internals`; the kernels' package stands apart."""
    return [
        f"{name} uses {private}; take it through ampkit.torch_internals"
        for name, text in texts.items()
        if not name.startswith(("ampkit.torch_internals", "ampkit_kernels"))
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
            continue        # pictures, and files that are deleted and not yet committed


def foreign_lines(text: str) -> list[str]:
    """Lines that only make sense on the machine where they were written."""
    return [line.strip()[:100] for line in text.splitlines() if FOREIGN.search(line)]
