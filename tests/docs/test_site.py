"""The documentation as a site: complete, built without a warning, readable without a network."""

import os
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

PAGES: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "site" / "pages.py"))
REFERENCE = ROOT / "docs" / "reference"
PACKAGES = ("amp", "debugging", "integrations", "optim")


def test_every_public_name_has_its_place_in_the_reference() -> None:
    """Once, and besides them only results, which are classes in their own modules."""
    found = [
        name
        for page in REFERENCE.glob("*.md")
        for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert len(found) == len(set(found))
    expected = {f"ampkit.{name}" for name in ampkit.__all__ if name not in PACKAGES}
    expected |= {f"ampkit_kernels.{name}" for name in ampkit_kernels.__all__ if callable(vars(ampkit_kernels)[name])}
    for name in ("amp", "debugging", "optim"):
        expected |= {f"ampkit.{name}.{one}" for one in getattr(ampkit, name).__all__}
    listed = {name for name in found if not name.startswith("ampkit.integrations.")}   # these need other libraries
    assert not expected - listed
    for name in listed - expected:
        result = pydoc.locate(name)
        assert isinstance(result, type), name
        assert f"{result.__module__}.{result.__qualname__}" == name
    libraries = {name.split(".")[2] for name in found if name.startswith("ampkit.integrations.")}
    assert libraries == set(ampkit.integrations.__all__)


@pytest.mark.parametrize(
    ("page", "text", "expected"),
    [
        ("index.md", "[a](docs/scaler.md#when) [b](examples) [c](.github/CONTRIBUTING.md)",
         "[a](scaler.md#when) [b](examples.md) [c](contributing.md)"),
        ("levels.md", "[a](../examples/half_rnn.py) [b](scaler.md)", "[a](examples/half_rnn.md) [b](scaler.md)"),
        ("changelog.md", "[a](docs/policy.md) [b](https://x.org/docs/a.md)", "[a](policy.md) [b](https://x.org/docs/a.md)"),
        ("index.md", "```\n[a](docs/scaler.md)\n```", "```\n[a](docs/scaler.md)\n```"),
        ("levels.md", "[a](../ampkit/amp.py)", "[a](../ampkit/amp.py)"),       # no page: mkdocs says so
    ],
)
def test_links_of_the_repository_lead_to_pages(page: str, text: str, expected: str) -> None:
    assert PAGES["relinked"](text, page) == expected


def test_an_example_is_a_page_of_its_own() -> None:
    text = PAGES["example_page"](ROOT / "examples" / "scaler_basic.py")
    assert text.startswith("# scaler_basic\n\nLoss scaling in its shortest form: one model, one optimizer.\n\n")
    assert "```python\nimport torch\n" in text
    assert "| [scaler_basic](examples/scaler_basic.md) | Loss scaling in its shortest form" in PAGES["example_list"]()


def test_code_in_docstrings_is_fenced() -> None:
    """Examples, with what they print, and indented blocks."""
    pytest.importorskip("griffe", reason="it is in ampkit[docs]")
    as_markdown = runpy.run_path(str(ROOT / "docs" / "site" / "examples.py"))["as_markdown"]
    assert as_markdown("One.\n\n>>> 1 + 1\n2\n>>> 3\n\nTwo.") == "One.\n\n```pycon\n>>> 1 + 1\n2\n>>> 3\n```\n\nTwo."
    assert as_markdown("Use it::\n\n    with a:\n        b\n\nEnd.") == (
        "Use it:\n\n```python\nwith a:\n    b\n```\n\nEnd."
    )


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


@pytest.mark.slow
def test_the_search_knows_names_operators_and_examples(site: Path) -> None:
    index = (site / "search" / "search_index.json").read_text(encoding="utf-8")
    for words in ("ampkit.GradScaler.clip_grad_norm_", "scaled_dot_product_attention", "examples/scaler_basic/"):
        assert words in index
    assert "data-filter" in (site / "policy" / "index.html").read_text(encoding="utf-8")
