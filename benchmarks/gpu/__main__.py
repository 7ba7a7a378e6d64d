"""`python -m benchmarks.gpu COMMAND`: checks, measure, tune, report; `--dry-run` rehearses on the CPU."""

import argparse
import sys
from pathlib import Path

import torch

from .device import LOST, DeviceLostError

COMMANDS = ("checks", "small-checks", "measure", "tune", "report")
# What a memory checker, which slows everything down many times, gets through in a minute; the most telling first.
SMALL_CHECKS = (
    "multiply_on_the_device", "unscale_into_equals_the_reference", "norms_against_float64",
    "adamw_steps_follow_float64", "sgd_steps_follow_float64", "unscale_every_half_pattern",
)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--out", type=Path, default=Path("out/gpu"), help="folder for results")
    parser.add_argument("--seconds", type=float, default=150.0, help="stop measuring after this long")
    parser.add_argument("--resume", action="store_true", help="go on where a run was cut off: checks, measure")
    parser.add_argument("--dry-run", action="store_true", help="tiny lists on the CPU: rehearses the script")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.command == "report":
        from . import report

        return report.write(options.out)
    if not options.dry_run and not torch.cuda.is_available():
        print("no CUDA device: --dry-run rehearses on the CPU", file=sys.stderr)
        return 2
    device = torch.device("cpu") if options.dry_run else torch.device("cuda", torch.cuda.current_device())
    try:
        return _run(options, device)
    except DeviceLostError as error:
        print(error, file=sys.stderr)
        return LOST


def _run(options: argparse.Namespace, device: torch.device) -> int:
    if options.command.endswith("checks"):
        from . import checks, cuda_checks, training_checks

        registry = dict(checks.CHECKS)
        if options.command == "small-checks":
            checks.LONG = checks.LONG[1:]
            registry = {name: registry[name] for name in SMALL_CHECKS}
        elif not options.dry_run:
            registry |= {**cuda_checks.CHECKS, **training_checks.CHECKS}
        results = checks.run(device, registry, options.out / f"{options.command}.json", options.resume)
        return 1 if any(results.values()) else 0
    if options.command == "measure":
        from .measure import measure

        measure(options.out, device, options.dry_run, options.seconds, options.resume)
    else:
        from .tune import tune

        tune(options.out, device, options.dry_run, options.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
