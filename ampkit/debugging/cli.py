"""`ampkit debug`: runs a training script under the debugging tools, without changes to the script.

`ampkit debug train.py` is the examination. The name of a tool in front of the script runs this tool alone; a script
with the name of a tool is written `./loop`. Reports go to stdout, progress and errors to stderr. Exit codes: 0 clean,
1 something was found, 2 bad input, 3 inconclusive, 130 interrupted.
"""

from __future__ import annotations

import argparse
import runpy
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ampkit.debugging.detect import detect_nonfinite, rank
from ampkit.debugging.examine import Examination
from ampkit.debugging.loop import check_loop
from ampkit.debugging.precision import PrecisionComparison
from ampkit.debugging.rehearsal import judge
from ampkit.debugging.rehearse_script import AGAINST, run_task, script_trainings
from ampkit.debugging.report import NonFiniteError, Report
from ampkit.debugging.verify import applied, verify

CLEAN, FOUND, BAD_INPUT, INCONCLUSIVE, INTERRUPTED = 0, 1, 2, 3, 130
_INTERRUPT = "the script was interrupted"


def main(argv: list[str] | None = None) -> int:
    """Run a tool. Returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    tool, *rest = arguments if arguments and arguments[0] in _TOOLS else ["", *arguments]
    run = _TOOLS[tool][0]
    options = _parser(tool).parse_args(rest)
    try:
        report, text = run(options)
        print(text)
        if options.json:
            Path(options.json.replace("{rank}", str(rank() or 0))).write_text(report.to_json(), encoding="utf-8")
    except BrokenPipeError:  # of `| head`, for `ampkit.__main__`
        raise
    except (OSError, ValueError) as error:
        print(f"ampkit debug: {error}", file=sys.stderr)
        return BAD_INPUT
    except Exception:
        traceback.print_exc()  # not exit code 1, which means that something was found
        return INCONCLUSIVE
    if report.status == "inconclusive":
        return INTERRUPTED if report.incomplete == _INTERRUPT else INCONCLUSIVE
    return FOUND if report else CLEAN


def _parser(tool: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"ampkit debug {tool}".rstrip(), description=_TOOLS[tool][1])
    add = parser.add_argument
    if tool == "":
        names = ", ".join(filter(None, _TOOLS))
        parser.epilog = f"Tools, by name in front of the script: {names}. A script with such a name is written ./loop."
        add("--steps", type=_count, metavar="N", help="end after N optimizer steps, in place of the script's end")
        add("--seconds", type=float, metavar="S", help="end after the first step that ends after S seconds")
        add("--no-verify", action="store_true", help="do not run the script again to try changes")
        add("--look-at", type=int, help=argparse.SUPPRESS)  # the only step with dear looks
        add("--apply", help=argparse.SUPPRESS)  # a change, see `verify`
    elif tool == "nonfinite":
        add("--from-step", type=_count, default=0, metavar="N", help="begin after N optimizer steps")
        add("--keep-going", action="store_true", help="do not stop at the first finding")
    elif tool == "precision":
        add("--at-step", type=_count, default=0, metavar="N", help="compare the step after N optimizer steps")
    elif tool == "rehearse":
        add("--steps", type=_count, default=120, metavar="N", help="optimizer steps of each training")
        add("--against", choices=AGAINST, help="judge this recipe; without it the precision as it is")
        add("--task", help=argparse.SUPPRESS)  # of one of the processes that the command starts
    add("--json", type=_absolute, metavar="F", help="write the report; {rank} is the rank")
    add("script")
    # Else argparse calls arguments of the script missing where the script is.
    add("arguments", nargs=argparse.REMAINDER, help="of the script").required = False
    return parser


# The tools: each runs the script, and returns its report and the text to print.


def _examine(options: Any) -> tuple[Report, str]:
    examination = Examination()
    examination.dear_at = options.look_at
    report, started = examination.report, time.monotonic()
    shows_progress, last = sys.stderr.isatty(), started

    def step_ended() -> None:
        if examination.step == options.steps or (options.seconds and time.monotonic() - started > options.seconds):
            _stop()

    def progress() -> None:
        nonlocal last
        if shows_progress and time.monotonic() - last > 1:
            last = time.monotonic()
            found = len(report.findings) + len(report.problems) + len(report.loop)
            _show(f"step {examination.step}, {examination.count} operators, {found} found, {last - started:.0f} s")

    examination.on_step, examination.on_operator = step_ended, progress
    if shows_progress:
        _show("the script starts")
    with applied(options.apply):
        report.incomplete = _run(options, examination)
    if report and not options.no_verify and report.rank is None and report.incomplete != _INTERRUPT:
        command = [options.script, *options.arguments]
        if shows_progress:
            _show("the script runs again with a change")
        seconds = 300 + 3 * (time.monotonic() - started)
        verify(report, examination.modules.region, command, seconds)
    if shows_progress:
        _show("")
        print("\r", end="", file=sys.stderr, flush=True)
    return report, str(report)


def _show(text: str) -> None:
    """Write a line of progress over the last one, no longer than the terminal, where it would not be one line."""
    width = min(70, shutil.get_terminal_size().columns - 1)
    print(f"\r{text[:width]:{width}}", end="", file=sys.stderr, flush=True)


def _nonfinite(options: Any) -> tuple[Report, str]:
    detect = detect_nonfinite(on_found="record" if options.keep_going else "raise")
    detect.first_step = options.from_step
    report = detect.report
    report.incomplete = _run(options, detect) or _too_early(options.from_step, checked=report.steps > 0)
    return report, str(report)


def _precision(options: Any) -> tuple[Report, str]:
    comparison = PrecisionComparison(None)
    report = comparison.report
    comparison.first_step = report.step = options.at_step
    comparison.on_step = _stop
    report.incomplete = _run(options, comparison) or _too_early(options.at_step, checked=comparison.begun)
    return report, f"{report}\n\n{report.table()}" if report.operators else str(report)


def _loop(options: Any) -> tuple[Report, str]:
    check = check_loop()
    check.report.incomplete = _run(options, check) or check.report.incomplete
    return check.report, str(check.report)


def _rehearse(options: Any) -> tuple[Report, str]:
    if options.task:
        return run_task(options.task, lambda tool: _run(options, tool), _stop), ""
    _check_script(options.script)
    if options.steps < 1:
        raise ValueError("--steps is 0; expected 1 or more")
    report = judge(script_trainings(options.script, options.arguments, options.against, options.steps), lambda: 0)
    text = str(report)
    report.incomplete = _INTERRUPT if report.incomplete else ""
    return report, text


def _too_early(step: int, *, checked: bool) -> str:
    """Why a report is incomplete if no step was checked; "" if one was."""
    return (
        ""
        if checked
        else (
            f"the script ended before step {step}, and nothing was checked. Steps that a scaler "
            "skips do not count until then"
        )
    )


class _Stopped(BaseException):
    """Ends the script once a tool has its result. Not an `Exception`, so that the script does not catch it."""


def _stop() -> None:
    raise _Stopped


def _run(options: Any, tool: AbstractContextManager[Any]) -> str:
    """Run the user's script under a tool, as `python script.py ARGS` would run it.

    Returns why it did not run to its end; "" if it did, or if the tool stopped it.
    """
    _check_script(options.script)
    file = getattr(options, "json", None)
    if file and not Path(file).parent.is_dir():
        raise FileNotFoundError(f"--json is {file}; expected a file in an existing folder")
    argv, path = sys.argv, list(sys.path)
    sys.argv = [options.script, *options.arguments]
    sys.path.insert(0, str(Path(options.script).resolve().parent))
    try:
        with tool:
            runpy.run_path(options.script, run_name="__main__")
    except (NonFiniteError, _Stopped):
        return ""
    except KeyboardInterrupt:
        return _INTERRUPT
    except SystemExit as left:
        return f"the script ended with exit code {left.code}" if left.code else ""
    except Exception as error:
        frames = error.__traceback__  # from the script on, as Python shows them
        while frames and frames.tb_frame.f_code.co_filename != options.script:
            frames = frames.tb_next
        traceback.print_exception(type(error), error, frames or error.__traceback__)
        return f"the script failed with {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    finally:
        sys.argv, sys.path[:] = argv, path
    return ""


def _check_script(script: str) -> None:
    if not Path(script).is_file():
        raise FileNotFoundError(f"{script} is not a file; expected the training script, then its own arguments")


def _absolute(text: str) -> str:
    return str(Path(text).absolute())  # the script may change the working directory


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of steps; expected 0, 1, 2, ...")
    return int(text)


_TOOLS: dict[str, tuple[Callable[[Any], tuple[Report, str]], str]] = {  # by name, "" for the examination
    "": (_examine, "Find out where numbers go wrong in a training script, which stays as it is."),
    "nonfinite": (_nonfinite, "Where inf and NaN come from in a training script."),
    "precision": (_precision, "What one step of a training script loses to low precision."),
    "loop": (_loop, "Whether scaler, gradients and optimizer are called in the right order."),
    "rehearse": (_rehearse, "Whether low precision costs a training anything, and what to keep."),
}
