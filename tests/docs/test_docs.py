"""The documentation is true: its Python runs and prints the output shown, and its links lead somewhere."""

import contextlib
import doctest
import functools
import importlib
import io
import math
import pkgutil
import re
import runpy
from pathlib import Path

import pytest
import torch

import ampkit
import ampkit_kernels
from tests.helpers.paths import ROOT

README = ROOT / "README.md"
DOCUMENTS = [
    README,
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "decisions").glob("*.md")),
    ROOT / ".github" / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "benchmarks" / "results").glob("*/report.md")),
]

RUN_ELSEWHERE = (README,)  # in a test of its own, below

# What users come for, and where the front page's table sends them.
TASKS = {
    "keep NaN out of the weights": "scaler.md#without-a-scale",
    "switch a script": "migrating.md#from-torchamp",
    "keep a layer in float32": "policy.md#rules-for-modules-of-a-model",
    "GAN": "../examples/scaler_gan.py",
    "Lightning, Trainer, Accelerate": "migrating.md#with-other-libraries",
    "FSDP2": "../examples/scaler_fsdp.py",
    "find a NaN": "debugging.md",
    "FP8": "float8.md",
    "bfloat16 weights": "optim.md#bfloat16-weights",
    "spikes": "scaler.md#skip-outliers",
    "resume from torch.amp": "../examples/scaler_resume_from_torch.py",
    "Apex O2": "apex.md",
    "log the scale": "scaler.md#log-the-scale",
    "custom operator": "custom-operators.md",
    "sizes not multiples of 8": "performance.md#shapes-for-tensor-cores",
    "half": "half.md",
    "compile": "compile.md",
    "cached inference": "performance.md#reuse-of-weight-casts",
    "DataParallel": "../examples/data_parallel.py",
    "float32 logits": "recipes.md#float32-logits-from-a-16-bit-head",
    "experts": "recipes.md#routers-and-experts",
    "trainer and rollout": "recipes.md#the-gap-between-trainer-and-rollout",
    "memory of norms": "policy.md#norms-between-16-bit-layers",
    "memory of logits": "recipes.md#logits-that-do-not-fit-in-memory",
    "float16 with FSDP2": "recipes.md#float16-with-fsdp2",
    "no autocast": "migrating.md#do-you-need-autocast",
    "compiled and eager differ": "compile.md#numerics-of-inductor",
    "FP16 gradients": "scaler.md#errors",
    "slow FP8": "float8.md#when-to-use-it",
}

