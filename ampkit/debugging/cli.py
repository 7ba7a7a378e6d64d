"""`ampkit debug train.py`: runs a training script under all checks; `ampkit debug rehearse train.py`.

The script is unchanged. Reports go to stdout, progress and errors to stderr. Exit codes: 0 clean, 1 a finding, 2 bad
input, 3 inconclusive, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import runpy
import shutil
import signal
import sys
import time
import traceback
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ampkit.debugging.changes import RULES
from ampkit.debugging.examination import Examination
from ampkit.debugging.finding import Report
from ampkit.debugging.observe.ranks import rank
from ampkit.debugging.rehearsal import rehearse_script
from ampkit.debugging.trials import NoResultError, StoppedError, run_task, script_attempt
from ampkit.debugging.verify import verify

CLEAN, FOUND, BAD_INPUT, INCONCLUSIVE, INTERRUPTED = 0, 1, 2, 3, 130
_INTERRUPT = "the script was interrupted"
_MAX_RUNS = 16  # of the script, with changes


def main(argv: list[str] | None = None) -> int:
    """Run `ampkit debug`. Returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    is_rehearsal = arguments[:1] == ["rehearse"]
    options = _parser(is_rehearsal).parse_args(arguments[is_rehearsal:])
    options.command = [*["-m"] * options.is_module, options.script, *options.arguments]
    try:
        _check(options)
        if options.task:
            run_task(options.task, lambda tool: _run(options, tool))
            return CLEAN
        if is_rehearsal:
            report: Any = rehearse_script(options.command, options.against, options.steps)
        else:
            report = _examine(options)
        print(report)
        if options.json:
            Path(options.json.replace("{rank}", str(rank() or 0))).write_text(report.to_json(), encoding="utf-8")
    except BrokenPipeError:  # of `| head`, for `ampkit.__main__`
        raise
    except (OSError, ValueError) as error:
        print(f"ampkit debug: {error}", file=sys.stderr)
        return BAD_INPUT
    except NoResultError as error:
        print(f"ampkit debug: {error}", file=sys.stderr)
        return INCONCLUSIVE
    except Exception:
        traceback.print_exc()  # not exit code 1, which means that something was found
        return INCONCLUSIVE
    if report.status == "inconclusive":
        return INTERRUPTED if report.incomplete == _INTERRUPT else INCONCLUSIVE
    return FOUND if report else CLEAN


