"""`ampkit debug`: the tools on a training script that knows nothing of them, and what they wrote.

Exit codes: 0 clean, 1 something was found, 2 bad input, 3 inconclusive, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import math
import shlex
import subprocess
import sys
import traceback
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ampkit.debugging import html_report, report_file
from ampkit.debugging.detect import detect_nonfinite, rank
from ampkit.debugging.hashes import HashLog, compare_hashes, record_hashes
from ampkit.debugging.monitor import ScriptMonitor
from ampkit.debugging.operator_stats import OperatorTimes
from ampkit.debugging.precision import PrecisionComparison
from ampkit.debugging.report import NonFiniteError, NonFiniteReport
from ampkit.debugging.script import ScriptStopped, run_script
from ampkit.debugging.search import search_policy

CLEAN, FOUND, BAD_INPUT, INCONCLUSIVE, INTERRUPTED = 0, 1, 2, 3, 130


def main(argv: list[str] | None = None) -> int:
    """Run a tool. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="ampkit debug", description="Find out where numbers go wrong.")
    tools = parser.add_subparsers(dest="tool", required=True, metavar="tool")
    nonfinite = tools.add_parser("nonfinite", help="where inf and NaN come from in a training script")
    nonfinite.add_argument("--from-step", type=_count, default=0, metavar="N", help="look after N optimizer steps")
    _add_files(nonfinite)
    nonfinite.add_argument("--keep-going", action="store_true", help="do not stop at the first finding")
    nonfinite.add_argument("script")
    nonfinite.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")
    precision = tools.add_parser("precision", help="what one step of a training script loses to low precision")
    precision.add_argument("--at-step", type=_count, default=0, metavar="N", help="the step after N optimizer steps")
    precision.add_argument("--reference", choices=("float32", "float64"), default="float32")
    _add_files(precision)
    precision.add_argument("script")
    precision.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")
    monitor = tools.add_parser("monitor", help="headroom, underflow and lost updates, on a step now and then")
    monitor.add_argument("--every", type=_count, default=100, metavar="N", help="sample every N optimizer steps")
    monitor.add_argument("--out", default="ampkit-monitor.jsonl", metavar="F", help="a line of JSON per sample")
    monitor.add_argument("script")
    monitor.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")
    search = tools.add_parser("search", help="the smallest part of a model to keep in float32, by your own metric")
    search.add_argument("--factory", required=True, metavar="pkg.mod:make",
                        help="a function that returns the arguments of search_policy as a dict: evaluate, model, ...")
    search.add_argument("--check", metavar="CMD", help="run with the metric as last argument; exit code 0 passes")
    search.add_argument("--scope", choices=("modules", "operators"), default="modules")
    search.add_argument("--max-evaluations", type=_count, default=100, metavar="N")
    log = search.add_mutually_exclusive_group()
    log.add_argument("--log", default="ampkit-search.jsonl", metavar="F", help="a new file that keeps every evaluation")
    log.add_argument("--resume", metavar="F", help="go on from a log")
    operators = tools.add_parser("operators", help="where the time and the bytes of a step go")
    operators.add_argument("--at-step", type=_count, default=1, metavar="N", help="the step after N optimizer steps")
    _add_files(operators)
    operators.add_argument("script")
    operators.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")
    hashes = tools.add_parser("hashes", help="hashes of every result of one step, for diff")
    hashes.add_argument("--at-step", type=_count, default=0, metavar="N", help="the step after N optimizer steps")
    hashes.add_argument("--json", required=True, metavar="F", help="where to; {rank} in the name is the rank")
    hashes.add_argument("script")
    hashes.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")
    diff = tools.add_parser("diff", help="the first operator that differs between two files that hashes wrote")
    diff.add_argument("a")
    diff.add_argument("b")
    report = tools.add_parser("report", help="show reports that the tools wrote, or make them one HTML file")
    report.add_argument("files", nargs="+")
    report.add_argument("--html", metavar="F", help="write one file that needs nothing else, instead of text")
    merge = tools.add_parser("merge", help="the reports of several ranks, the one to blame first")
    merge.add_argument("files", nargs="+")
    options = parser.parse_args(argv)
    try:
        return {
            "nonfinite": _nonfinite, "precision": _precision, "search": _search, "monitor": _monitor,
            "operators": _operators, "hashes": _hashes, "diff": _diff, "report": _report, "merge": _merge,
        }[options.tool](options)
    except (OSError, ValueError) as error:
        print(f"ampkit debug: {error}", file=sys.stderr)
        return BAD_INPUT
    except Exception:
        traceback.print_exc()       # of a factory's metric; 1 would say that something was found
        return INCONCLUSIVE


def _add_files(tool: argparse.ArgumentParser) -> None:
    tool.add_argument("--json", metavar="F", help="write the report; {rank} in the name is the rank")
    tool.add_argument("--html", metavar="F", help="write it as one HTML file that needs nothing else")


def _nonfinite(options: Any) -> int:
    detect = detect_nonfinite(on_found="record" if options.keep_going else "raise")
    detect.recorder.first_step = options.from_step
    ended = _run(options, detect)
    report = detect.report
    print(f"\n{report}", file=sys.stderr)
    _write(options, report, report.rank)
    return ended.code(found=bool(report), looked=report.steps > 0, step=options.from_step)


