"""Regions, policies and what they take of torch: no import goes up or in a circle, and private names have one home."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
# What torch does not promise: a name with an underscore in it or under it, and the look-up of one.
PRIVATE = re.compile(
    r"\btorch(?!\.ops\b)(\.\w+)*\._[A-Za-z]\w*|\bfrom torch[\w.]* import .*\b_\w+"
    r"|\b_(dynamo|functorch|global_forward)\w*|\bprivate\("
)
STRINGS = re.compile(r'"""(?:.|\n)*?"""|"[^"\n]*"|#.*')


@pytest.fixture(scope="module")
def make_layers() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_layers", ROOT / "docs" / "make_layers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_drawing_is_what_the_imports_say(make_layers) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert make_layers.BEGIN in page
    assert make_layers.insert(page) == page, "run: python docs/make_layers.py"


def test_rooms_import_downwards(make_layers) -> None:
    """No circle inside a room, and none across; imports in functions and for type checkers count."""
    rooms = make_layers.ROOMS
    graph = make_layers.import_graph()
    for name, found in graph.items():
        room = name.split(".")[1] if name.count(".") else ""
        if room in rooms:
            below = {f"ampkit.{other}" for other in rooms[rooms.index(room) :]}
            up = {other for other in found if not any(f"{other}.".startswith(f"{one}.") for one in below)}
            assert not up, f"{name} imports {up}"


def test_a_circle_is_seen(make_layers) -> None:
    names = make_layers.imported("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .b import x", "a")
    assert "a.b" in names
    with pytest.raises(RecursionError):
        make_layers.layers({"ampkit.x.a": {"ampkit.x.b"}, "ampkit.x.b": {"ampkit.x.a"}}, "x")


@pytest.mark.parametrize(
    "text", ["torch._C.x", "torch.utils._pytree.y", "from torch import nn, _guards", "x._dynamo", "private(z)"]
)
def test_a_private_name_is_seen(text: str) -> None:
    assert PRIVATE.search(text)


@pytest.mark.parametrize("room", ["policy", "region"])
def test_private_names_of_torch_are_taken_in_one_place(room: str) -> None:
    for path in (ROOT / "ampkit" / room).glob("*.py"):
        code = STRINGS.sub("", path.read_text(encoding="utf-8"))
        found = PRIVATE.search(code)
        assert found is None, f"{path.name}: {found.group()}; take it from ampkit.torch_internals"
