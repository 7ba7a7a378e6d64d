"""`python -m tests.gpu_checks --out FOLDER`: every check on the GPU, without pytest, going on after a lost device.

`tests/kernels/test_operations.py` runs the same under pytest. `--small` takes what a memory checker gets through in a
minute; `--dry-run` rehearses those that need no CUDA in Triton's interpreter.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from benchmarks.device import LOST, DeviceLostError, must_answer
from tests.gpu_checks import cuda_only, operations, tools, training
from tests.gpu_checks.tools import Check

NOT_RUN = "not run"
# The most telling first.
SMALL = (
    "unscale_into_at_any_address", "norms_against_float64", "adamw_steps_within_an_ulp", "sgd_steps_within_an_ulp",
    "unscale_and_multiply_at_any_address", "every_half_pattern",
)


def main(argv: list[str] | None = None) -> int:
    """Exit code 0; 1 if a check failed, 2 without a GPU, `LOST` where the device answers no more."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_checks", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/gpu"), help="folder for results")
    parser.add_argument("--small", action="store_true", help="few and short: for a memory checker")
    parser.add_argument("--resume", action="store_true", help="go on where a run was cut off")
    parser.add_argument("--dry-run", action="store_true", help="tiny lists on the CPU: rehearses the script")
    options = parser.parse_args(argv)
    if not options.dry_run and not torch.cuda.is_available():
        print("no CUDA device: --dry-run rehearses on the CPU", file=sys.stderr)
        return 2
    device = torch.device("cpu") if options.dry_run else torch.device("cuda", torch.cuda.current_device())
    chosen = dict(operations.CHECKS)
    if options.small:
        del tools.LONG[0]
        chosen = {name: chosen[name] for name in SMALL}
    elif not options.dry_run:
        chosen |= {**cuda_only.CHECKS, **training.CHECKS}
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / ("small-checks.json" if options.small else "checks.json")
    try:
        results = run(device, chosen, path, options.resume)
    except DeviceLostError as error:
        print(error, file=sys.stderr)
        return LOST
    return int(any(results.values()))


def run(
    device: torch.device, registry: Mapping[str, Check], path: Path | None = None, resume: bool = False
) -> dict[str, str | None]:
    """Run every check; None for one that passed, else what was wrong.

    The results go to `path` as they come. A check that hangs or ends the process is there as "did not finish" and those
    after it as "not run"; with `resume` these, and no others, are run. Raises `DeviceLostError`, everything written,
    where a check has left the device unusable.
    """
    results: dict[str, str | None] = dict.fromkeys(registry, NOT_RUN)
    if resume and path is not None and path.exists():
        results |= json.loads(path.read_text())

    def save() -> None:
        if path is not None:
            path.write_text(json.dumps(results, indent=2))

    for name, function in registry.items():
        if results[name] != NOT_RUN:
            continue
        results[name] = "did not finish"
        save()
        torch.manual_seed(0)
        try:
            function(device)
            must_answer(device)
            results[name] = None
        except Exception as error:  # each check reports for itself
            results[name] = f"{type(error).__name__}: {error}"
        print(f"{'ok  ' if results[name] is None else 'FAIL'}  {name}  {results[name] or ''}", flush=True)
        save()
        if results[name] is not None:
            must_answer(device)
    return results


if __name__ == "__main__":
    sys.exit(main())
