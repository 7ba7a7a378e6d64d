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
    assert self_check.fault() is None
    self_check.once.cache_clear()
    thread.modes.clear()
    monkeypatch.setattr(torch, *FAULTS[fault])
    for _ in range(2):  # the second time fails too
        with pytest.raises(RuntimeError, match=SENTENCE.format(fault)), autocast("cpu"):
            pytest.fail("the region was entered")


def test_the_callers_modes_and_threads_do_not_matter() -> None:
    """Nor does the check touch them: it runs in a thread of its own, which ends."""
    with FakeTensorMode(), torch.inference_mode(), torch.device("meta"), torch.autocast("cpu"), autocast("cpu"):
        assert self_check.fault() is None
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("ampkit")] == []


MISSING = """
    import functools, importlib, re, sys
    import torch
    import ampkit

    modules = [name for name in sys.modules if name.startswith("ampkit.") and "kernels" not in name]
    paths = []
    for name in modules:
        source = open(sys.modules[name].__file__).read()
        paths += re.findall(r'private\\(\\s*"([^"]+)"', source)
    for path in set(paths) - {"nn.Module._call_impl.__code__"}:  # which cannot be taken away
        for name in [name for name in sys.modules if name.partition(".")[0] == "ampkit"]:
            del sys.modules[name]
        holder, _, name = path.rpartition(".")
        holder = functools.reduce(getattr, holder.split(".") if holder else (), torch)
        kept = getattr(holder, name)
        delattr(holder, name)
        try:
            importlib.import_module("ampkit")
            print(path, "was imported", sep=" | ")
        except BaseException as error:
            print(path, f"{type(error).__name__}: {error}", sep=" | ")
        finally:
            setattr(holder, name, kept)
"""


def test_a_torch_that_lacks_a_name_is_refused_at_import() -> None:
    search = os.pathsep.join((str(ROOT), str(ROOT / "kernels")))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MISSING)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": search},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = dict(line.split(" | ") for line in done.stdout.splitlines())
    wrong = {path: text for path, text in found.items() if f"it has no torch.{path}. Supported are" not in text}
    assert wrong == {}
    assert len(found) > 45


def test_a_late_module_that_lacks_a_name_is_refused() -> None:
    assert torch_private.loaded("no_such_module", "name") is None
    assert torch_private.loaded("nn", "functional.linear") is torch.nn.functional.linear
    with pytest.raises(ImportError, match=SENTENCE.format(r"it has no torch\.nn\.no\.such\.name")):
        torch_private.loaded("nn", "no.such.name")


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