def _precision(options: Any) -> int:
    comparison = PrecisionComparison(
        None, getattr(torch, options.reference), first_step=options.at_step, on_step=_stop
    )
    ended = _run(options, comparison)
    report = comparison.report
    looked = comparison.run.begun
    if looked:
        print(f"\n{report}\n\n{report.table()}", file=sys.stderr)
    _write(options, report, rank())
    return ended.code(found=math.isinf(report.gradient_error), looked=looked, step=options.at_step)


def _operators(options: Any) -> int:
    times = OperatorTimes(on_step=_stop)
    times.first_step = options.at_step
    ended = _run(options, times)
    print(f"\n{times.stats}", file=sys.stderr)
    _write(options, times.stats, rank())
    return ended.code(found=False, looked=times.begun, step=options.at_step)


def _hashes(options: Any) -> int:
    recorder = record_hashes(on_step=_stop)
    recorder.first_step = options.at_step
    ended = _run(options, recorder)
    _write(options, recorder.log, rank())
    return ended.code(found=False, looked=recorder.begun, step=options.at_step)


def _diff(options: Any) -> int:
    a, b = (HashLog.from_json(Path(name).read_text(encoding="utf-8")) for name in (options.a, options.b))
    difference = compare_hashes(a, b)
    print(difference)
    return FOUND if difference else CLEAN


def _stop() -> None:
    raise ScriptStopped


def _monitor(options: Any) -> int:
    monitor = ScriptMonitor(every=options.every, path=options.out.replace("{rank}", str(rank())))
    ended = _run(options, monitor)
    print(f"\n{monitor}", file=sys.stderr)
    return ended.code(found=False, looked=monitor.last is not None, step=1)


def _search(options: Any) -> int:
    arguments = _made_by(options.factory)
    if options.check:
        command = shlex.split(options.check)
        arguments["passes"] = lambda value: subprocess.run([*command, str(value)], check=False).returncode == 0
    log = options.resume or options.log
    try:
        result = search_policy(
            **arguments, scope=options.scope, max_evaluations=options.max_evaluations, log=log,
            resume=bool(options.resume),
        )
    except KeyboardInterrupt:
        print(f"\nampkit debug: interrupted; --resume {log} goes on from there", file=sys.stderr)
        return INTERRUPTED
    print(result)
    return {"found": FOUND, "passes already": CLEAN}.get(result.status, INCONCLUSIVE)


def _made_by(factory: str) -> dict[str, Any]:
    """What a factory, given as `pkg.mod:make`, returns."""
    module, _, name = factory.partition(":")
    if not name:
        raise ValueError(f"--factory is {factory!r}; expected 'pkg.mod:function'")      # importing it may do anything
    sys.path.insert(0, str(Path.cwd()))
    try:
        make = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--factory is {factory!r}: {error}; expected 'pkg.mod:function'") from error
    finally:
        sys.path.pop(0)
    made = make()
    if not isinstance(made, Mapping) or not {"evaluate", "model"} <= set(made):
        raise ValueError(f"{factory} returned {made!r}; expected a dict with 'evaluate', 'model' and, if you like, "
                         "'passes' and 'policy'")
    return dict(made)


class _Ended(NamedTuple):
    """How a script ended."""

    exit_code: int
    interrupted: bool

    def code(self, *, found: bool, looked: bool, step: int) -> int:
        """The exit code of the tool."""
        if self.interrupted:
            return INTERRUPTED
        if found:
            return FOUND
        if not looked:
            print(f"ampkit debug: the script ended before step {step}: nothing was looked at. Until then steps that a "
                  "scaler skips do not count", file=sys.stderr)
            return INCONCLUSIVE
        if self.exit_code:
            print(f"ampkit debug: the script itself ended with exit code {self.exit_code}", file=sys.stderr)
            return INCONCLUSIVE
        return CLEAN


def _run(options: Any, tool: AbstractContextManager[Any]) -> _Ended:
    """Run the user's script under a tool."""
    if not Path(options.script).is_file():
        raise FileNotFoundError(f"{options.script} is no file; expected the training script, then its own arguments")
    for name in ("json", "html", "out"):
        file = getattr(options, name, None)
        if file and not Path(file).parent.is_dir():
            raise FileNotFoundError(f"--{name} is {file}; expected a file in a folder that is there")
    code, interrupted = 0, False
    try:
        with tool:
            code = run_script(options.script, options.arguments)
    except NonFiniteError:
        pass
    except KeyboardInterrupt:
        interrupted = True
    except Exception:
        traceback.print_exc()       # the script's own
        code = 1
    return _Ended(code, interrupted)


def _write(options: Any, report: Any, of_rank: int) -> None:
    if options.json:
        Path(options.json.replace("{rank}", str(of_rank))).write_text(report.to_json(), encoding="utf-8")
    if getattr(options, "html", None):
        page = html_report.page([(options.script, report)])
        Path(options.html.replace("{rank}", str(of_rank))).write_text(page, encoding="utf-8")


def _report(options: Any) -> int:
    reports = [(name, report_file.read_any(name)) for name in options.files]
    if options.html:
        Path(options.html).write_text(html_report.page(reports), encoding="utf-8")
        print(options.html)
    else:
        print("\n\n".join(str(report) for _, report in reports))
    return FOUND if any(isinstance(report, NonFiniteReport) and report for _, report in reports) else CLEAN


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
