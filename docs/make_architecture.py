"""Write the drawing of the layers in architecture.md, from the imports. Run: python docs/make_architecture.py

`tests/repository/test_form.py` compares the page with the sources by the same functions, and finds private names of
torch by `private_names`.

A package is a folder of `ampkit/`, or a module next to the folders; `kernels/ampkit_kernels` is one. It is one layer
above the highest package that it imports, wherever in its code the import is: at the top, inside a function, or for
type checkers only.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = Path(__file__).with_name("architecture.md")
SOURCES = {"ampkit": ROOT / "ampkit", "ampkit_kernels": ROOT / "kernels" / "ampkit_kernels"}

Graph = Mapping[str, set[str]]


def module_name(path: Path, sources: Mapping[str, Path] = SOURCES) -> str:
    """Dotted name of a source file."""
    for package, folder in sources.items():
        if path.is_relative_to(folder):
            parts = (package, *path.relative_to(folder).with_suffix("").parts)
            return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    raise ValueError(f"{path} is in no source folder")


def source_texts(sources: Mapping[str, Path] = SOURCES) -> dict[str, str]:
    """Every module of these packages by its dotted name, with its text."""
    files = sorted(path for folder in sources.values() for path in folder.rglob("*.py"))
    return {module_name(path, sources): path.read_text(encoding="utf-8") for path in files}


# --- layers


def imported_names(source: str, package: str) -> Iterator[str]:
    """Dotted names that a module imports anywhere in its code, for whatever reason.

    `from a import b` gives both `a` and `a.b`, as `b` may be a module. Relative names count from `package`.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = resolve_name("." * node.level + (node.module or ""), package)
            yield origin
            yield from (f"{origin}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "import_module":
            yield from (resolve_name(name.value, package) for name in node.args[:1] if isinstance(name, ast.Constant))


def import_graph(texts: Mapping[str, str]) -> dict[str, set[str]]:
    """For each module the modules of the same set that it imports. A submodule hides its package."""
    graph = {}
    packages = {name.rpartition(".")[0] for name in texts}
    for name, text in texts.items():
        package = name if name in packages else name.rpartition(".")[0]
        found = {other for other in imported_names(text, package) if other in texts and other != name}
        graph[name] = {one for one in found if not any(other.startswith(f"{one}.") for other in found)}
    return graph


def package_of(module: str) -> str:
    """Return the package of a module: `region` for `ampkit.region.autocast`, `ampkit` for the package's own file."""
    parts = module.split(".")
    return parts[1] if parts[0] == "ampkit" and len(parts) > 1 else parts[0]


def package_graph(graph: Graph) -> dict[str, set[str]]:
    """For each package the other packages that its modules import."""
    packages: dict[str, set[str]] = {}
    for module, imported in graph.items():
        packages.setdefault(package_of(module), set()).update(package_of(other) for other in imported)
    return {package: imported - {package} for package, imported in packages.items()}


def layers(graph: Graph) -> list[list[str]]:
    """From the lowest layer upwards, each above all that it imports. `graphlib.CycleError` where there is no order."""
    height: dict[str, int] = {}
    for name in TopologicalSorter(graph).static_order():
        height[name] = max((height[below] + 1 for below in graph[name]), default=0)
    return [sorted(name for name in height if height[name] == level) for level in range(max(height.values()) + 1)]


def layers_text(graph: Graph) -> str:
    """Return the drawing: packages, the highest layer first, with their imports and the layers of their modules."""
    packages = package_graph(graph)
    lines = []
    for level, names in reversed(list(enumerate(layers(packages)))):
        for package in names:
            lines.append(f"{level}  {package:<16} on {', '.join(sorted(packages[package])) or 'torch alone'}")
            lines += [f"       {'  '.join(modules)}" for modules in reversed(_layers_inside(graph, package))]
    return "\n".join(["```text", *lines, "```"])


def _layers_inside(graph: Graph, package: str) -> list[list[str]]:
    """Return the layers of a package's modules, by their last names; none for a package of one module."""
    modules = {
        name for name in graph if package_of(name) == package and not any(o.startswith(f"{name}.") for o in graph)
    }
    if len(modules) < 2:
        return []
    inside = {name: graph[name] & modules for name in modules}
    return [[name.rpartition(".")[2] for name in layer] for layer in layers(inside)]


# --- private names of torch


def private_names(source: str) -> set[str]:
    """Private names of torch that a module reaches, dotted: `torch._C._x`, `torch.optim.optimizer._y`.

    Operators (`torch.ops.aten._softmax`) are names in the dispatcher and do not count.
    """
    bound = {"torch": "torch"}
    reached: set[str] = set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            reached |= {alias.name for alias in node.names}
            bound |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            reached |= set(names.values())
            bound |= names
    for node in ast.walk(tree):
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and node.id in bound:
            reached.add(".".join((bound[node.id], *parts)))
        elif isinstance(node, ast.Call) and getattr(node.func, "id", None) == "private":  # of `torch_private`
            reached |= {f"torch.{name.value}" for name in node.args[:1] if isinstance(name, ast.Constant)}
    private = {short for name in reached if (short := _to_private_part(name))}
    return {name for name in private if not any(other.startswith(f"{name}.") for other in private)}


def _to_private_part(name: str) -> str | None:
    """Return the name up to its last private part and one public one behind it, or None without one in torch."""
    parts = name.split(".")
    private = [index for index, part in enumerate(parts) if re.match(r"_(?!_)", part)]
    if parts[0] != "torch" or parts[:2] == ["torch", "ops"] or not private:
        return None
    return ".".join(parts[: private[-1] + 2])


# --- the page


def render(page: str) -> str:
    """Return the page with the layers as the sources are now."""
    begin, end = "<!-- layers: by make_architecture.py -->\n", "<!-- end of layers -->"
    before, found_begin, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"the page has no marks {begin.strip()!r} and {end!r}")
    return f"{before}{begin}{layers_text(import_graph(source_texts()))}\n{end}{after}"


if __name__ == "__main__":
    TARGET.write_text(render(TARGET.read_text(encoding="utf-8")), encoding="utf-8")
