"""Who imports whom: no circles, layers downwards only, torch's private names in one room, and the page that says so."""

import runpy
from graphlib import CycleError, TopologicalSorter

import pytest

import ampkit
from tests.helpers.paths import ROOT
from tests.helpers.processes import fresh_python, loaded_after

PAGE = ROOT / "docs" / "architecture.md"
TOOLS = runpy.run_path(str(ROOT / "docs" / "make_architecture.py"))
TEXTS: dict[str, str] = TOOLS["source_texts"]()
GRAPH: dict[str, set[str]] = TOOLS["import_graph"](TEXTS)
HEAVY = ("triton", "matplotlib", "rich", "sklearn", "transformers", "accelerate", "lightning", "timm")
# The two halves are used together and know nothing of one another.
APART = (("region.autocast", "scaler.grad_scaler"), ("region.mode", "gradients.kernels"))


def assert_no_circle(graph: dict[str, set[str]]) -> None:
    """Fail with the modules of a circle, if there is one."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import circle: {' -> '.join(error.args[1])}")


def reached_from(graph: dict[str, set[str]], start: str) -> set[str]:
    """Every module that importing `start` brings in, directly or through others."""
    seen: set[str] = set()
    pending = [start]
    while pending:
        for name in graph.get(pending.pop(), set()) - seen:
            seen.add(name)
            pending.append(name)
    return seen


def test_the_graph_reader_sees_every_import() -> None:
    """Lazy ones and those for type checkers count, and a package gives way to its submodule."""
    graph = TOOLS["import_graph"]({
        "a": "def f():\n    from b import c",
        "b": "",
        "b.c": "import typing\nif typing.TYPE_CHECKING:\n    import a\nelse:\n    from . import d",
        "b.d": "from .c import x",
    })
    assert graph == {"a": {"b.c"}, "b": set(), "b.c": {"a", "b.d"}, "b.d": {"b.c"}}
    with pytest.raises(pytest.fail.Exception, match="import circle: "):
        assert_no_circle(graph)
    assert reached_from({"a": {"b"}, "b": {"c"}, "c": set()}, "a") == {"b", "c"}


def test_no_module_imports_in_a_circle() -> None:
    """Of both packages, wherever the import stands."""
    assert_no_circle(GRAPH)


def test_no_room_imports_in_a_circle() -> None:
    """A room stands on lower ones only."""
    assert_no_circle(TOOLS["room_graph"](GRAPH))


@pytest.mark.parametrize("folder", ["benchmarks", "tests"])
def test_no_circle_beside_the_packages(folder: str) -> None:
    """The tools and the tests keep to the same rule."""
    sources = {folder: ROOT / folder}
    assert_no_circle(TOOLS["import_graph"](TOOLS["source_texts"](sources)))


def test_kernels_never_import_ampkit() -> None:
    """The kernels are usable, and testable, without the package above them."""
    for name, text in TEXTS.items():
        if name.partition(".")[0] == "ampkit_kernels":
            above = [other for other in TOOLS["imported_names"](text, name) if other.partition(".")[0] == "ampkit"]
            assert not above, f"{name} imports {above}"


def test_the_kernels_have_one_door() -> None:
    """`ampkit` takes the kernels' public names, and knows nothing of how the package is divided."""
    for name, text in TEXTS.items():
        if name.partition(".")[0] == "ampkit":
            parts = {other for other in TOOLS["imported_names"](text, name) if other in TEXTS}
            below = sorted(other for other in parts if other.startswith("ampkit_kernels."))
            assert set(below) <= {"ampkit_kernels.reference", "ampkit_kernels.triton_ops"}, f"{name} imports {below}"


@pytest.mark.parametrize(("left", "right"), APART)
def test_the_halves_stay_apart(left: str, right: str) -> None:
    """Autocast works without the scaler's code, and the other way round."""
    assert {f"ampkit.{left}", f"ampkit.{right}"} <= GRAPH.keys()
    assert f"ampkit.{right}" not in reached_from(GRAPH, f"ampkit.{left}")
    assert f"ampkit.{left}" not in reached_from(GRAPH, f"ampkit.{right}")


# --- private names of torch


