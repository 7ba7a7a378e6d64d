"""`ampkit debug`: the tools on a training script that knows nothing of them, and what they wrote.

Exit codes: 0 clean, 1 something was found, 2 bad input, 3 inconclusive, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from pathlib import Path
from typing import Any

from ampkit.debugging import report_file
from ampkit.debugging.detect import detect_nonfinite
from ampkit.debugging.report import NonFiniteError, NonFiniteReport
from ampkit.debugging.script import run_script

CLEAN, FOUND, BAD_INPUT, INCONCLUSIVE, INTERRUPTED = 0, 1, 2, 3, 130


def main(argv: list[str] | None = None) -> int:
    """Run a tool. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="ampkit debug", description="Find out where numbers go wrong.")
    tools = parser.add_subparsers(dest="tool", required=True, metavar="tool")
    nonfinite = tools.add_parser("nonfinite", help="where inf and NaN come from in a training script")
    nonfinite.add_argument("--from-step", type=_count, default=0, metavar="N", help="look after N optimizer steps")
    nonfinite.add_argument("--json", metavar="F", help="write the report; {rank} in the name is the rank")
    nonfinite.add_argument("--keep-going", action="store_true", help="do not stop at the first finding")
    nonfinite.add_argument("script")
    nonfinite.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")
    report = tools.add_parser("report", help="show a report that --json wrote")
    report.add_argument("file")
    merge = tools.add_parser("merge", help="the reports of several ranks, the one to blame first")
    merge.add_argument("files", nargs="+")
    options = parser.parse_args(argv)
    try:
        return {"nonfinite": _nonfinite, "report": _report, "merge": _merge}[options.tool](options)
    except (FileNotFoundError, ValueError) as error:
        print(f"ampkit debug: {error}", file=sys.stderr)
        return BAD_INPUT


def _nonfinite(options: Any) -> int:
    if not Path(options.script).is_file():
        raise FileNotFoundError(f"{options.script} is no file; expected the training script, then its own arguments")
    detect = detect_nonfinite(on_found="record" if options.keep_going else "raise")
    detect.recorder.first_step = options.from_step
    code, interrupted = 0, False
    try:
        with detect:
            code = run_script(options.script, options.arguments)
    except NonFiniteError:
        pass
    except KeyboardInterrupt:
        interrupted = True
    except Exception:
        traceback.print_exc()       # the script's own
        code = 1
    report = detect.report
    print(f"\n{report}", file=sys.stderr)
    if options.json:
        Path(options.json.replace("{rank}", str(report.rank))).write_text(report.to_json(), encoding="utf-8")
    if interrupted:
        return INTERRUPTED
    if report:
        return FOUND
    if not report.operators:
        print(f"ampkit debug: the script ended before step {options.from_step}: nothing was looked at", file=sys.stderr)
        return INCONCLUSIVE
    if code:
        print(f"ampkit debug: the script itself ended with exit code {code}", file=sys.stderr)
        return INCONCLUSIVE
    return CLEAN


def _report(options: Any) -> int:
    return _show([report_file.read(options.file)])


def _merge(options: Any) -> int:
    return _show(report_file.merge(report_file.read(file) for file in options.files))


def _show(reports: list[NonFiniteReport]) -> int:
    print("\n\n".join(map(str, reports)))
    return FOUND if any(reports) else CLEAN


def _count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of steps; expected 0, 1, 2, ...")
    return number
