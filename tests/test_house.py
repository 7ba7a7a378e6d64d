"""The house rules that a machine can check: imports, packaging, docstrings, portability."""

import ast
import inspect
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

import ampkit

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {"ampkit": ROOT / "ampkit", "ampkit_kernels": ROOT / "kernels" / "ampkit_kernels"}
FILES = sorted(path for folder in SOURCES.values() for path in folder.rglob("*.py"))
MOST_LINES = 400
HEAVY = ("triton", "matplotlib", "rich", "sklearn", "transformers")

# Later rooms stand on earlier ones. Rooms not named here only have to keep the graph free of cycles.
LEVELS = (
    ("policy.op_table", "policy.casting", "policy.policy", "region.mode", "region.autocast"),
    ("region.weight_cache", "region.mode"),
    ("scaler.loss_scale", "scaler.grad_scaler"),
    ("gradients.collect", "scaler.grad_scaler"),
    ("gradients.kernels", "scaler.grad_scaler"),
)
# Edges against the direction, each with its reason. They are imports inside a function.
BACK_EDGES = {
    # Tables are also built where Triton is absent; the writer is a Triton kernel.
    ("ampkit_kernels.pointer_table", "ampkit_kernels.table_writer"),
}
# The two halves are used together and know nothing of one another.
APART = (("region.autocast", "scaler.grad_scaler"), ("region.mode", "gradients.kernels"))


def module_name(path: Path) -> str:
    """Dotted name of a source file."""
    for package, folder in SOURCES.items():
        if path.is_relative_to(folder):
            parts = (package, *path.relative_to(folder).with_suffix("").parts)
            return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    raise ValueError(f"{path} is in no source folder")


