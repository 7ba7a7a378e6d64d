"""What users install: one wheel with both packages, which works away from the checkout."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.processes import fresh_python


def test_importing_ampkit_warns_of_nothing() -> None:
    """Also where the user turns warnings into errors."""
    fresh_python("import torch, warnings\nwarnings.simplefilter('error')\nimport ampkit, ampkit_kernels")


def test_the_checkout_shadows_no_other_package() -> None:
    """The folder `kernels` is a source root, so `import kernels` finds no module of ours."""
    code = "import importlib.util as u\nspec = u.find_spec('kernels')\nprint(spec.origin if spec else None)"
    assert str(ROOT) not in fresh_python(code)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as users install it."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return next(folder.glob("*.whl"))


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


def test_the_wheel_works_away_from_the_sources(wheel: Path, tmp_path: Path) -> None:
    """Unpacked elsewhere, both packages import from there and the command answers."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = "import ampkit, ampkit_kernels\nprint(ampkit.__file__, ampkit_kernels.__file__)"
    printed = fresh_python(code, cwd=tmp_path, path=str(tmp_path)).split()
    assert all(Path(name).is_relative_to(tmp_path) for name in printed)
