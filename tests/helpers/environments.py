"""An empty Python environment, with packages that are installed here put into it by name."""

import importlib.metadata
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from packaging.requirements import Requirement


def requirements_of(name: str) -> set[str]:
    """The names of the distributions that one needs, those that they need, and its own."""
    found: set[tuple[str, str]] = set()     # a name with each extra that is asked for, "" for none
    pending = [(name, "")]
    while pending:
        one, extra = pending.pop()
        if (one, extra) in found:
            continue
        found.add((one, extra))
        for requirement in map(Requirement, importlib.metadata.requires(one) or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                pending += [(requirement.name, wanted) for wanted in ("", *requirement.extras)]
    return {one for one, _ in found}


class Environment:
    """A virtual environment without pip; `folder` is where it lies."""

    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        self.folder = folder
        self.bin = folder / "bin"
        self.python = self.bin / "python"
        self.packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))

    def link(self, names: set[str]) -> None:
        """Have distributions that are installed here be installed there, by links to their files."""
        for name in names:
            distribution = importlib.metadata.distribution(name)
            tops = {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")}
            for top in tops:
                link = self.packages / top
                if not link.exists():
                    link.symlink_to(distribution.locate_file(top))

    def install(self, wheel: Path) -> str:
        """Install a wheel as pip does, from what is there and nowhere else; returns what pip printed."""
        command = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--no-index", str(wheel)]
        elsewhere = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
        elsewhere["PIP_CONFIG_FILE"] = os.devnull       # which may name folders of wheels
        ran = subprocess.run([*command, "--disable-pip-version-check"], capture_output=True, text=True, env=elsewhere)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    def run(self, *command: str, cwd: Path) -> str:
        """What a command of the environment prints, run where nothing but the environment can be imported from."""
        program = [str(self.bin / command[0]), *command[1:]]
        ran = subprocess.run(program, cwd=cwd, capture_output=True, text=True, env={})
        assert ran.returncode == 0, ran.stderr
        return ran.stdout