def imported_names(source: str, package: str) -> Iterator[str]:
    """Dotted names that a module imports anywhere in its code, those for type checkers alone left out.

    `from a import b` gives both `a` and `a.b`, as `b` may be a module. Relative names count from `package`.
    """
    pending: list[ast.AST] = [ast.parse(source)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = resolve_name("." * node.level + (node.module or ""), package)
            yield origin
            yield from (f"{origin}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending.extend(node.orelse)
        else:
            pending.extend(ast.iter_child_nodes(node))


def import_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """For each module the modules of the same set that it imports. A submodule hides its package."""
    graph = {}
    packages = {name.rpartition(".")[0] for name in sources}
    for name, source in sources.items():
        package = name if name in packages else name.rpartition(".")[0]
        found = {other for other in imported_names(source, package) if other in sources and other != name}
        graph[name] = {one for one in found if not any(other.startswith(f"{one}.") for other in found)}
    return graph


def forward_edges(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The graph without the edges that are known to go back."""
    return {name: {other for other in found if (name, other) not in BACK_EDGES} for name, found in graph.items()}


def reached_from(graph: dict[str, set[str]], start: str) -> set[str]:
    """Every module that importing `start` brings in, directly or through others."""
    seen: set[str] = set()
    pending = [start]
    while pending:
        for name in graph.get(pending.pop(), set()) - seen:
            seen.add(name)
            pending.append(name)
    return seen


SOURCE_TEXT = {module_name(path): path.read_text(encoding="utf-8") for path in FILES}
GRAPH = import_graph(SOURCE_TEXT)


def fresh_python(code: str, *flags: str, cwd: Path = ROOT, path: str | None = None) -> str:
    """Run code in a new interpreter that finds the checkout; return what it printed."""
    search = path or os.pathsep.join((str(ROOT), str(ROOT / "kernels")))
    ran = subprocess.run(
        [sys.executable, *flags, "-c", code],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": search},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def heavy_modules_after(statement: str) -> list[str]:
    """Which of the heavy modules a new interpreter holds after a statement."""
    listing = fresh_python(f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))")
    loaded = json.loads(listing.splitlines()[-1])
    return [name for name in HEAVY if name in loaded]


# --- imports


def test_the_graph_reader_sees_edges_that_matter() -> None:
    """A lazy import counts, one for type checkers does not, and a package gives way to its submodule."""
    graph = import_graph({
        "a": "def f():\n    from b import c",
        "b": "",
        "b.c": "import typing\nif typing.TYPE_CHECKING:\n    import a\nelse:\n    from . import d",
        "b.d": "from .c import x",
    })
    assert graph == {"a": {"b.c"}, "b": set(), "b.c": {"b.d"}, "b.d": {"b.c"}}
    with pytest.raises(CycleError):
        TopologicalSorter(import_graph({"a": "import b", "b": "from a import x"})).prepare()
    assert reached_from({"a": {"b"}, "b": {"c"}, "c": set()}, "a") == {"b", "c"}


def test_imports_have_no_cycles() -> None:
    """Modules import from rooms below them; a name from the package root would close a circle."""
    try:
        TopologicalSorter(forward_edges(GRAPH)).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize(("name", "other"), sorted(BACK_EDGES))
def test_edges_back_are_still_there(name: str, other: str) -> None:
    """An exception that nobody needs any more hides the next mistake."""
    assert other in GRAPH[name]


def test_kernels_never_import_ampkit() -> None:
    """The kernels are usable, and testable, without the package above them."""
    for name, text in SOURCE_TEXT.items():
        if name.partition(".")[0] == "ampkit_kernels":
            above = [other for other in imported_names(text, name) if other.partition(".")[0] == "ampkit"]
            assert not above, f"{name} imports {above}"


def test_one_door_to_the_kernels() -> None:
    """Only `ampkit.gradients.kernels` knows the other package by name."""
    for name, text in SOURCE_TEXT.items():
        if name.partition(".")[0] == "ampkit" and name != "ampkit.gradients.kernels":
            below = [other for other in imported_names(text, name) if other.startswith("ampkit_kernels")]
            assert not below, f"{name} imports {below}; go through ampkit.gradients.kernels"


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: f"{level[0]}..{level[-1]}")
def test_imports_point_one_way(level: tuple[str, ...]) -> None:
    """No room reaches one that stands above it."""
    for index, room in enumerate(level):
        above = {f"ampkit.{name}" for name in level[index + 1 :]}
        assert not above & reached_from(forward_edges(GRAPH), f"ampkit.{room}"), f"{room} reaches up"


@pytest.mark.parametrize(("left", "right"), APART)
def test_the_halves_stay_apart(left: str, right: str) -> None:
    """Autocast works without the scaler's code, and the other way round."""
    assert f"ampkit.{right}" not in reached_from(GRAPH, f"ampkit.{left}")
    assert f"ampkit.{left}" not in reached_from(GRAPH, f"ampkit.{right}")


def test_importing_ampkit_is_light() -> None:
    """`import ampkit` loads torch and nothing that only some users need."""
    assert heavy_modules_after("import ampkit") == []


def test_importing_the_kernels_does_not_import_triton() -> None:
    """Triton is imported when a kernel is first used."""
    assert heavy_modules_after("import ampkit_kernels") == []


def test_the_light_import_check_can_fail() -> None:
    """The check above sees a heavy module when there is one."""
    assert heavy_modules_after("import ampkit, rich") == ["rich"]


def test_importing_ampkit_warns_of_nothing() -> None:
    """Also where the user turns warnings into errors."""
    fresh_python("import torch, warnings\nwarnings.simplefilter('error')\nimport ampkit, ampkit_kernels")


def test_the_checkout_shadows_no_other_package() -> None:
    """The folder `kernels` is a source root, so `import kernels` finds no module of ours."""
    code = "import importlib.util as u\nspec = u.find_spec('kernels')\nprint(spec.origin if spec else None)"
    assert str(ROOT) not in fresh_python(code)


# --- packaging


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as users install it."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_both_packages_and_nothing_else(wheel: Path) -> None:
    """Every source file, the type markers, the licence and the command; no tests, no stray files."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        entry_points = archive.read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
    info = next(name.partition("/")[0] for name in names if ".dist-info/" in name)
    assert {name.partition("/")[0] for name in names} == {"ampkit", "ampkit_kernels", info}
    assert {"ampkit/py.typed", "ampkit_kernels/py.typed", f"{info}/licenses/LICENSE"} <= set(names)
    assert "ampkit = ampkit.__main__:main" in entry_points
    sources = {name.replace(".", "/") for name in SOURCE_TEXT}
    shipped = {name.removesuffix(".py").removesuffix("/__init__") for name in names if name.endswith(".py")}
    assert shipped == sources


def test_the_wheel_works_away_from_the_sources(wheel: Path, tmp_path: Path) -> None:
    """Unpacked elsewhere, both packages import from there and the command answers."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = "import ampkit, ampkit_kernels\nprint(ampkit.__file__, ampkit_kernels.__file__)"
    printed = fresh_python(code, cwd=tmp_path, path=str(tmp_path)).split()
    assert all(Path(name).is_relative_to(tmp_path) for name in printed)


# --- documentation and form


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
