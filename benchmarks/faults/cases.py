"""The cases: which program has which fault at which place, and what is wrong with it then."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache as cached
from pathlib import Path

from benchmarks.faults.inject import HELPERS, KINDS, Injection, places
from benchmarks.faults.observe import Record, observe, symptoms
from benchmarks.faults.programs import HERE, Program, cache, load
from benchmarks.faults.source import Source, edited

CASES = HERE / "cases.json"
SEED = 0
ROUNDS, TRIALS = 4, 36


@dataclass(frozen=True)
class Case:
    """A program with one fault, or without any.

    Args:
        id: Its name.
        program: The name of the program.
        half: The half that the program belongs to.
        dtype: "float16" or "bfloat16".
        kind: The kind of fault; "" for the healthy program.
        file: The file that the fault is in.
        place: The number of its place among all of the file for this kind.
        lines: The lines of the fault.
        symptoms: What was measured to be wrong; nothing for a healthy program.
        options: Further arguments of the script.
    """

    id: str
    program: str
    half: str
    dtype: str
    kind: str = ""
    file: str = ""
    place: int = 0
    lines: tuple[int, ...] = ()
    symptoms: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """The folder that the case is laid out in."""
        return cache() / "cases" / self.id

    def command(self) -> list[str]:
        """Return the arguments of the script."""
        return [*_program(self.program).command(self.dtype, SEED), *self.options]

    def lay_out(self, folder: Path | None = None) -> Path:
        """Write the program with its fault into its folder and return it."""
        folder = folder or self.folder
        _program(self.program).lay_out(folder)
        if self.kind:
            path = folder / self.file
            text = path.read_text(encoding="utf-8")
            injection = places(Source(text), KINDS[self.kind], self.dtype)[self.place]
            if injection.lines != self.lines:
                raise ValueError(f"{self.id}: the fault is at lines {injection.lines}; expected {self.lines}")
            path.write_text(edited(text, injection.edits), encoding="utf-8")
            for name, helper in HELPERS.items():
                (folder / name).write_text(helper, encoding="utf-8")
        return folder


@cached
def _program(name: str) -> Program:
    return load(names=[name])[0]


def read(path: Path = CASES) -> list[Case]:
    """Return the cases of a file."""
    entries = json.loads(path.read_text(encoding="utf-8"))
    return [Case(**{**entry, "lines": tuple(entry.get("lines", ()))}) for entry in entries]


def write(cases: Sequence[Case], path: Path = CASES) -> None:
    """Write cases, one a line."""
    lines = [
        json.dumps({key: value for key, value in asdict(case).items() if value not in ("", (), {})}) for case in cases
    ]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


@dataclass
class Healthy:
    """A program without a fault: at SEED in 16 bits and in float32, and with other seeds."""

    run: Record
    exact: Record
    seeds: list[Record]

    @classmethod
    def measure(cls, program: Program, dtype: str, folder: Path) -> Healthy:
        """Run a program that is laid out in a folder."""
        run = observe(folder, program.command(dtype, SEED), lines=True)
        exact = observe(folder, program.command("float32", SEED))
        seeds = [observe(folder, program.command(dtype, SEED + 1 + offset)) for offset in range(2)]
        for record in (run, exact, *seeds):
            if record.error:
                raise RuntimeError(f"{program.name} without a fault, in {dtype}: {record.error}")
        print(f"{program.name} {dtype}: {run.steps} steps, {exact.steps} in float32, {run.seconds:.1f} s", flush=True)
        return cls(run, exact, seeds)


def choose(program: Program, *, precision: int, other: int, healthy: int, seed: int = 0) -> Iterator[Case]:
    """Yield cases of a program: healthy, with faults at random places that have a symptom, and a few that have none.

    Args:
        program: The program.
        precision: How many faults of precision to look for.
        other: How many other faults.
        healthy: How many without to keep.
        seed: Of the choice of places.
    """
    chance = random.Random(f"{program.name} {seed}")
    folder = cache() / "healthy" / program.name
    program.lay_out(folder)
    measured = {dtype: Healthy.measure(program, dtype, folder) for dtype in program.dtypes}
    for dtype in program.dtypes:
        yield Case(f"{program.name}-{dtype}", program.name, program.half, dtype)
    wanted, without, kinds = {True: precision, False: other}, 0, dict[str, int]()
    for number, (file, dtype, injection, place) in enumerate(_candidates(program, folder, measured, chance)):
        family = KINDS[injection.kind].family == "precision"
        if not any(wanted.values()) or number >= TRIALS:
            return
        if not wanted[family] or kinds.get(injection.kind, 0) > 1:
            continue
        name = injection.kind.replace(" ", "-").replace(":", "")
        case = Case(
            f"{program.name}-{number}-{name}",
            program.name,
            program.half,
            dtype,
            injection.kind,
            file,
            place,
            injection.lines,
        )
        base = measured[dtype]
        run = observe(case.lay_out(cache() / "trial" / program.name), case.command())
        if run.error:
            print(f"  {case.id}: {run.error[:100]} {run.seconds:.1f} s", flush=True)
            continue
        wrong = symptoms(run, base.run, base.exact, base.seeds)
        print(f"  {case.id} {dtype} {run.seconds:.1f} s {wrong}", flush=True)
        if wrong:
            wanted[family] -= 1
            kinds[injection.kind] = kinds.get(injection.kind, 0) + 1
            yield Case(**{**asdict(case), "symptoms": wrong})
        elif without < healthy:
            without += 1
            yield case


def _candidates(
    program: Program, folder: Path, measured: dict[str, Healthy], chance: random.Random
) -> Iterator[tuple[str, str, Injection, int]]:
    """Yield places for faults, kind after kind in random order, over and over."""
    files = {name: Source((folder / name).read_text(encoding="utf-8")) for name in ("train.py", *program.inject)}
    kinds = sorted(KINDS)
    used: set[tuple[str, str, int, str]] = set()
    for _ in range(ROUNDS):
        chance.shuffle(kinds)
        for kind in kinds:
            dtypes = [dtype for dtype in program.dtypes if dtype in KINDS[kind].dtypes]
            if not dtypes:
                continue
            dtype = chance.choice(dtypes)
            ran = measured[dtype].run.executed
            options = [
                (name, dtype, injection, place)
                for name, source in files.items()
                if name == "train.py" or not KINDS[kind].driver
                for place, injection in enumerate(places(source, KINDS[kind], dtype))
                if set(injection.lines) & set(ran.get(name, ()))
            ]
            options = [option for option in options if (kind, option[0], option[3], dtype) not in used]
            if options:
                choice = chance.choice(options)
                used.add((kind, choice[0], choice[3], dtype))
                yield choice
