"""The training programs that faults are put into: where they come from, and how they are laid out to run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ARGUMENTS = "--dtype={dtype} --seed={seed}"


def cache() -> Path:
    """Return the folder for sources, cases and what was measured: AMPKIT_FAULTS, or one in the user's cache."""
    return Path(os.environ.get("AMPKIT_FAULTS") or Path.home() / ".cache" / "ampkit-faults")


@dataclass(frozen=True)
class Program:
    """A training program. `programs.toml` says what each field means."""

    name: str
    half: str
    repository: str
    commit: str
    license: str
    copy: tuple[str, ...]
    inject: tuple[str, ...]
    script: str = ""
    arguments: str = ARGUMENTS
    blank: tuple[str, ...] = ()
    adapt: tuple[tuple[str, str, str], ...] = ()
    packages: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("float16", "bfloat16")

    @property
    def sources(self) -> Path:
        """The folder of the repository's sources."""
        return cache() / "sources" / self.repository.replace("/", "+")

    def command(self, dtype: str, seed: int) -> list[str]:
        """Return the arguments of the script."""
        return self.arguments.format(dtype=dtype, seed=seed).split()

    def lay_out(self, folder: Path) -> None:
        """Write the program into a folder, with `train.py` as its script."""
        if not self.sources.is_dir():
            raise FileNotFoundError(f"{self.sources} is missing; run `python -m benchmarks.faults fetch` first")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for line in self.copy:
            start, _, end = line.partition(" -> ")
            target = folder / (end or start)
            target.parent.mkdir(parents=True, exist_ok=True)
            if (self.sources / start).is_dir():
                shutil.copytree(self.sources / start, target, ignore=shutil.ignore_patterns("*.gz", "*.png", ".git"))
            else:
                shutil.copy(self.sources / start, target)
        for name in self.blank:
            (folder / name).write_text("", encoding="utf-8")
        if not self.script:
            shutil.copy(HERE / "programs" / f"{self.name}.py", folder / "train.py")
        for name, old, new in self.adapt:
            text = (folder / name).read_text(encoding="utf-8")
            if old not in text:
                raise ValueError(f"{self.repository}: {name} has no {old!r}, which `adapt` expects")
            (folder / name).write_text(text.replace(old, new), encoding="utf-8")


def load(half: str = "", names: Sequence[str] = ()) -> list[Program]:
    """Return the programs of a half, or with given names; all of them by default."""
    with (HERE / "programs.toml").open("rb") as file:
        table = tomllib.load(file)
    unknown = set(names) - set(table)
    if unknown:
        raise ValueError(f"no program {', '.join(sorted(unknown))}; expected some of {', '.join(table)}")
    fields: list[dict[str, Any]] = [{key: _frozen(value) for key, value in entry.items()} for entry in table.values()]
    programs = [Program(name=name, **entry) for name, entry in zip(table, fields, strict=True)]
    return [program for program in programs if half in {"", program.half} and (not names or program.name in names)]


def _frozen(value: object) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def fetch(programs: Sequence[Program], mirror: Path | None) -> None:
    """Get the sources of programs by git, and the packages that they need by pip, into the cache.

    Args:
        programs: The programs.
        mirror: A folder of git directories named owner+name, to take them from without network.
    """
    for program in programs:
        if not program.sources.is_dir():
            print(f"{program.repository} at {program.commit[:9]}", flush=True)
            _checkout(program, mirror)
    packages = sorted({package for program in programs for package in program.packages})
    missing = [package for package in packages if not (cache() / "site-packages" / package).is_dir()]
    if missing:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--target",
            str(cache() / "site-packages"),
        ]
        subprocess.run([*pip, *missing], check=True)


def _checkout(program: Program, mirror: Path | None) -> None:
    partial = program.sources.with_name(program.sources.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    url = f"https://github.com/{program.repository}"
    if mirror is not None:
        url = next(
            str(path.parent)
            for path in (mirror / program.repository.replace("/", "+")).rglob("HEAD")
            if (path.parent / "objects").is_dir()
        )
    git = ["git", "-C", str(partial), "-c", "advice.detachedHead=false"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    if mirror is None:
        subprocess.run([*git, "fetch", "--quiet", "--depth=1", url, program.commit], check=True)
    else:
        (partial / ".git/objects/info/alternates").write_text(f"{Path(url).resolve()}/objects\n", encoding="utf-8")
    names = [line.partition(" -> ")[0] for line in program.copy]
    subprocess.run([*git, "checkout", "--quiet", program.commit, "--", *names], check=True)
    partial.rename(program.sources)
