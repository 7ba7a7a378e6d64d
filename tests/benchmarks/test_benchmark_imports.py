"""Imports of the benchmarks and the kernels point one way: those for type checkers and inside functions counted too."""

import ast
from graphlib import CycleError, TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

from benchmarks.environment import ROOT

FOLDERS = {"benchmarks": ROOT / "benchmarks", "ampkit_kernels": ROOT / "kernels" / "ampkit_kernels"}


def graph(package: str, folder: Path) -> dict[str, set[str]]:
    """For each module of a package those of it that it imports, anywhere in its code."""
    texts = {}
    for path in folder.rglob("*.py"):
        parts = (package, *path.relative_to(folder).with_suffix("").parts)
        texts[parts[:-1] if parts[-1] == "__init__" else parts] = path
    names = {".".join(parts): path for parts, path in texts.items()}
    found: dict[str, set[str]] = {}
    for name, path in names.items():
        home = name if path.name == "__init__.py" else name.rpartition(".")[0]
        imported = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                origin = resolve_name("." * node.level + (node.module or ""), home)
                # A name that is no module comes out of the module that it is imported from.
                imported |= {
                    full if (full := f"{origin}.{alias.name}") in names else origin for alias in node.names
                }
        found[name] = imported & names.keys() - {name}
    return found


@pytest.mark.parametrize("package", FOLDERS)
def test_no_import_circle(package: str):
    modules = graph(package, FOLDERS[package])
    assert len(modules) > 15
    try:
        TopologicalSorter(modules).prepare()
    except CycleError as error:
        pytest.fail(f"import circle: {' -> '.join(error.args[1])}")


def test_a_circle_inside_functions_is_seen(tmp_path: Path):
    (tmp_path / "a.py").write_text("def f():\n    from .b import g\n")
    (tmp_path / "b.py").write_text("import typing\nif typing.TYPE_CHECKING:\n    from x import a\n")
    with pytest.raises(CycleError):
        TopologicalSorter(graph("x", tmp_path)).prepare()


def test_only_the_triton_room_imports_triton():
    folder = FOLDERS["ampkit_kernels"]
    for path in folder.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if path.parent.name != "triton_ops":
            assert "import triton\n" not in text, path
            assert "from triton" not in text, path
