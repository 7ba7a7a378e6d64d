"""The command line of `ampkit demo`."""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import torch

from ampkit.demo.fault import show_fault
from ampkit.demo.lanes import Lane, make_lanes
from ampkit.demo.plot import draw
from ampkit.demo.progress import open_progress
from ampkit.demo.results import Results, describe_machine
from ampkit.demo.table import print_table
from ampkit.demo.tasks import TASKS, Task
from ampkit.demo.training import train

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
INTERRUPTED = 130       # what shells report for a process ended by Ctrl-C


class Parser(argparse.ArgumentParser):
    """Reports a bad value in one line, without the usage text before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv: list[str] | None = None) -> int:
    """Run the demo; return the exit code. Ctrl-C keeps what was measured, if anything was, and returns 130."""
    parser = _parser()
    options = parser.parse_args(argv)
    names = list(TASKS) if options.model == "both" else [options.model]
    _require_extras(parser, names)
    device = _usable_device(parser, options.device)
    out = _usable_folder(parser, options.out)

    results = Results(options.seed, str(device), machine=describe_machine(device))
    print(f"fp32, torch.amp and ampkit side by side on {device}: same seed, same batches, taking turns.")
    try:
        trained = [_run_task(name, device, options, results) for name in names]
        task, lanes = trained[-1]
        results.fault = show_fault(task, lanes[-1], options.seed)
    except KeyboardInterrupt:
        words = f"what was measured until now is in {out}" if _save(results, out) else "nothing was measured yet"
        print(f"\ninterrupted; {words}", file=sys.stderr)
        return INTERRUPTED
    print()
    print_table(results)
    print("", *results.fault.lines(), "", sep="\n")
    for line in _save(results, out):
        print(line)
    return 0


def _run_task(
    name: str, device: torch.device, options: argparse.Namespace, results: Results
) -> tuple[Task, list[Lane]]:
    print(f"\n{name}: loading data and building three copies of the model ...", flush=True)
    task = TASKS[name](device)
    chosen = options.dtype
    if chosen == "auto":
        chosen = task.cpu_dtype if device.type == "cpu" else "fp16"
    steps = options.steps or task.steps
    lanes = make_lanes(task, device, DTYPES[chosen], options.seed)
    entry = results.add(task, lanes, steps)
    print(f"{name}: {task.title}, {steps} steps; the mixed-precision lanes use {chosen}", flush=True)
    with open_progress(steps, lanes) as progress:
        train(task, lanes, steps, options.seed, progress)
    entry.finished = True
    words = ", ".join(f"{lane.name} {lane.record.held_out:.2f}" for lane in lanes)
    print(f"{name}: {task.metric}: {words}", flush=True)
    return task, lanes


def _save(results: Results, out: Path) -> list[str]:
    """Write the JSON and the figure; return a line for each. Without a step an earlier run's files stay."""
    if not any(lane.record.losses for task in results.tasks for lane in task.lanes):
        return []
    numbers, curves = out / "results.json", out / "curves.png"
    with _whole(numbers) as path:
        results.write(path)
    with _whole(curves) as path:
        draw(results, path)
    return [f"numbers: {numbers}", f"curves:  {curves}"]


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A path beside `path` that takes its place when written: a process killed amid it leaves no half file.

    In a folder of its own with a name nobody can guess: where others may write, they could have put a link there.
    """
    with tempfile.TemporaryDirectory(prefix=".ampkit-demo-", dir=path.parent) as folder:
        part = Path(folder, path.name)
        yield part
        part.replace(path)


def _parser() -> Parser:
    parser = Parser(
        prog="ampkit demo",
        description="Train on real data in fp32, with torch.amp and with ampkit, side by side.",
        epilog="Results go to --out: results.json has every step, curves.png shows them.",
    )
    parser.add_argument(
        "--model", choices=[*TASKS, "both"], default="both", help="what to train (default: both)"
    )
    parser.add_argument(
        "--dtype",
        choices=[*DTYPES, "auto"],
        default="auto",
        help="of the mixed lanes; auto: fp16 on accelerators, on a CPU fp16 for digits and bf16 for gpt",
    )
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, cuda:1, ... (default: the accelerator, else cpu)"
    )
    steps = ", ".join(f"{task.steps} for {name}" for name, task in TASKS.items())
    parser.add_argument("--steps", type=_positive, help=f"per task (default: {steps})")
    parser.add_argument("--seed", type=_seed, default=0, help="of the weights and the batches (default: 0)")
    parser.add_argument("--out", type=Path, default=Path("ampkit-demo"), help="folder (default: ampkit-demo)")
    return parser


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return value


def _seed(text: str) -> int:
    try:
        return torch.Generator().manual_seed(int(text)).initial_seed()
    except (ValueError, OverflowError, RuntimeError):       # no number, or not one of 64 bits
        raise argparse.ArgumentTypeError(f"expected a whole number of 64 bits, got {text!r}") from None


def _require_extras(parser: Parser, names: list[str]) -> None:
    needed = {"matplotlib": "matplotlib"} | ({"sklearn": "scikit-learn"} if "digits" in names else {})
    missing = [package for module, package in needed.items() if find_spec(module) is None]
    if missing:
        parser.error(f"needs {' and '.join(missing)}; install with: pip install {' '.join(missing)}")


def _usable_device(parser: Parser, text: str) -> torch.device:
    if text == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        device = torch.device(text)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:      # each backend has its own
        reason = str(error).splitlines()[0]
        parser.error(f"argument --device: cannot use {text!r} here ({reason}); try --device cpu")
    return device


def _usable_folder(parser: Parser, folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        parser.error(f"argument --out: cannot write into {str(folder)!r} ({error.strerror})")
    return folder
