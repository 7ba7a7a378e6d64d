"""The self check of regions in an unknown torch, and everything that works without regions."""

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

from ampkit import WeightCache, autocast
from ampkit.engine import self_check
from ampkit.torch_internals import private_names, versions

ROOT = Path(__file__).resolve().parents[2]
SENTENCE = (
    r"^ampkit's regions do not work with torch \S+: {}\. Supported are torch 2\.11 to 2\.15; to get one: "
    r"python -m pip install 'torch>=2\.11,<2\.16'\. Policies and the GradScaler need no region"
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
    monkeypatch.setattr(torch, *FAULTS[fault])
    for _ in range(2):  # the second time fails too; with a new cache, so that the region makes a mode
        with pytest.raises(RuntimeError, match=SENTENCE.format(fault)), autocast("cpu", cache=WeightCache()):
            pytest.fail("the region was entered")


def test_the_callers_modes_and_threads_do_not_matter() -> None:
    """Nor does the check touch them: it runs in a thread of its own, which ends."""
    with FakeTensorMode(), torch.inference_mode(), torch.device("meta"), torch.autocast("cpu"), autocast("cpu"):
        assert self_check.fault() is None
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("ampkit")] == []


MISSING = """
    import functools, sys
    import torch
    import ampkit
    from ampkit.torch_internals import private_names

    def forget():
        for name in [name for name in sys.modules if name.partition(".")[0] == "ampkit"]:
            del sys.modules[name]

    def without(label, names, stand_in=None):
        # Gone while ampkit is imported: torch itself may need them for all the rest.
        forget()
        kept = []
        for path in names:
            holder, _, name = path.rpartition(".")
            holder = functools.reduce(getattr, holder.split(".") if holder else (), torch)
            kept.append((holder, name, getattr(holder, name)))
        for holder, name, _ in kept:
            delattr(holder, name)
            if stand_in is not None:
                setattr(holder, name, stand_in)
        import ampkit
        from ampkit import doctor
        for each in kept:
            setattr(*each)
        assert ampkit.Policy.default("cuda").explain("aten::mm").rule is ampkit.Rule.LOWER
        weight = torch.nn.Parameter(torch.ones(2))
        scaler, optimizer = ampkit.GradScaler("cpu"), torch.optim.SGD([weight], lr=1.0)
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert weight.tolist() == [0, 0], weight
        try:
            with ampkit.autocast("cpu"):
                print(label, "entered", sep=" | ")
        except RuntimeError as error:
            print(label, error, sep=" | ")
        assert not torch.is_autocast_enabled("cpu")

    without("names", list(private_names.looked_up))

    def unknown(name):
        raise RuntimeError("could not parse dispatch key")

    without("key", ["_C._dispatch_key_parse"], unknown)
"""


def test_where_a_name_is_missing_all_but_regions_works() -> None:
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
    assert "it has no dispatch key TESTING_ONLY_GenericMode, dispatch key " in found.pop("key")
    names = found["names"].partition("it has no ")[2].partition(". Supported")[0].split(", ")
    assert set(names) == {f"torch.{path}" for path in private_names.looked_up}


def test_the_metadata_takes_the_versions_that_are_supported() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '"torch>={}.{}"'.format(*versions.OLDEST) in text


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
