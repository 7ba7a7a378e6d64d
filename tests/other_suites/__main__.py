"""Run other projects' precision tests with ampkit in torch's place: `make other-suites SOURCES=/folder`.

The folder holds source checkouts named `pytorch`, `lightning` and `accelerate`, of the installed versions; or some of
them. Nothing is fetched. Each suite runs twice, with torch.amp and with ampkit. What fails with ampkit alone has to be
in expected.toml with its reason. Exit code 1 where another test fails, or one that is listed there passes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
EXPECTED = Path(__file__).with_name("expected.toml")


class Suite(NamedTuple):
    """The tests of one project that speak of precision."""

    folder: str                         # inside the checkout; pytest runs there
    files: tuple[str, ...]
    chosen: str = ""                    # pytest's -k
    path: str = ""                      # folders for PYTHONPATH, inside the checkout


SUITES = {
    "pytorch": Suite(
        "test", ("test_autocast.py", "test_torch.py", "test_cuda.py"), "autocast or grad_scal or gradscaler"
    ),
    "lightning": Suite(
        "tests",
        ("tests_pytorch/plugins/precision/test_amp.py", "tests_pytorch/plugins/precision/test_amp_integration.py",
         "tests_pytorch/plugins/test_amp_plugins.py", "tests_pytorch/models/test_amp.py",
         "tests_fabric/plugins/precision/test_amp.py", "tests_fabric/plugins/precision/test_amp_integration.py"),
        path="tests",
    ),
    "accelerate": Suite(
        ".", ("tests/test_accelerator.py", "tests/test_kwargs_handlers.py", "tests/test_optimizer.py",
              "tests/test_scheduler.py", "tests/test_utils.py"), path="src",
    ),
}


def outcomes(suite: Suite, checkout: Path, *, shim: bool, limit: float) -> dict[str, str]:
    """Test id -> "passed", "skipped" or "failed". `RuntimeError` with pytest's last words where it did not finish."""
    files = [file for file in suite.files if (checkout / suite.folder / file).exists()]
    paths = [checkout / suite.path, Path(__file__).parent, ROOT, ROOT / "kernels"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "outcomes.json"
        settings = {
            "AMPKIT_SHIM": str(int(shim)), "AMPKIT_OUTCOMES": str(report), "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "ampkit_shim", "-p", "no:cacheprovider",
                   "-p", "no:xdist", "--continue-on-collection-errors", *files]
        command += ["-k", suite.chosen] if suite.chosen else []
        ran = subprocess.run(
            command, cwd=checkout / suite.folder, env={**os.environ, **settings}, capture_output=True, text=True,
            timeout=limit,
        )
        if not report.exists():
            raise RuntimeError(f"pytest ended with {ran.returncode}:\n{(ran.stdout + ran.stderr)[-2000:]}")
        return json.loads(report.read_text(encoding="utf-8"))


def compare(ours: dict[str, str], torchs: dict[str, str], reasons: dict[str, str]) -> tuple[list[str], list[str]]:
    """The tests that fail with ampkit alone and are not listed; the patterns listed that match no such test."""
    failed = [test for test, outcome in ours.items() if outcome == "failed" and torchs.get(test) != "failed"]
    new = [test for test in failed if not any(fnmatchcase(test, pattern) for pattern in reasons)]
    gone = [pattern for pattern in reasons if not any(fnmatchcase(test, pattern) for test in failed)]
    return new, gone


def main() -> int:
    """Run the suites whose checkouts are there; print what differs. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="make other-suites", description=__doc__.partition("\n")[0])
    parser.add_argument("sources", type=Path, metavar="SOURCES", help="folder with the checkouts")
    parser.add_argument("--suite", choices=SUITES, help="only this one")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds for one run of a suite")
    options = parser.parse_args()
    expected = tomllib.loads(EXPECTED.read_text(encoding="utf-8"))
    code = 0
    for name, suite in SUITES.items():
        checkout = options.sources.resolve() / name
        if options.suite not in (None, name) or not checkout.is_dir():
            continue
        torchs = outcomes(suite, checkout, shim=False, limit=options.limit)
        ours = outcomes(suite, checkout, shim=True, limit=options.limit)
        new, gone = compare(ours, torchs, expected.get(name, {}))
        counts = {kind: list(ours.values()).count(kind) for kind in ("passed", "skipped", "failed")}
        also = sum(outcome == "failed" and ours.get(test) == "failed" for test, outcome in torchs.items())
        print(f"{name}: {counts['passed']} passed, {counts['skipped']} skipped, {counts['failed']} failed "
              f"({also} of them with torch too)")
        for test in new:
            print(f"  not expected to fail: {test}")
        for pattern in gone:
            print(f"  expected to fail, and does not: {pattern}")
        code = code or int(bool(new or gone))
    return code


if __name__ == "__main__":
    sys.exit(main())
