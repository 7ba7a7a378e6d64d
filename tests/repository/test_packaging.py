"""What users install: one wheel with both packages, which works away from the checkout."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.helpers.paths import ROOT


def run(*command: object, **options: object) -> str:
    """The output of a command, which must succeed."""
    ran = subprocess.run([*map(str, command)], capture_output=True, text=True, **options)  # type: ignore[call-overload]
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make wheel` leaves in `dist/`."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "--directory", folder, cwd=ROOT)
    assert "-m hatchling build --directory dist\n" in (ROOT / "Makefile").read_text(encoding="utf-8")
    return folder


def test_the_wheel_holds_both_packages_and_nothing_else(built: Path) -> None:
    """Every source file, the type markers, the license and the command; no tests, no stray files."""
    with zipfile.ZipFile(next(built.glob("*.whl"))) as archive:
        names = archive.namelist()
        entry_points = archive.read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
    info = next(name.partition("/")[0] for name in names if ".dist-info/" in name)
    assert {name.partition("/")[0] for name in names} == {"ampkit", "ampkit_kernels", info}
    assert {"ampkit/py.typed", "ampkit_kernels/py.typed", f"{info}/licenses/LICENSE"} <= set(names)
    assert "ampkit = ampkit.__main__:main" in entry_points
    folders = (ROOT / "ampkit", ROOT / "kernels" / "ampkit_kernels")
    sources = {path.relative_to(folder.parent).as_posix() for folder in folders for path in folder.rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources


def test_another_build_has_the_same_bytes(built: Path, tmp_path: Path) -> None:
    """Wheel and source archive, at another time and for another user."""
    environment = os.environ | {"TZ": "Asia/Tokyo", "HOME": str(tmp_path), "LC_ALL": "C"}
    command = [sys.executable, "-m", "hatchling", "build", "--directory", tmp_path / "again"]
    run(*command, cwd=ROOT, env=environment, umask=0o077)
    first = {path.name: path.read_bytes() for path in built.iterdir()}
    again = {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}
    assert len(first) == 2
    assert [name for name in first | again if first.get(name) != again.get(name)] == []


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_the_demo_installs_its_own_extra_alone(tmp_path: Path) -> None:
    """`make demo` asks for scikit-learn and matplotlib, everything else for the development tools, once each."""

    def setups(target: str, *stamps: str) -> list[str]:
        (tmp_path / "venv").mkdir(exist_ok=True)
        for stamp in stamps:
            (tmp_path / "venv" / stamp).touch()
        printed = run("make", "-n", target, f"VENV={tmp_path / 'venv'}", cwd=ROOT)
        return re.findall(r"\.ci/setup (\w+)$", printed, re.MULTILINE)

    assert setups("demo") == ["demo"]
    assert setups("test") == ["dev"]
    assert setups("demo", ".ampkit-demo-installed") == []
    assert setups("test") == ["dev"], "the demo's environment has no pytest"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["optional-dependencies"]["demo"] == ["scikit-learn", "matplotlib"]
    assert project["dependencies"] == ["torch>=2.11", "numpy"]


def test_a_release_is_of_the_tagged_version_and_has_both_files(tmp_path: Path) -> None:
    """`.ci/release`, with a `gh` that writes down what it is called with."""
    (tmp_path / "ampkit").mkdir()
    (tmp_path / "dist").mkdir()
    (tmp_path / "ampkit" / "__init__.py").write_text('__version__ = "1.2.3"\n')
    fake = tmp_path / "gh"
    fake.write_text('#!/bin/sh\necho "$@" > called\n')
    fake.chmod(0o755)

    def release(tag: str) -> tuple[int, str]:
        command = ["sh", str(ROOT / ".ci" / "release"), tag]
        path = f"{tmp_path}:{os.environ['PATH']}"
        ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={"PATH": path})
        return ran.returncode, ran.stderr

    assert release("v1.2.4") == (
        1,
        "release stopped: the tag is 'v1.2.4', and ampkit/__init__.py says version 1.2.3; expected the tag v1.2.3\n",
    )
    files = ("dist/ampkit-1.2.3-py3-none-any.whl", "dist/ampkit-1.2.3.tar.gz")
    assert release("v1.2.3") == (1, f"release stopped: there is no {files[0]}; run make wheel\n")
    assert not (tmp_path / "called").exists()
    for name in files:
        (tmp_path / name).touch()
    assert release("v1.2.3") == (0, "")
    called = (tmp_path / "called").read_text()
    assert called.startswith(f"release create v1.2.3 {files[0]} {files[1]} --verify-tag ")


def requirements_of(name: str) -> set[str]:
    """The names of a distribution and of all that it requires, directly or through others."""
    seen: set[tuple[str, str]] = set()  # a name with each requested extra, "" for none
    pending = [(name, "")]
    while pending:
        required, extra = pending.pop()
        if (required, extra) not in seen:
            seen.add((required, extra))
            for requirement in map(Requirement, importlib.metadata.requires(required) or []):
                if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                    pending += [(requirement.name, wanted) for wanted in ("", *requirement.extras)]
    return {required for required, _ in seen}


def link(name: str, packages: Path) -> None:
    """Install a distribution into another environment by links to its files here."""
    distribution = importlib.metadata.distribution(name)
    for top in {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")}:
        if not (packages / top).exists():
            (packages / top).symlink_to(distribution.locate_file(top))


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_environment(built: Path, tmp_path: Path) -> None:
    """Installed by pip where there is nothing but what it asks for, the README's first example runs in another folder.

    torch and numpy, with what these need, are linked in from here: to install them would take minutes. With them there
    pip downloads nothing, so that a torch without CUDA stays, and no Triton overwrites the one that torch brings.
    """
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", env=bare).strip())
    for name in requirements_of("torch") | requirements_of("numpy"):
        link(name, packages)
    install = ("-m", "pip", "--python", python, "install", "--no-index", "--disable-pip-version-check")
    said = run(sys.executable, *install, next(built.glob("*.whl")), env=bare | {"PIP_CONFIG_FILE": os.devnull})
    assert "Successfully installed ampkit" in said
    example = (ROOT / "README.md").read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    (tmp_path / "train.py").write_text(f"{example}\nimport ampkit\nprint(scaler.stats().steps, ampkit.__file__)\n")
    steps, file = run(python, "-W", "error", "train.py", cwd=tmp_path, env={}).split()
    assert steps == "20"
    assert Path(file).is_relative_to(packages)
    assert run(python.parent / "ampkit", "--version", cwd=tmp_path, env={}).startswith("ampkit ")


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="an unpacked archive")
def test_the_source_archive_holds_what_the_repository_holds(built: Path) -> None:
    """Tests and documentation included."""
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        shipped = {name.partition("/")[2] for name in archive.getnames()}
    tracked = {name for name in run("git", "ls-files", "-z", cwd=ROOT).split("\0") if name and (ROOT / name).is_file()}
    assert tracked - shipped <= {".gitignore"}
