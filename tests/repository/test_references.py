"""What prose mentions exists: the modules, files and tests that pages, docstrings and comments name."""

import builtins
import functools
import keyword
import pkgutil
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.helpers.paths import ROOT

# Paths in prose begin at the repository, at one of the two packages, or at `tests`.
TOP = ("ampkit", "kernels", "tests", "docs", "examples", "benchmarks")
BASES = (ROOT, ROOT / "ampkit", ROOT / "kernels", ROOT / "kernels" / "ampkit_kernels", ROOT / "tests")
FOLDERS = {*TOP, *(path.parent.name for base in BASES[1:] for path in base.glob("*/*.py"))}
PATH = re.compile(rf"(?<![\w./'<>{{-])(?:{'|'.join(sorted(FOLDERS))})(?:/[\w.*-]*[\w*])+")
DOTTED = re.compile(r"\b(?:ampkit|ampkit_kernels)(?:\.[A-Za-z]\w*)+")
TEST = re.compile(r"(?:[\w*/]+/)?test_\w[\w*]*(?:\.py)?(?:::\w+)*")
WRITTEN = re.compile(r'"""[\s\S]*?"""|#.*')
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
# A name in backquotes, as a word or a call.
BARE = re.compile(r"(?<!`)`([A-Za-z_]\w*)(?:\([^`]*\))?`(?!`)")
TORCH_NAMESPACES = (
    torch,
    torch.Tensor,
    torch.nn,
    torch.nn.functional,
    torch.library,
    torch.ops.aten,
    torch.profiler.profile,
)
# Names of other libraries that no Python file here uses, and commands.
ELSEWHERE = {
    "Apex": "FP16_Optimizer FusedAdagrad FusedAdam FusedLAMB FusedLayerNorm FusedNovoGrad FusedSGD SyncBatchNorm "
    "cur_scale has_overflow master_params_to_model_params model_grads_to_master_grads multi_tensor_l2norm "
    "network_to_half prep_param_lists update_scale",
    "transformers": "hyperparameter_search",
    "Lightning": "log_metrics",
    "torch, in modules that are not imported": "parallel_apply wrap_with_autocast",
    "Python and coreutils": "cached_property sha256sum",
}
# The kind of a report in its JSON, which is a name and no module.
REPORT_KINDS = {"ampkit.debugging.report"}
TESTS = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").rglob("*.py"))}
GUARANTEES = ROOT / "tests" / "GUARANTEES.md"


def prose() -> Iterator[tuple[Path, str]]:
    """Every page without its code blocks, and the docstrings and comments of every Python file."""
    pages = [ROOT / "README.md", ROOT / "SECURITY.md", GUARANTEES, *(ROOT / ".github").rglob("*.md")]
    for path in [*pages, *(ROOT / "docs").rglob("*.md")]:
        yield path, FENCED.sub("", path.read_text(encoding="utf-8"))
    for path in sorted(path for name in TOP for path in (ROOT / name).rglob("*.py")):
        yield path, "\n".join(WRITTEN.findall(path.read_text(encoding="utf-8")))


@functools.cache
def is_file(path: str) -> bool:
    """Whether a path names a file or folder, with or without the suffix; `*` matches anything."""
    return any(next(base.glob(f"{path}{suffix}"), None) for base in BASES for suffix in ("", ".py", ".md"))


@functools.cache
def is_name(dotted: str) -> bool:
    """Whether a dotted name can be imported. Integrations are read instead: an environment may lack their libraries."""
    if dotted.startswith("ampkit.integrations."):
        _, _, module, *names = dotted.split(".")
        path = ROOT / "ampkit" / "integrations" / f"{module}.py"
        return path.exists() and all(defines(name, path.read_text(encoding="utf-8")) for name in names[:1])
    try:
        pkgutil.resolve_name(dotted)
    except (AttributeError, ImportError):
        return dotted in REPORT_KINDS
    return True