def test_the_reader_of_private_names_sees_them() -> None:
    """Imported, reached through `torch` or through another name for a part of it, or asked for by name."""
    found = TOOLS["private_names"](
        "import torch\nimport torch._dynamo as d\nfrom torch.optim import optimizer as o\nfrom torch._ops import Op\n"
        "torch._C._x.y()\nd.reset()\no._z\ntorch.ops.aten._softmax\ntorch.nn.Linear\nself._own\nprivate('_guards.T')"
    )
    assert found == {"torch._C._x.y", "torch._dynamo.reset", "torch.optim.optimizer._z", "torch._ops.Op",
                     "torch._guards.T"}


def test_private_names_of_torch_are_used_in_one_room() -> None:
    """What torch does not promise is taken in `torch_internals`; the kernels' package stands apart."""
    found = {
        name: names
        for name, text in TEXTS.items()
        if not name.startswith(("ampkit.torch_internals", "ampkit_kernels"))
        and (names := sorted(TOOLS["private_names"](text)))
    }
    assert not found, "\n".join(f"{name}: {names}" for name, names in found.items())


def test_the_architecture_page_is_what_the_sources_say() -> None:
    """The drawing of the layers and the list of private names."""
    page = PAGE.read_text(encoding="utf-8")
    assert page == TOOLS["render"](page), "run: python docs/make_architecture.py"


# --- what an import brings


def test_importing_ampkit_is_light() -> None:
    """`import ampkit` loads torch and nothing that only some users need."""
    assert loaded_after("import ampkit", HEAVY) == []


def test_importing_the_kernels_does_not_import_triton() -> None:
    """Triton is imported when a kernel is first used."""
    assert loaded_after("import ampkit_kernels", HEAVY) == []


def test_the_light_import_check_can_fail() -> None:
    """The check above sees a heavy module when there is one."""
    assert loaded_after("import ampkit, rich", HEAVY) == ["rich"]


def test_the_wings_are_there_after_a_plain_import() -> None:
    """And are not imported before they are asked for."""
    fresh_python(
        "import sys, ampkit\nassert {'debugging', 'integrations', 'testing'} <= set(dir(ampkit))\n"
        "assert not {'ampkit.debugging', 'ampkit.integrations', 'ampkit.testing'} & set(sys.modules)\n"
        "ampkit.debugging.detect_nonfinite, ampkit.testing.plant_nonfinite, ampkit.optim.AdamW, ampkit.amp.initialize\n"
        "assert dir(ampkit.integrations)[-5:] == ['accelerate', 'fabric', 'lightning', 'timm', 'transformers']\n"
        "assert 'ampkit.integrations.timm' not in sys.modules\n"
        "assert not hasattr(ampkit, 'nothing') and not hasattr(ampkit.integrations, 'nothing')"
    )


def test_an_integration_is_imported_by_asking_for_it() -> None:
    """With the library that it is for."""
    pytest.importorskip("accelerate", reason="it is in ampkit[dev]")
    fresh_python("import ampkit\nampkit.integrations.accelerate.use_ampkit")


def test_what_dir_shows_is_there() -> None:
    """And nothing of the machinery behind it."""
    assert [name for name in dir(ampkit) if not hasattr(ampkit, name)] == []
    assert {name for name in dir(ampkit) if not name.startswith("__")} == set(ampkit.__all__)
    assert set(ampkit.amp.__all__) & set(ampkit.__all__) == set()


@pytest.mark.parametrize(("old", "new"), vars(ampkit)["_MOVED"].items())
def test_a_name_that_has_moved_says_where_to(old: str, new: str) -> None:
    """It still works; the warning names the line that asked for it."""
    with pytest.warns(DeprecationWarning, match=rf"ampkit\.{old} is ampkit\.amp\.{new} now; .* version 0\.2") as caught:
        assert getattr(ampkit, old) is getattr(ampkit.amp, new)
    assert caught[0].filename == __file__
    with pytest.warns(DeprecationWarning, match=old) as caught:
        exec(compile(f"from ampkit import {old}", "script.py", "exec"), {})
    assert {warning.filename for warning in caught} == {"script.py"}