# A block that cannot run here says why: `<!-- not run: needs two GPUs -->` on the line before its fence.
BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<why>[^\n]*?) -->\n)?^```python\n(?P<code>.*?)^```$(?:\n\n```text\n(?P<prints>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
SHOWN = re.compile(r"<!-- output of (?P<script>[^\n]+) -->\n```text\n(?P<text>.*?)```", re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
GOES_ON = "# continues the first example\n"
LIBRARIES = ("accelerate", "transformers", "lightning", "timm")  # which an environment may lack


@pytest.mark.parametrize(
    "path", [path for path in DOCUMENTS if path not in RUN_ELSEWHERE], ids=lambda path: str(path.relative_to(ROOT))
)
def test_documented_code_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every Python block of a document, top to bottom, in one namespace, as a reader would type them.

    Compiled without generating code, which takes a quarter of a minute; `region/test_compile.py` runs inductor.
    """
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    monkeypatch.chdir(tmp_path)
    text, namespace = path.read_text(encoding="utf-8"), {"__name__": str(path)}
    for found in BLOCK.finditer(text):
        if found["why"] is None:  # blank lines in front, so that a traceback points into the document
            line = text.count("\n", 0, found.start("code"))
            exec(compile("\n" * line + found["code"], str(path), "exec"), namespace)


def test_each_block_of_the_readme_runs_when_it_is_copied() -> None:
    """And prints what stands below it. The first is the training loop, short enough to be read at once."""
    blocks = list(BLOCK.finditer(README.read_text(encoding="utf-8")))
    first = blocks[0]["code"]
    for found in blocks:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(f"{first if found['code'].startswith(GOES_ON) else ''}\n{found['code']}", {})
        assert printed.getvalue() == (found["prints"] or ""), found["code"]
    loop = first.partition("\nfor ")[2].strip().splitlines()
    assert len(loop) <= 10
    assert {"autocast", "scale", "backward", "step", "update"} <= set(re.findall(r"\w+", "\n".join(loop)))


def test_the_readme_shows_what_an_example_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers may differ in their last digit between builds of torch; words may not."""
    monkeypatch.chdir(ROOT)
    number = re.compile(r"\d+\.\d+(e[+-]\d+)?")
    shown = list(SHOWN.finditer(README.read_text(encoding="utf-8")))
    assert shown
    for found in shown:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(found["script"], run_name="__main__")
        assert number.sub("#", printed.getvalue()) == number.sub("#", found["text"])


@pytest.mark.slow
def test_pictures_are_drawn_from_examples_and_results(tmp_path: Path) -> None:
    """Examples compute what the pages say of their pictures; each picture is on a page."""
    pytest.importorskip("matplotlib", reason="it is in ampkit[demo]")
    tool = runpy.run_path(str(ROOT / "docs" / "make_pictures.py"))
    found = tool["numbers"]()
    theirs, ours = found["why_same"]
    assert ours == theirs
    assert ours[0][-1] < 0.5 * ours[0][0]
    (losses, scales), (guarded_losses, guarded_scales) = found["why_skip"]
    assert losses[:60] == guarded_losses[:60]
    assert math.isnan(losses[-1])
    assert scales[-1] == 2.0**-126
    assert max(guarded_losses[-20:]) < 1.0
    assert min(guarded_scales[60:]) >= 256.0
    ends = {name: sum(curve[-20:]) / 20 for name, curve in found["why_bfloat16"].items()}
    single = ends.pop("float32 weights")
    assert ends.pop("bfloat16, nearest") > single + 0.2
    assert [end for end in ends.values() if abs(end - single) > 0.02] == []
    megabytes, n_bytes = found["why_bytes"]
    assert megabytes["FP8"] < 0.7 * megabytes["bfloat16"]
    assert list(n_bytes.values()) == [12, 12, 8, 6]
    assert {name: len(points) for name, points in found["cost_by_width"].items()} == {
        "training step": 5,
        "inference, no_grad": 2,
    }
    tool["draw"](found, tmp_path)
    pages = "".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert drawn == sorted(path.name for path in (ROOT / "docs" / "assets").glob("*.svg"))
    for name in drawn:
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert f"assets/{name})" in pages
        assert "<text" in text, "as text, in the reader's font"
        assert "#000000" not in text, "legible on a dark page too"


def test_the_front_page_leads_to_each_task() -> None:
    page = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    table = page.partition("\n## I want to\n")[2]
    assert [task for task, target in TASKS.items() if f"]({target})" not in table] == []


def test_the_tutorial_shows_its_programs_as_differences() -> None:
    tool = runpy.run_path(str(ROOT / "docs" / "make_tutorial.py"))
    page = tool["TARGET"].read_text(encoding="utf-8")
    assert page == tool["render"](page), "run: python docs/make_tutorial.py"
    changed = [line for line in page.splitlines() if re.match(r"[+-](?![+-])", line)]
    assert len(changed) > 40
    assert page.count("```diff\n") == len(tool["STEPS"]) - 1 == 5


def test_the_page_quotes_the_programs_of_the_examples() -> None:
    """Both of them, whole."""
    tool = runpy.run_path(str(ROOT / "docs" / "make_how_it_works.py"))
    page = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    assert page == tool["render"](page), "run: python docs/make_how_it_works.py"
    for name in ("autocast_in_one_page", "scaler_in_one_page"):
        assert (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8") in page


def test_docstring_examples() -> None:
    """Examples in docstrings print what they say; doctest prints each that does not. All modules are run."""
    names = ["ampkit", "ampkit_kernels"]
    for package in (ampkit, ampkit_kernels):
        names += [found.name for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    failed = {}
    for name in names:
        if name.endswith("__main__"):  # runs the command when it is imported
            continue
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            if (error.name or "").startswith(LIBRARIES):
                continue
            raise
        torch.manual_seed(0)
        failed[name] = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS).failed
    assert not sum(failed.values()), {name: count for name, count in failed.items() if count}


def anchors_of(document: str) -> set[str]:
    """The anchors that GitHub makes from the headings of a document."""
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