@functools.cache
def is_test(reference: str) -> bool:
    """Whether a test exists: a function in any file, or a file by its name or path, and after `::` a function in it."""
    path, _, name = reference.partition("::")
    stem = path.removesuffix(".py")
    texts = [text for file, text in TESTS.items() if file.match(f"{stem}.py")]
    if not name and not texts:
        return defines(stem, *TESTS.values())
    return bool(texts) and all(defines(part, *texts) for part in filter(None, name.split("::")))


def defines(name: str, *texts: str) -> bool:
    """Whether one of these files has a function or class of this name, or assigns one, as of a state machine."""
    return any(re.search(rf"^(?: *(?:class|def) {name}\b|{name} = )", text, re.MULTILINE) for text in texts)


@functools.cache
def names_in_code() -> frozenset[str]:
    """Return the names in the code and in the strings of every Python file, without docstrings and comments."""
    names = {*keyword.kwlist, *dir(builtins)}
    for path in {path for top in TOP for path in (ROOT / top).rglob("*.py")} - {Path(__file__).resolve()}:
        with path.open("rb") as file:
            for token in tokenize.tokenize(file.readline):
                if token.type == tokenize.NAME:
                    names.add(token.string)
                elif tokenize.tok_name[token.type] in ("STRING", "FSTRING_MIDDLE") and '"""' not in token.string[:5]:
                    names.update(re.findall(r"[A-Za-z_]\w*", token.string))
    return frozenset(names)


@functools.cache
def is_bare_name(name: str) -> bool:
    """Return whether a name without a path exists: in the code here, in torch, elsewhere."""
    if name in names_in_code() or name in " ".join(ELSEWHERE.values()).split() or is_test(name):
        return True
    return any(hasattr(namespace, name) for namespace in TORCH_NAMESPACES)


def test_what_prose_mentions_exists() -> None:
    """Modules and files by their paths, names of ampkit by their dotted paths, other names, tests by file and name."""
    stale = []
    for file, text in prose():
        missing = [found for found in PATH.findall(text) if not is_file(found)]
        missing += [found for found in DOTTED.findall(text) if not is_name(found)]
        missing += [found for found in TEST.findall(text) if not is_test(found)]
        missing += [found for found in BARE.findall(text) if not is_bare_name(found)]
        stale += [f"{file.relative_to(ROOT)}: {found}" for found in missing]
    assert not stale, "\n" + "\n".join(sorted(set(stale)))


def test_no_name_is_listed_as_elsewhere_without_need() -> None:
    listed = " ".join(ELSEWHERE.values()).split()
    assert [name for name in listed if name in names_in_code()] == []


def test_each_guarantee_names_its_tests() -> None:
    """By file from `tests/`, then others of that folder, and tests of the last file; no guarantee is there twice."""
    rows = re.findall(r"^\| (?!guarantee \||---)(.+) \| (.+) \|$", GUARANTEES.read_text(encoding="utf-8"), re.MULTILINE)
    guarantees = [guarantee for guarantee, _ in rows]
    wrong = [f"twice: {guarantee}" for guarantee in sorted(set(guarantees)) if guarantees.count(guarantee) > 1]
    for guarantee, tests in rows:
        files: list[Path] = []
        for reference in re.findall(r"`([^`]+)`", tests):
            file, _, name = reference.partition("::") if ".py" in reference else ("", "", reference)
            if file:
                files = sorted((files[0].parent if files and "/" not in file else ROOT / "tests").glob(file))
            texts = [path.read_text(encoding="utf-8") for path in files]
            if not reference.startswith("make ") and not (texts and (not name or defines(name, *texts))):
                wrong.append(f"{guarantee}: there is no {reference}")
        if not files:
            wrong.append(f"{guarantee}: no file of tests is named")
        if re.search(r"\((?!`|the )", tests):
            wrong.append(f"{guarantee}: {tests} names a part of a file; expected tests")
    assert not wrong, "\n" + "\n".join(wrong)