def _parser(is_rehearsal: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ampkit debug rehearse" if is_rehearsal else "ampkit debug")
    add = parser.add_argument
    if is_rehearsal:
        parser.description = "Whether low precision costs a training anything, and which modules to keep out of it."
        add("--steps", type=_count, default=120, metavar="N", help="iterations of each training, at least 1")
        add("--against", choices=RULES, help="test this recipe; without it the precision that the script has")
    else:
        parser.description = "Find numerical errors in a training script, which stays as it is."
        parser.epilog = (
            "ampkit debug rehearse train.py: whether low precision costs anything. A script of this name is ./rehearse."
        )
        add("--from-step", type=_count, default=0, metavar="N", help="check operators from iteration N on")
        add("--steps", type=_count, metavar="N", help="end after N iterations, instead of at the script's end")
        add("--seconds", type=float, metavar="S", help="end after the first step that ends after S seconds")
        add("--no-verify", action="store_true", help="do not run the script again in float32, and with fixes")
    add("--task", type=json.loads, help=argparse.SUPPRESS)  # of one of the processes that the command starts
    add("--json", type=_absolute, metavar="F", help="write the report; {rank} is the rank")
    add("-m", dest="is_module", action="store_true", help="the script is a module, as in `python -m package.module`")
    add("script")
    # Else argparse calls arguments of the script missing where the script is.
    add("arguments", nargs=argparse.REMAINDER, help="of the script").required = False
    return parser


def _examine(options: Any) -> Report:
    examination = Examination(from_step=options.from_step)
    report, run, started = examination.report, examination.run, time.monotonic()
    is_terminal, last = sys.stderr.isatty(), started

    def step_ended() -> None:
        is_last = options.steps is not None and run.step >= options.from_step + options.steps
        if is_last or (options.seconds and time.monotonic() - started > options.seconds):
            raise StoppedError

    def progress() -> None:
        nonlocal last
        if is_terminal and time.monotonic() - last > 1:
            last = time.monotonic()
            _show(f"step {run.step}, {run.count} operators, {len(report.findings)} findings, {last - started:.0f} s")

    examination.on_step, examination.on_operator = step_ended, progress
    _show("the script starts")
    report.incomplete = _run(options, examination)
    if not report.steps and not report.incomplete:
        before = f"before step {options.from_step}" if options.from_step else "without a training step in this process"
        report.incomplete = f"the script ended {before}, and no operator was checked"
    _verify(options, examination, time.monotonic() - started)
    if is_terminal:
        _show("")
        print("\r", end="", file=sys.stderr, flush=True)
    return report


def _verify(options: Any, examination: Examination, seconds: float) -> None:
    """Run the script again with changes, if it may; its examination took `seconds`."""
    report, run = examination.report, examination.run
    reasons = {
        "--no-verify": options.no_verify,
        "several ranks": report.rank is not None,
        report.incomplete: report.incomplete == _INTERRUPT or not report.steps,
    }
    report.comparison = next((f"not compared with float32: {reason}" for reason, holds in reasons.items() if holds), "")
    if report.comparison:
        return
    attempt = script_attempt(options.command, run.step, seconds + 30, may_fail=bool(report.incomplete))
    base = run.losses
    if report.skips_many and report.skips >= report.steps - 1:  # no step was executed
        base = {site: dict.fromkeys(losses, math.nan) for site, losses in base.items()}
    _show("the script runs again, and overwrites its output files")
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # a job that is ended prints its results
    try:
        verify(report, run, attempt, base, max_runs=_MAX_RUNS, seconds=seconds + 60, is_script=True, show=_show)
    finally:
        signal.signal(signal.SIGTERM, before)


def _show(text: str) -> None:
    """Write progress to stderr: over the last line of a terminal, no longer than it is, or as a line."""
    if sys.stderr.isatty():
        width = min(70, shutil.get_terminal_size().columns - 1)
        print(f"\r{text[:width]:{width}}", end="", file=sys.stderr, flush=True)
    else:
        print(f"ampkit debug: {text}", file=sys.stderr, flush=True)


def _run(options: Any, tool: AbstractContextManager[Any]) -> str:
    """Run the user's script under a tool, as `python script.py ARGS` or `python -m module ARGS` would run it.

    Returns why it did not reach its end; "" if it did, or if the tool stopped it.
    """
    argv, path, folder, leave, process = sys.argv, list(sys.path), Path.cwd(), os._exit, os.getpid()

    def exit_at_once(code: int) -> None:
        if os.getpid() != process:  # in a forked worker
            leave(code)
        raise StoppedError(f"the script called os._exit({code})")

    sys.argv = [options.script, *options.arguments]
    sys.path.insert(0, str(Path.cwd() if options.is_module else Path(options.script).resolve().parent))
    os._exit = exit_at_once  # type: ignore[assignment]
    try:
        with tool:
            if options.is_module:
                runpy.run_module(options.script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(options.script, run_name="__main__")
    except StoppedError as stopped:
        return str(stopped)
    except KeyboardInterrupt:
        return _INTERRUPT
    except SystemExit as exit:
        if isinstance(exit.code, str):
            print(exit.code, file=sys.stderr)
            return f"the script ended with sys.exit({exit.code!r})"
        return f"the script ended with exit code {exit.code}" if exit.code else ""
    except Exception as error:
        frames = error.__traceback__  # from the script on, as Python shows them
        while frames and frames.tb_frame.f_code.co_filename != options.script:
            frames = frames.tb_next
        traceback.print_exception(type(error), error, frames or error.__traceback__)
        return f"the script failed with {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    finally:
        sys.argv, sys.path[:], os._exit = argv, path, leave  # type: ignore[assignment]
        os.chdir(folder)
    return ""


def _check(options: Any) -> None:
    script = options.script
    if options.json and not Path(options.json).parent.is_dir():
        raise FileNotFoundError(f"--json is {options.json}; expected a file in an existing folder")
    if options.is_module:
        return  # `runpy` raises an ImportError that names it
    if not Path(script).is_file():
        raise FileNotFoundError(f"{script} is not a file; expected the training script, then its own arguments")
    if script.endswith(".ipynb"):
        raise ValueError(f"{script} is a notebook; expected a script: use ampkit.debugging.Examination() in a cell")


def _absolute(text: str) -> str:
    return str(Path(text).absolute())  # the script may change the working directory


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of steps; expected 0, 1, 2, ...")
    return int(text)
