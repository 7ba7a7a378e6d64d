"""Score a tool on the cases: does its report name place, cause and cure, and is it silent on healthy programs?

No case needs a judgment: a transform made each fault, so its place and its reverse are known. A tool is another
process, `python -m ampkit debug` of any checkout, and is judged by the JSON that it writes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.faults.cases import Case
from benchmarks.faults.inject import HELPERS, KINDS
from benchmarks.faults.programs import HERE, cache

SECONDS = 100


@dataclass
class Claim:
    """One finding of a report: where, what, why, what to change."""

    grade: str  # "wrong" and "lost" are alarms, "note" is none
    places: list[tuple[str, int]]  # the place, then who computed what it cannot take or called it
    operators: list[str]
    text: str
    cure: str
    verified: bool = False


@dataclass
class Score:
    """What a tool said of a case, and what of it is right.

    Args:
        id: Of the case.
        kind: Of the fault; "" for a healthy program.
        family: Of the kind; "healthy", or "harmless" for a fault without a symptom.
        claims: How many findings there are, notes included.
        place: Whether the first finding names a line of the fault.
        fault: Whether that finding is graded as a fault, and not only as worth knowing.
        cause: Whether it names the operator, or the cause by its words, as well.
        cure: Whether it proposes the reverse of the fault, at its place.
        among: Whether one of the first three findings names a line of the fault.
        confident: Whether the first finding is wrong about the place, though it says that its change was verified.
        alarm: Whether a program that is healthy was said to be wrong.
        failed: Why there is no report; "" if there is one.
        seconds: Processor time of the tool.
    """

    id: str
    kind: str
    family: str
    claims: int = 0
    place: bool = False
    fault: bool = False
    cause: bool = False
    cure: bool = False
    among: bool = False
    confident: bool = False
    alarm: bool = False
    failed: str = ""
    seconds: float = 0.0
    first: str = ""


Tool = Callable[[Case, Path, "Server"], tuple[list[list[Claim]], float]]


def grade(case: Case, reports: Sequence[Sequence[Claim]]) -> Score:
    """Judge what a tool says of a case.

    Args:
        case: The case.
        reports: The findings, ranked; several lists where several tools were called, of which the best counts.
    """
    kind = KINDS.get(case.kind)
    family = "healthy" if kind is None else kind.family if case.symptoms else "harmless"
    scores = [_grade(case, family, list(claims)) for claims in reports] or [Score(case.id, case.kind, family)]
    best = max(scores, key=lambda score: (score.cure, score.cause, score.place, score.among, -score.confident))
    best.confident = best.confident if best.place else any(score.confident for score in scores)
    best.alarm = any(score.alarm for score in scores)
    return best


def _grade(case: Case, family: str, claims: list[Claim]) -> Score:
    score = Score(case.id, case.kind, family, len(claims))
    if claims:
        score.first = f"{claims[0].places[:2]} {claims[0].text} | {claims[0].cure}"[:300]
    alarms = [claim for claim in claims if claim.grade != "note"]
    if family == "healthy":
        score.alarm = bool(alarms)
        return score
    if family == "harmless":  # to name the line that was changed is true, though nothing comes of it
        score.place = bool(alarms) and _is_there(case, alarms[0])
        score.alarm = any(not _is_there(case, claim) for claim in alarms)
        return score
    score.among = any(_is_there(case, claim) for claim in claims[:3])
    if claims:
        first = claims[0]
        score.place = _is_there(case, first)
        score.fault = score.place and first.grade != "note"
        score.cause = score.place and _is_cause(case, first)
        score.cure = score.cause and _is_cure(case, first)
        score.confident = first.verified and not score.place
    return score


def _is_there(case: Case, claim: Claim) -> bool:
    kind = KINDS[case.kind]
    if kind.family == "data" and re.search(r"arriv|from the (data|loader)|in the batch|the batch", claim.text):
        return True
    right = {(case.file, line) for line in case.lines}
    return any((_relative(case, file), line) in right or Path(file).name in HELPERS for file, line in claim.places)


def _relative(case: Case, file: str) -> str:
    """Return a file as the program names it, from the path that a report has."""
    parts = Path(file).parts
    return next(("/".join(parts[start:]) for start in range(len(parts)) if "/".join(parts[start:]) == case.file), file)


def _is_cause(case: Case, claim: Claim) -> bool:
    kind = KINDS[case.kind]
    said = {_base(operator) for operator in claim.operators}
    if kind.operators and (said or not kind.cause) and not said & {_base(operator) for operator in kind.operators}:
        return False  # a finding without an operator, as of lost updates, is judged by its words
    return not kind.cause or re.search(kind.cause, f"{claim.text} {claim.cure}", re.IGNORECASE) is not None


def _is_cure(case: Case, claim: Claim) -> bool:
    return bool(claim.cure) and re.search(KINDS[case.kind].cure, claim.cure, re.IGNORECASE) is not None


def _base(operator: str) -> str:
    name = operator.rpartition("::")[2].partition(".")[0]
    return name.removeprefix("_foreach_").strip("_").removesuffix("_backward").removesuffix("_backward_data")


# Tools: how to call them, and how to read what they write.


def examine(case: Case, folder: Path, server: Server) -> tuple[list[list[Claim]], float]:
    """Run `ampkit debug train.py`: one run, one ranked report."""
    report, seconds = server.run([], case, folder)
    return [[_claim(finding) for finding in report.get("findings", [])]], seconds


def _claim(finding: dict[str, Any]) -> Claim:
    made = finding.get("made") or {}
    places = [(finding["file"], finding["line"])] + ([(made["file"], made["line"])] if made else [])
    places += [(file, line) for file, line in [finding.get("called_from") or ("", 0)] if file]
    operators = [finding.get("op", ""), made.get("op", ""), finding.get("backward_of", "")]
    return Claim(
        finding["grade"],
        places,
        [operator for operator in operators if operator],
        f"{finding['what']}; {finding['why']}",
        " ".join(finding.get(part) or "" for part in ("change", "advice")),
        bool(finding.get("verified")),
    )


def separate(case: Case, folder: Path, server: Server) -> tuple[list[list[Claim]], float]:
    """Run the tools that docs/debugging.md names for the symptom, until one is right: the best counts."""
    if "nonfinite" in case.symptoms:
        tools = [["nonfinite"]]
    elif "skipped" in case.symptoms:
        tools = [["nonfinite", "--keep-going"], ["loop"]]
    elif case.symptoms:
        tools = [["loop"], ["precision"], ["monitor", "--every=1", "--out=monitor.jsonl"]]
    else:
        tools = [["nonfinite"], ["precision"]]
    reports: list[list[Claim]] = []
    seconds = 0.0
    for tool in tools:
        report, used = server.run(tool, case, folder)
        reports.append(_read_separate(report))
        seconds += used
        if case.symptoms and grade(case, reports[-1:]).cure:
            break
    return reports, seconds


def _read_separate(report: dict[str, Any]) -> list[Claim]:
    claims = [
        Claim("wrong", [(found["file"], found["line"])], [], found["what"], found["change"])
        for found in report.get("loop", [])
    ]
    for found in report.get("findings", []):
        places = [(part["file"], part["line"]) for part in (found["origin"], found.get("made")) if part]
        operators = [
            name
            for part in (found["origin"], found.get("made"))
            if part
            for name in (part["op"], part.get("backward_of", ""))
            if name
        ]
        places += [(file, int(line)) for file, line in re.findall(r"([\w./-]+\.py):(\d+)", found["cause"]["text"])]
        change = found.get("suggestion") or {}
        text = f"{found['symptom']}; {found['cause']['text']}"
        claims.append(Claim("wrong", places, operators, text, change.get("code", ""), bool(change.get("verified"))))
    if report.get("kind", "").endswith("precision") and report.get("text") and not report.get("incomplete"):
        places = [
            (file, int(line)) for file, line in re.findall(r"([\w./-]+\.py):(\d+)", report["text"].partition("\n\n")[0])
        ]
        operators = re.findall(r"aten::\w+", report["text"].partition("\n\n")[0])
        change = report.get("suggestion") or {}
        claims.append(
            Claim(
                "wrong" if report["status"] == "found" and not report["loop"] else "note",
                places,
                operators,
                report["text"],
                change.get("code", "") or "float32",
                bool(change.get("verified")),
            )
        )
    return claims


TOOLS: dict[str, Tool] = {"examine": examine, "separate": separate}


class _NoReportError(Exception):
    """The tool wrote no report; the message has the end of what it printed."""


class Server:
    """A process of `benchmarks.faults.serve`, which runs the tool of a checkout."""

    def __init__(self, checkout: Path | None, *, resume: bool = False) -> None:
        self._resume = resume
        paths = [
            str(cache() / "site-packages"),
            *([str(checkout), str(checkout / "kernels")] if checkout is not None else []),
        ]
        paths += [os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TRITON_INTERPRET": "1",
            "PYTHONPATH": os.pathsep.join(paths),
        }
        script = str(HERE / "serve.py")
        self._process = subprocess.Popen(
            [sys.executable, script], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

        assert self._process.stdout is not None
        imported = Path(json.loads(self._process.stdout.readline()))
        if checkout is not None and checkout.resolve() not in imported.resolve().parents:
            raise ValueError(f"{imported} was imported; expected ampkit of {checkout}")

    def run(self, tool: Sequence[str], case: Case, folder: Path) -> tuple[dict[str, Any], float]:
        """Run the tool on a case that is laid out in a folder. Returns its report and the processor time."""
        output = folder.with_name(folder.name + "-".join(["", *tool]).replace("/", "") + ".json")
        if self._resume and output.is_file():
            return json.loads(output.read_text(encoding="utf-8")), 0.0
        output.unlink(missing_ok=True)
        log = output.with_suffix(".txt")
        arguments = ["debug", *tool, "--json", str(output), "train.py", *case.command()]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([str(folder), str(log), SECONDS, arguments]), file=self._process.stdin, flush=True)
        code, seconds = json.loads(self._process.stdout.readline())
        if not output.is_file():
            end = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            raise _NoReportError(f"exit code {code}: {' '.join(end)[:200]}")
        return json.loads(output.read_text(encoding="utf-8")), seconds


def score(
    cases: Sequence[Case],
    tool: str,
    *,
    label: str,
    checkout: Path | None = None,
    processes: int = 2,
    resume: bool = False,
) -> list[Score]:
    """Run a tool on cases and judge what it says.

    Args:
        cases: The cases.
        tool: A key of `TOOLS`.
        label: Of the folder in the cache that the programs run in, and that reports are kept in.
        checkout: The checkout of ampkit whose tool runs; by default the one that this process imports.
        processes: How many run at the same time.
        resume: Whether reports that are there already are judged as they are.

    Returns:
        The scores, in the order of the cases.
    """

    servers = [Server(checkout, resume=resume) for _ in range(processes)]

    def one(case: Case) -> Score:
        server = servers.pop()
        folder = case.lay_out(cache() / "runs" / label / case.id)
        try:
            reports, seconds = TOOLS[tool](case, folder, server)
            result = grade(case, reports)
            result.seconds = round(seconds, 1)
        except _NoReportError as error:
            result = grade(case, [])
            result.failed = str(error)
        finally:
            servers.append(server)
        marks = "".join(
            letter if getattr(result, name) else "." for letter, name in zip("PWCXA!F", _MARKS, strict=True)
        )
        print(f"{marks} {result.seconds:5.1f}s {result.id}  {result.failed}", flush=True)
        return result

    with ThreadPoolExecutor(processes) as pool:
        return list(pool.map(one, cases))


_MARKS = ("place", "fault", "cause", "cure", "among", "confident", "alarm")


@dataclass
class Summary:
    """The figures of a run."""

    faults: int
    place: float
    place_as_fault: float
    cause_and_cure: float
    among_three: float
    missed: float
    confidently_wrong: int
    healthy: int
    false_alarms: int
    healthy_with_notes: int
    harmless: int
    false_alarms_of_harmless: int
    named_harmless: int
    failed: int
    families: dict[str, dict[str, float]] = field(default_factory=dict)


def summary(scores: Iterable[Score]) -> Summary:
    """Return the figures of scores."""
    scores = list(scores)
    faults = [score for score in scores if score.family not in {"healthy", "harmless"}]
    healthy = [score for score in scores if score.family == "healthy"]
    harmless = [score for score in scores if score.family == "harmless"]
    families = {
        family: {
            "faults": len(members),
            "place": _share(score.place for score in members),
            "cause and cure": _share(score.cure for score in members),
        }
        for family in sorted(Counter(score.family for score in faults))
        for members in [[score for score in faults if score.family == family]]
    }
    return Summary(
        len(faults),
        _share(score.place for score in faults),
        _share(score.fault for score in faults),
        _share(score.cure for score in faults),
        _share(score.among for score in faults),
        _share(score.claims == 0 for score in faults),
        sum(score.confident for score in faults),
        len(healthy),
        sum(score.alarm for score in healthy),
        sum(score.claims > 0 for score in healthy),
        len(harmless),
        sum(score.alarm for score in harmless),
        sum(score.place for score in harmless),
        sum(bool(score.failed) for score in scores),
        families,
    )


def _share(values: Iterable[bool]) -> float:
    given = list(values)
    return round(sum(given) / len(given), 3) if given else 0.0


def to_json(scores: Sequence[Score], **about: object) -> str:
    """Return scores and their summary as JSON, with facts about the run."""
    head = json.dumps({**about, "summary": asdict(summary(scores))}, indent=1)
    rows = ",\n  ".join(
        json.dumps({key: value for key, value in asdict(score).items() if value not in (False, "", 0)})
        for score in scores
    )
    return f'{head[:-2]},\n "scores": [\n  {rows}\n ]\n}}\n'
