"""What users install: one wheel with both packages, which works away from the checkout."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.helpers.environments import Environment, requirements_of
from tests.helpers.paths import ROOT


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make wheel` leaves in `dist/`."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "-m hatchling build --directory dist\n" in (ROOT / "Makefile").read_text(encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    """The wheel as users install it."""
    return next(built.glob("*.whl"))


@pytest.fixture(scope="module")
def unpacked(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive, unpacked."""
    folder = tmp_path_factory.mktemp("source")
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.iterdir())


def test_the_wheel_holds_both_packages_and_nothing_else(wheel: Path) -> None:
    """Every source file, the type markers, the licence and the command; no tests, no stray files."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        entry_points = archive.read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
    info = next(name.partition("/")[0] for name in names if ".dist-info/" in name)
    assert {name.partition("/")[0] for name in names} == {"ampkit", "ampkit_kernels", info}
    assert {"ampkit/py.typed", "ampkit_kernels/py.typed", f"{info}/licenses/LICENSE"} <= set(names)
    assert "ampkit = ampkit.__main__:main" in entry_points
    folders = (ROOT / "ampkit", ROOT / "kernels" / "ampkit_kernels")
    files = [path.relative_to(folder.parent) for folder in folders for path in folder.rglob("*.py")]
    sources = {path.with_suffix("").as_posix().removesuffix("/__init__") for path in files}
    shipped = {name.removesuffix(".py").removesuffix("/__init__") for name in names if name.endswith(".py")}
    assert shipped == sources


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """Installed by pip where there is nothing but what it asks for, the README's first example runs in another folder.

    torch, triton and numpy, with what these need, are linked in from here: to install them would take minutes.
    """
    environment = Environment(tmp_path / "environment")
    environment.link(requirements_of("torch") | requirements_of("triton") | requirements_of("numpy"))
    assert "Successfully installed ampkit" in environment.install(wheel)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    example = (ROOT / "README.md").read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    (elsewhere / "train.py").write_text(f"{example}\nimport ampkit\nprint(scaler.stats().steps, ampkit.__file__)\n")
    steps, file = environment.run("python", "-W", "error", "train.py", cwd=elsewhere).split()
    assert steps == "20"
    assert Path(file).is_relative_to(environment.packages)
    assert "FLOAT32" in environment.run("ampkit", "explain", "softmax", cwd=elsewhere)


# Of no use without a repository.
LEFT_OUT = {".gitignore"}


def test_the_source_archive_holds_what_the_repository_holds(unpacked: Path) -> None:
    """Tests and documentation included."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = {name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()}
    shipped = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    assert tracked - shipped - LEFT_OUT == set()


@pytest.mark.slow
def test_the_tests_run_from_the_source_archive(unpacked: Path) -> None:
    """One that looks at files, and those of the operator lists; the others need no more."""
    chosen = ["tests/house/test_workflows.py", "tests/policy/test_op_table.py"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *chosen],
        cwd=unpacked, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""},
    )
    assert ran.returncode == 0, ran.stdout
    assert " passed" in ran.stdout
    assert not (unpacked / ".git").exists()
