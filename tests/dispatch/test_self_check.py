"""The self check of regions in an unknown torch, and the error of a torch that lacks a private name."""

import os
import re
import runpy
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ampkit import autocast, torch_private
from ampkit.dispatch import self_check
from ampkit.region.stack import thread

ROOT = Path(__file__).resolve().parents[2]
SENTENCE = (
    r"^ampkit does not work with torch \S+: {}\. Supported are torch 2\.11 to 2\.15: "
    r"python -m pip install 'torch>=2\.11,<2\.16'"
)


# For each message, a function of torch and what replaces it during the check.
FAULTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "an operator with a rule does not compute with the casts of the region": ("mm", lambda a, b: a * b),
    "the casts of a region are not differentiated": (
        "mm",
        lambda a, b: torch.matmul(*(each.detach().bfloat16().requires_grad_() for each in (a, b))),
    ),
    "an operator without a rule does not fall through the region": ("neg", torch.Tensor.detach),
    "ZeroDivisionError: division by zero": ("mm", lambda a, b: 1 / 0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_region_that_does_not_do_its_work_is_refused(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert self_check.problem() is None
    self_check.once.cache_clear()
    thread.modes.clear()
    thread.last = None
    monkeypatch.setattr(torch, *FAULTS[fault])
    for _ in range(2):  # the second time fails too
        with pytest.raises(RuntimeError, match=SENTENCE.format(fault)), autocast("cpu"):
            pytest.fail("the region was entered")


def test_the_callers_modes_and_threads_do_not_matter() -> None:
    """Nor does the check touch them: it runs in a thread of its own, which ends."""
    with FakeTensorMode(), torch.inference_mode(), torch.device("meta"), torch.autocast("cpu"), autocast("cpu"):
        assert self_check.problem() is None
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("ampkit")] == []


MISSING = """
    import functools, importlib, re, runpy, sys
    import torch
    import ampkit.debugging.torch_private
    from ampkit import torch_private

    def take_away(holder, name, look_up):
        taken = getattr(holder, name)
        delattr(holder, name)
        try:
            look_up()
            return "was found"
        except BaseException as error:
            return f"{type(error).__name__}: {error}"
        finally:
            setattr(holder, name, taken)

    def holder_of(module, path):
        *holders, name = path.split(".")
        holder = functools.reduce(getattr, holders, module)
        classes = holder.__mro__ if isinstance(holder, type) else (holder, *type(holder).__mro__)
        return next((each for each in classes if name in vars(each)), holder), name

    files = [torch_private, sys.modules["ampkit.debugging.torch_private"]]
    for module in files:
        source = open(module.__file__).read()
        for path in set(re.findall(r'private\\(\\s*f?"([^"{]+)"', source)) - IMMUTABLE:
            holder, name = holder_of(torch, path)
            print(path, take_away(holder, name, functools.partial(runpy.run_path, module.__file__)), sep=" | ")
    for module, path in LATE:
        holder, name = holder_of(importlib.import_module(f"torch.{module}"), path)
        look_up = functools.partial(torch_private.loaded, module, path)
        print(f"{module}.{path}", take_away(holder, name, look_up), sep=" | ")
"""
IMMUTABLE = {  # attributes of types written in C, which cannot be taken away
    "nn.Module._call_impl.__code__",
    "Tensor._is_zerotensor",
    "UntypedStorage._cdata",
    "UntypedStorage._new_with_weak_ptr",
}


def test_a_torch_that_lacks_a_name_is_refused() -> None:
    """At import, or at the first use of a name in a module that torch imports late."""
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "ampkit").rglob("*.py")]
    late = {pair for source in sources for pair in re.findall(r'[ (]loaded\("(\w[^"]+)", "([^"]+)"\)', source)}
    assert {module for module, _ in late} > {"_dynamo", "_dynamo.symbolic_convert", "distributed.tensor"}
    script = f"IMMUTABLE, LATE = {IMMUTABLE!r}, {sorted(late)!r}\n{textwrap.dedent(MISSING)}"
    search = os.pathsep.join((str(ROOT), str(ROOT / "kernels")))
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": search},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = dict(line.split(" | ") for line in done.stdout.splitlines())
    sentence = "ImportError: ampkit does not work with torch {}: it has no torch.{}. Supported are torch 2.11 to 2.15"
    wrong = {path: text for path, text in found.items() if sentence.format(torch.__version__, path) not in text}
    assert wrong == {}
    assert len(found) > 70


def test_a_module_that_torch_has_not_imported_has_no_names() -> None:
    assert torch_private.loaded("no_such_module", "name") is None
    assert torch_private.loaded("nn", "functional.linear") is torch.nn.functional.linear


def test_functions_that_dynamo_calls_bear_the_mark_of_torch() -> None:
    def function() -> None: ...

    marks = vars(torch.compiler.assume_constant_result(function)).copy()
    vars(function).clear()
    assert vars(torch_private.called_while_tracing(function)) == marks != {}


def test_the_metadata_takes_the_versions_that_are_supported() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '"torch>={}.{}"'.format(*torch_private.OLDEST) in text


def test_the_page_of_versions_is_made_from_the_runs() -> None:
    make = runpy.run_path(str(ROOT / "docs" / "make_versions.py"))
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    rows = [row for row in page.splitlines() if row.startswith("| 2")]
    assert make["with_row"](page, rows[0]) == page, "run: make matrix"
    newer = "| 2.99.0 | 4.0.0 | 3.14.0 | 1 | 0 | 2 | 3 | 4 | 2027-01-01 |"
    assert make["with_row"](page, newer) == page.replace(rows[-1], f"{rows[-1]}\n{newer}")
    assert [row for row in rows if row.split(" | ")[4] != "0"] == []
    supported = re.search(r"VERSIONS = \((.*)\)", (ROOT / "noxfile.py").read_text(encoding="utf-8"))
    assert supported is not None
    missing = {version.strip('" ') for version in supported[1].split(",")} - {row[2:].partition("+")[0] for row in rows}
    assert not missing - {torch.__version__.partition("+")[0]}, "run: make matrix"  # whose row this run may write
