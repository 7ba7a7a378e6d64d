"""`python -m benchmarks.faults`: put faults into training programs of public repositories, and score a tool on them."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

EPILOG = """\
fetch needs network, or --mirror with a folder of git directories named owner+name; without either there is
nothing to score. The rest works without network. The cases are chosen already, in cases.json. Sources, programs and
reports are kept in the folder that AMPKIT_FAULTS names (default: ~/.cache/ampkit-faults).
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    command_line = argparse.ArgumentParser(
        prog="python -m benchmarks.faults",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = command_line.add_subparsers(dest="command", required=True)
    fetch = commands.add_parser("fetch", help="get the repositories by git, at their commits")
    fetch.add_argument("--mirror", type=Path, help="a folder of git directories to take them from")
    choose = commands.add_parser("choose", help="inject faults, run each program, and keep those with a symptom")
    choose.add_argument("--out", type=Path, required=True, help="file for the cases")
    choose.add_argument("--precision", type=int, default=5, help="faults of precision for each program (default: 5)")
    choose.add_argument("--other", type=int, default=4, help="other faults for each program (default: 4)")
    choose.add_argument("--healthy", type=int, default=2, help="without, besides the program itself (default: 2)")
    choose.add_argument("--seed", type=int, default=0)
    score = commands.add_parser("score", help="run a tool on the cases and judge its reports")
    score.add_argument("--cases", type=Path, help="file of the cases (default: cases.json here)")
    score.add_argument(
        "--tool", choices=("examine", "separate"), default="examine", help="one command, or those for a symptom"
    )
    score.add_argument(
        "--checkout", type=Path, help="the checkout of ampkit to score (default: the one that is imported)"
    )
    score.add_argument("--label", default="run", help="of the folder that programs run in, which keeps the reports")
    score.add_argument("--only", default="", help="a pattern that the names of cases have a match of")
    score.add_argument("--processes", type=int, default=2)
    score.add_argument("--resume", action="store_true", help="judge the reports that are there, and run the rest")
    score.add_argument("--out", type=Path, help="file for the scores")
    table = commands.add_parser("report", help="tables of scores, as Markdown")
    table.add_argument("scores", nargs="+", type=Path, help="files that `score --out` wrote")
    for command in (fetch, choose, score):
        command.add_argument("--half", choices=("dev", "final"), default="")
        command.add_argument("programs", nargs="*")
    return command_line


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Exit status 0, or 1 if it could not do its work."""
    options = parser().parse_args(argv)
    from benchmarks.faults import cases, programs, report, serve
    from benchmarks.faults import score as scoring

    if options.command == "report":
        print(report.report(options.scores), end="")
        return 0
    chosen = programs.load(options.half, options.programs)
    if options.command == "fetch":
        programs.fetch(chosen, options.mirror)
    elif options.command == "choose":
        serve.warm_up()
        kept: list[cases.Case] = []
        for program in chosen:
            kept += cases.choose(
                program, precision=options.precision, other=options.other, healthy=options.healthy, seed=options.seed
            )
            cases.write(kept, options.out)
    else:
        given = cases.read(options.cases or cases.CASES)
        names = {program.name for program in chosen}
        given = [case for case in given if case.program in names and re.search(options.only, case.id)]
        scores = scoring.score(
            given,
            options.tool,
            label=options.label,
            checkout=options.checkout,
            processes=options.processes,
            resume=options.resume,
        )
        text = scoring.to_json(scores, tool=options.tool, half=options.half, label=options.label)
        if options.out:
            options.out.write_text(text, encoding="utf-8")
        print(text.partition('"scores"')[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
