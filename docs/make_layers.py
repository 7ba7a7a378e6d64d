"""Draws in architecture.md which module stands on which, from their imports. Run: python docs/make_layers.py"""

from __future__ import annotations

import ast
from importlib.util import resolve_name
from pathlib import Path

DOCS = Path(__file__).parent
SOURCES = DOCS.parent
ROOMS = ("region", "policy", "torch_internals")         # each may import from those after it
OLD_NAMES = ("ampkit.policy._rules", "ampkit.region.wrapping")      # for pickles; nothing imports them
BEGIN, END = "<!-- layers: drawn by docs/make_layers.py -->", "<!-- end of layers -->"


def import_graph() -> dict[str, set[str]]:
    """For each module of `ampkit` the modules of it that its code names in any import, those for type checkers too."""
    paths = {}
    for path in (SOURCES / "ampkit").rglob("*.py"):
        parts = path.relative_to(SOURCES).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph = {}
    for name, path in paths.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        found = {other for other in imported(path.read_text(encoding="utf-8"), package) if other in paths}
        graph[name] = {one for one in found - {name} if not any(other.startswith(f"{one}.") for other in found)}
    return graph


def imported(source: str, package: str) -> set[str]:
    """Dotted names that a module imports; `from a import b` gives both `a` and `a.b`, as `b` may be a module."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = resolve_name("." * node.level + (node.module or ""), package)
            names.update([origin, *(f"{origin}.{alias.name}" for alias in node.names)])
    return names


def layers(graph: dict[str, set[str]], room: str) -> list[list[str]]:
    """The modules of a room, each above all that it imports there; `RecursionError` if they import in a circle."""
    modules = [name for name in graph if name.startswith(f"ampkit.{room}.") and name not in OLD_NAMES]
    ranks: dict[str, int] = {}

    def rank(name: str) -> int:
        if name not in ranks:
            ranks[name] = 1 + max((rank(other) for other in graph[name] if other in modules), default=-1)
        return ranks[name]

    found: list[list[str]] = [[] for _ in range(max(map(rank, modules)) + 1)]
    for name in sorted(modules):
        found[-1 - rank(name)].append(name.rpartition(".")[2])
    return found


def drawing() -> str:
    """Each line imports from lines below it only."""
    graph = import_graph()
    lines = []
    for room in ROOMS:
        first, *rest = layers(graph, room)
        lines += [f"{room:<17}{'  '.join(first)}", *(f"{'':<17}{'  '.join(line)}" for line in rest)]
    return "\n".join(lines)


def insert(document: str) -> str:
    """The document with a fresh drawing between its markers."""
    head, _, rest = document.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n```\n{drawing()}\n```\n{END}{tail}"


if __name__ == "__main__":
    page = DOCS / "architecture.md"
    page.write_text(insert(page.read_text(encoding="utf-8")), encoding="utf-8")
