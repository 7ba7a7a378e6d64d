"""Programs and their faults: fetches the sources of a program, and writes the program with its fault into a folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CASES, PROGRAMS = HERE / "cases.json", HERE / "programs.toml"
HELPER = "custom_loss.py"  # in programs/, a module that some faults import


def cache_folder() -> Path:
    """Return the folder for sources and runs: AMPKIT_FAULTS, or one in the user's cache."""
    return Path(os.environ.get("AMPKIT_FAULTS") or Path.home() / ".cache" / "ampkit-faults")


def packages_folder() -> Path:
    """Return the folder of the packages that programs need besides torch and numpy."""
    return cache_folder() / "site-packages"


@dataclass(frozen=True)
class Program:
    """A training program. `programs.toml` describes the fields."""

    name: str
    half: str
    repository: str
    commit: str
    license: str
    copy: Sequence[str]
    script: str = ""
    arguments: str = "--dtype={dtype} --seed=0"
    blank: Sequence[str] = ()
    adapt: Sequence[Sequence[str]] = ()
    packages: Sequence[str] = ()

    @property
    def sources(self) -> Path:
        """The folder of the repository's sources."""
        return cache_folder() / "sources" / self.repository.replace("/", "+")

    def lay_out(self, folder: Path) -> None:
        """Write the program into a new folder, with `train.py` as its script."""
        if not self.sources.is_dir():
            raise FileNotFoundError(f"{self.sources} is missing; run `python -m benchmarks.faults fetch` first")
        folder.mkdir(parents=True)
        for line in self.copy:
            start, _, end = line.partition(" -> ")
            source, target = self.sources / start, folder / (end or start)
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.gz", "*.png"))
            else:
                shutil.copy(source, target)
        for name in self.blank:
            (folder / name).write_text("", encoding="utf-8")
        if not self.script:
            shutil.copy(HERE / "programs" / f"{self.name}.py", folder / "train.py")
        for name, old, new in self.adapt:
            text = (folder / name).read_text(encoding="utf-8")
            if old not in text:
                raise ValueError(f"{name} of {self.repository} does not contain {old!r}, which `adapt` replaces")
            (folder / name).write_text(text.replace(old, new), encoding="utf-8")


@dataclass(frozen=True)
class Case:
    """A program with one fault, or without a fault.

    Args:
        id: Its name.
        program: The program.
        dtype: "float16" or "bfloat16".
        kind: The kind of the fault, a key of `kinds.toml`; "" for the healthy program.
        file: The file with the fault.
        lines: The lines at which a report may place the fault.
        edits: The fault: for each changed line its number, a fragment that it contains once, and the replacement.
        symptoms: How training suffers from the fault; empty for a fault without effect.
        options: Further arguments of the script.
    """

    id: str
    program: Program
    dtype: str
    kind: str = ""
    file: str = ""
    lines: Sequence[int] = ()
    edits: Sequence[tuple[int, str, str]] = ()
    symptoms: Mapping[str, str] = field(default_factory=dict)
    options: Sequence[str] = ()

    def command(self) -> list[str]:
        """Return the script and its arguments."""
        return ["train.py", *self.program.arguments.format(dtype=self.dtype).split(), *self.options]

    def edited(self, text: str) -> str:
        """Return the text of the file with the fault."""
        lines = text.split("\n")
        for number, old, new in self.edits:
            count = lines[number - 1].count(old)
            if count != 1:
                raise ValueError(f"{self.file}:{number} contains {old!r} {count} times; {self.id} expects it once")
            lines[number - 1] = lines[number - 1].replace(old, new)
        return "\n".join(lines)

    def lay_out(self, folder: Path) -> None:
        """Write the program with its fault into a new folder."""
        self.program.lay_out(folder)
        if self.kind:
            text = (folder / self.file).read_text(encoding="utf-8")
            (folder / self.file).write_text(self.edited(text), encoding="utf-8")
            shutil.copy(HERE / "programs" / HELPER, folder)


@cache
def programs() -> dict[str, Program]:
    """Return all programs by name."""
    table: dict[str, dict[str, Any]] = tomllib.loads(PROGRAMS.read_text(encoding="utf-8"))
    return {name: Program(name, **fields) for name, fields in table.items()}


def cases() -> list[Case]:
    """Return all cases."""
    rows: list[dict[str, Any]] = json.loads(CASES.read_text(encoding="utf-8"))
    return [Case(**{**row, "program": programs()[row["program"]]}) for row in rows]


def fetch(chosen: Iterable[Program], mirror: Path | None = None) -> None:
    """Get the sources of programs by git, and the packages that they need by pip, into the cache.

    Args:
        chosen: The programs.
        mirror: A folder of git directories named owner+name that replaces GitHub.
    """
    chosen = list(chosen)
    for program in chosen:
        if not program.sources.is_dir():
            print(f"{program.repository} at {program.commit[:9]}", flush=True)
            _check_out(program, mirror)
    packages = {package for program in chosen for package in program.packages}
    missing = sorted(package for package in packages if not (packages_folder() / package).is_dir())
    if missing:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages_folder())]
        subprocess.run([*pip, *missing], check=True)


def _check_out(program: Program, mirror: Path | None) -> None:
    partial = program.sources.with_name(program.sources.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    git = ["git", "-C", str(partial), "-c", "advice.detachedHead=false"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    if mirror is None:
        url = f"https://github.com/{program.repository}"
        subprocess.run([*git, "fetch", "--quiet", "--depth=1", url, program.commit], check=True)
    else:
        (objects,) = (mirror / program.repository.replace("/", "+")).glob("**/objects")
        (partial / ".git/objects/info/alternates").write_text(f"{objects.resolve()}\n", encoding="utf-8")
    names = [line.partition(" -> ")[0] for line in program.copy]
    subprocess.run([*git, "checkout", "--quiet", program.commit, "--", *names], check=True)
    partial.rename(program.sources)
