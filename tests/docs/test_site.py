"""The documentation as a site: complete, built without a warning, readable without a network."""

import builtins
import os
import posixpath
import pydoc
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ampkit
import ampkit_kernels
from tests.helpers.paths import ROOT

REFERENCE = ROOT / "docs" / "reference"
PACKAGES = ("amp", "debugging", "integrations", "matmul", "optim")


def test_every_public_name_has_its_place_in_the_reference() -> None:
    """Each exactly once. Besides them there are only results, which are classes in their own modules."""
    found = [
        name
        for page in REFERENCE.glob("*.md")
        for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert len(found) == len(set(found))
    expected = {f"ampkit.{name}" for name in ampkit.__all__ if name not in PACKAGES}
    expected |= {f"ampkit_kernels.{name}" for name in ampkit_kernels.__all__ if callable(vars(ampkit_kernels)[name])}
    for name in ("amp", "debugging", "matmul", "optim"):
        expected |= {f"ampkit.{name}.{public}" for public in getattr(ampkit, name).__all__}
    listed = {name for name in found if not name.startswith("ampkit.integrations.")}  # these need other libraries
    assert not expected - listed
    for name in listed - expected:
        result = pydoc.locate(name)
        assert isinstance(result, type), name
        assert f"{result.__module__}.{result.__qualname__}" == name
    libraries = {name.split(".")[2] for name in found if name.startswith("ampkit.integrations.")}
    assert libraries == set(ampkit.integrations.__all__)


def test_members_that_the_reference_lists_are_shown() -> None:
    """mkdocs leaves out, without a warning, members that have gone, are inherited or have no docstring."""
    entry = re.compile(r"^::: (?P<name>\S+)\n(?P<options>(?: {4}.*\n)*)", re.MULTILINE)
    hidden = []
    for page in REFERENCE.glob("*.md"):
        for found in entry.finditer(page.read_text(encoding="utf-8") + "\n"):
            listed = re.search(r"^ +members: \[(.*)\]$", found["options"], re.MULTILINE)
            owner: Any = pydoc.locate(found["name"]) if listed else None
            inherits = "inherited_members: true" in found["options"]
            for member in listed[1].split(", ") if listed else ():
                if not getattr(getattr(owner, member, None) if inherits else vars(owner).get(member), "__doc__", None):
                    hidden.append(f"{page.name}: {found['name']}.{member}")
    assert not hidden


def test_every_method_of_the_scaler_is_in_the_reference() -> None:
    """mkdocs shows a class's own members; those of its bases, as `stats`, have to be listed. The page names torch's."""
    page = (REFERENCE / "scaler.md").read_text(encoding="utf-8")
    listed = re.search(r"^::: ampkit.GradScaler\n {4}options:\n {6}members: \[(.*)\]$", page, re.MULTILINE)
    assert listed is not None
    public = {name for name in dir(ampkit.GradScaler) if not name.startswith(("_", "get_", "set_", "is_enabled"))}
    assert sorted(listed[1].split(", ")) == sorted(public)


def test_errors_that_pages_name_can_be_imported() -> None:
    """From where a page says, or from `ampkit` or one of its packages, or they are Python's or torch's."""
    public = {name for package in ("", *PACKAGES) for name in dir(pydoc.locate(f"ampkit.{package}".rstrip(".")))}
    known = public | set(ampkit_kernels.__all__) | set(dir(builtins))
    unknown = []
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for name in re.findall(r"`([\w.]*Error)`", page.read_text(encoding="utf-8")):
            if name not in known and pydoc.locate(name) is None:
                unknown.append(f"{page.name}: {name}")
    assert not unknown


def test_links_out_of_docs_lead_to_pages_of_the_site() -> None:
    """Else `mkdocs build --strict` fails, which `make test` runs only where mkdocs is."""
    pages = runpy.run_path(str(ROOT / "docs" / "site" / "pages.py"))
    lost = []
    for path in (ROOT / "docs").rglob("*.md"):
        folder = path.parent.relative_to(ROOT).as_posix()
        for found in pages["LINK"].finditer(pages["CODE"].sub("", path.read_text(encoding="utf-8"))):
            target = posixpath.normpath(posixpath.join(folder, found["target"]))
            if not ("://" in found["target"] or target.startswith("docs/") or target == "examples"):
                lost += [] if target in pages["PAGES"] else [f"{path.name}: {target}"]
    assert not lost


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it."""
    pytest.importorskip("mkdocs", reason="it is in ampkit[docs]")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert built.returncode == 0, built.stderr + built.stdout
    return folder


@pytest.mark.slow
def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    """No script, style, font or picture; a link to follow is another matter."""
    loads = re.compile(
        r"""<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=["']?(?:https?:)?//[^>]*>|@import|url\(["']?http"""
    )
    found = [
        f"{path.name}: {hit[0]}"
        for path in [*site.rglob("*.html"), *site.rglob("*.css")]
        for hit in loads.finditer(path.read_text(encoding="utf-8"))
    ]
    assert not found
