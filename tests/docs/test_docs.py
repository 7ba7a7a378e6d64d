"""What the documentation shows is true: its Python runs, its examples print what they say."""

import doctest
import importlib
import pkgutil
import re
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch

import ampkit

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCUMENTS = [
    README,
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / ".github" / "CONTRIBUTING.md",
    *sorted((ROOT / "benchmarks" / "results").glob("*/report.md")),
]

# A block that cannot run here says why: `<!-- not run: needs two GPUs -->` on the line before its fence.
BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<why>[^\n]*?) -->\n)?^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")


def blocks_of(document: str) -> list[tuple[int, str, str | None]]:
    """Line number, code, and the reason not to run it, of every Python block."""
    return [
        (document.count("\n", 0, found.start("code")), found["code"], found["why"])
        for found in BLOCK.finditer(document)
    ]


def run_document(text: str, name: str) -> int:
    """Run a document's blocks in order, in one namespace, as a reader would type them. Returns how many."""
    namespace: dict[str, object] = {"__name__": name}
    ran = 0
    for line, code, why_not in blocks_of(text):
        if why_not is None:
            # Blank lines in front, so that a traceback points into the document.
            exec(compile("\n" * line + code, name, "exec"), namespace)
            ran += 1
    return ran


# What a module of `ampkit.integrations` imports, which an environment may lack.
LIBRARIES = ("accelerate", "transformers", "lightning", "timm")


def doctested_modules() -> list[str]:
    """Every module of both packages. `__main__` runs the command when imported by name, so not that one."""
    import ampkit_kernels

    names = []
    for package in (ampkit, ampkit_kernels):
        names.append(package.__name__)
        names += [found.name for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    return [name for name in names if not name.endswith("__main__")]


def run_doctests(module: ModuleType) -> doctest.TestResults:
    """Run the examples in a module's docstrings. Warnings are errors, as in the other tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)


@pytest.mark.parametrize(
    "path", [path for path in DOCUMENTS if path.exists()], ids=lambda path: str(path.relative_to(ROOT))
)
def test_documented_code_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every Python block of a document, top to bottom."""
    monkeypatch.chdir(tmp_path)
    run_document(path.read_text(encoding="utf-8"), str(path))


def test_the_document_runner_runs_and_can_fail() -> None:
    """Blocks share names; a broken one raises with its line; a block with a reason is left alone."""
    good = "x\n```python\na = 1\n```\n<!-- not run: no -->\n```python\nraise OSError\n```\n"
    good += "```python\na + 1\n```\n"
    assert run_document(good, "good.md") == 2
    assert [why for _, _, why in blocks_of(good)] == [None, "no", None]
    with pytest.raises(NameError) as raised:
        run_document("one\n\n```python\nmissing_name\n```\n", "bad.md")
    assert raised.traceback[-1].lineno == 3


def test_the_readme_shows_the_training_loop() -> None:
    """The first block is the loop, and it is short enough to be read at once."""
    _, code, why_not = blocks_of(README.read_text(encoding="utf-8"))[0]
    assert why_not is None
    loop = code[code.index("for ") :].strip().splitlines()
    assert len(loop) <= 10
    assert {"autocast", "scale", "backward", "step", "update"} <= set(re.findall(r"\w+", "\n".join(loop)))


def test_docstring_examples() -> None:
    """Examples in docstrings print what they say; doctest prints each that does not. All modules are run."""
    failed = {}
    for name in doctested_modules():
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            if (error.name or "").startswith(LIBRARIES):
                continue
            raise
        torch.manual_seed(0)
        failed[name] = run_doctests(module).failed
    assert not sum(failed.values()), {name: count for name, count in failed.items() if count}


def test_the_doctest_runner_can_fail(capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong answer and a warning both count as failures."""
    module = ModuleType("wrong")
    module.__doc__ = ">>> 1 + 1\n3\n>>> import warnings; warnings.warn('x')\n"
    assert run_doctests(module) == (2, 2)
    assert "Expected:\n    3" in capsys.readouterr().out


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="the README counts torch 2.13's lists")
def test_the_readme_counts_the_operators_of_the_default_policy() -> None:
    named = {op.overloadpacket.__name__ for device in ("cpu", "cuda") for op in ampkit.Policy.default(device).rules()}
    assert f"names {len(named)} operators" in README.read_text(encoding="utf-8")


def anchors_of(document: str) -> set[str]:
    """What `#...` may say after a link to a document, as GitHub makes it from the headings."""
    headings = re.findall(r"^#+ (.+)$", document, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_inside_the_repository_lead_somewhere() -> None:
    """A document that is linked exists, and has the heading that the link names."""
    broken = []
    for path in DOCUMENTS:
        for found in LINK.finditer(path.read_text(encoding="utf-8")):
            name, _, anchor = found["target"].partition("#")
            target = path.parent / name if name else path
            if "://" in name or (target.exists() and (not anchor or anchor in anchors_of(target.read_text("utf-8")))):
                continue
            broken.append(f"{path.name}: {found['target']}")
    assert not broken
