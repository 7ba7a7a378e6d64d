"""`python -m benchmarks.gpu COMMAND`: checks, measure, tune, report; `--dry-run` rehearses on the CPU."""

import argparse
import sys
from pathlib import Path

import torch

COMMANDS = ("checks", "small-checks", "measure", "tune", "report")


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--out", type=Path, default=Path("out/gpu"), help="folder for results")
    parser.add_argument("--seconds", type=float, default=150.0, help="stop measuring after this long")
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
    if options.command.endswith("checks"):
        from . import checks, cuda_checks, training_checks

        registry = dict(checks.CHECKS)
        if options.command == "small-checks":  # what a memory checker can get through
            registry = {
                name: registry[name] for name in ("unscale_every_half_pattern", "multiply_on_the_device")
            }
        elif not options.dry_run:
            registry |= {**cuda_checks.CHECKS, **training_checks.CHECKS}
        results = checks.run(device, registry, options.out / f"{options.command}.json")
        return 1 if any(results.values()) else 0
    if options.command == "measure":
        from .measure import measure

        measure(options.out, device, options.dry_run, options.seconds)
    else:
        from .tune import tune

        tune(options.out, device, options.dry_run, options.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
