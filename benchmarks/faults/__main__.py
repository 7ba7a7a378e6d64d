"""`python -m benchmarks.faults`: run `ampkit debug` on stored faults in training programs, and score its reports."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

EPILOG = """\
fetch needs network, or --mirror with a folder of git directories named owner+name; without the sources there is nothing
to run. Sources are stored in the folder AMPKIT_FAULTS (default: ~/.cache/ampkit-faults).
"""


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    command_line = argparse.ArgumentParser(
        prog="python -m benchmarks.faults",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = command_line.add_subparsers(dest="command", required=True)
    fetch = commands.add_parser("fetch", help="get the repositories by git, at their commits")
    fetch.add_argument("--mirror", type=Path, help="a folder of git directories that replaces GitHub")
    run = commands.add_parser("run", help="run `ampkit debug` on the cases that FOLDER has no result of")
    run.add_argument("folder", type=Path, help="folder for the reports")
    run.add_argument("--checkout", type=Path, help="the checkout of ampkit to run (default: the one that is imported)")
    run.add_argument("--no-verify", action="store_true", help="do not try fixes")
    run.add_argument("--processes", type=int, default=1, help="cases at the same time (default: 1)")
    score = commands.add_parser("score", help="score the reports of runs, side by side, as Markdown")
    score.add_argument("folders", type=Path, nargs="+", help="folders of `run`")
    for command in (run, score):
        command.add_argument("--half", choices=("dev", "final"), default="", help="of the programs (default: both)")
        command.add_argument("--only", default="", help="a pattern for the names of cases")
    return command_line


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Return the exit status."""
    options = parser().parse_args(argv)
    from benchmarks.faults import inject
    from benchmarks.faults import run as runner
    from benchmarks.faults import score as scoring

    if options.command == "fetch":
        inject.fetch(inject.programs().values(), options.mirror)
        return 0
    chosen = [case for case in inject.cases() if options.half in ("", case.program.half)]
    chosen = [case for case in chosen if re.search(options.only, case.id)]
    if options.command == "run":
        arguments = ["--no-verify"] if options.no_verify else []
        runner.run(chosen, options.folder, options.checkout, *arguments, processes=options.processes)
    else:
        found = {folder.name: scoring.scores(chosen, folder) for folder in options.folders}
        print(scoring.tables(found), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
