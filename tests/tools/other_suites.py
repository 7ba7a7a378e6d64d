"""Run other projects' precision tests with ampkit in torch's place: `make other-suites SOURCES=/folder`.

The folder holds source checkouts of the installed versions, named as in `SUITES`, or some of them; nothing is fetched.
Each suite runs twice, with torch.amp and with ampkit. Exit code 1 where a test fails with ampkit alone and is not
listed, or is listed and does not, and where no test made a region or a scaler of ampkit's. Compared last: torch 2.13.0
on a CPU (its scaler's tests in the form that torch 2.4 has them), Lightning 2.6.5, Accelerate 1.15.0.dev0.
"""

import os
import subprocess
import sys
import tempfile
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

CLASSES = ("autocast", "GradScaler")
TOOLS = Path(__file__).parent
ROOT = TOOLS.parents[1]


class Suite(NamedTuple):
    """Tests of one project that concern mixed precision."""

    folder: str  # inside the checkout; pytest runs there
    path: str  # for PYTHONPATH, inside the checkout
    arguments: str  # pytest's
    expected: dict[str, str]  # pattern of "module.Class::test" -> why it fails with ampkit alone
    chosen: str = ""  # pytest's -k


SUITES = {
    "pytorch": Suite(
        "test",
        "test",
        "test_autocast.py test_torch.py test_cuda.py",
        {
            "*TestTorchAutocast::test_autocast_called_with_non_callable": "a TypeError as torch's, in our words",
            "*TestTorchAutocast::test_non_string_device": "a ValueError as torch's, in our words",
        },
        chosen="autocast or grad_scal or gradscaler",
    ),
    "lightning": Suite(
        "tests",
        "tests",
        "tests_pytorch/plugins/precision/test_amp.py tests_pytorch/plugins/test_amp_plugins.py "
        "tests_pytorch/plugins/precision/test_amp_integration.py tests_pytorch/models/test_amp.py "
        "tests_fabric/plugins/precision/test_amp.py tests_fabric/plugins/precision/test_amp_integration.py",
        {
            "tests_fabric*test_amp::test_amp_precision_default_scaler": (
                "a scaler on device=Mock(): torch accepts any object, ampkit asks torch.device"
            ),
        },
    ),
    "accelerate": Suite(
        ".",
        "src",
        "tests/test_accelerator.py tests/test_kwargs_handlers.py tests/test_optimizer.py "
        "tests/test_scheduler.py tests/test_utils.py",
        {},
    ),
}


def run(suite: Suite, checkout: Path, *plugin: str) -> tuple[set[str], dict[str, int]]:
    """The tests that fail, or cannot be collected, and in how many tests the plugin's classes were made.

    Raises `FileNotFoundError` where pytest did not finish.
    """
    paths = (checkout / suite.path, TOOLS, ROOT, ROOT / "kernels")
    settings = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(map(str, paths))}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                "-p",
                "no:xdist",
                f"--junitxml={report}",
                "--continue-on-collection-errors",
                "-k",
                suite.chosen,
                *plugin,
                *suite.arguments.split(),
            ],
            cwd=checkout / suite.folder,
            env=os.environ | settings,
            check=False,
        )
        tree = ElementTree.parse(report)
    failed = {
        f"{case.get('classname')}::{case.get('name')}"
        for case in tree.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    }
    suites = tree.getroot().iterfind("testsuite/properties/property")
    return failed, {found.attrib["name"]: int(found.attrib["value"]) for found in suites}


def main(sources: Path) -> int:
    """Run the suites whose checkouts are there; print what differs. Returns the exit code."""
    differs = []
    for name, suite in SUITES.items():
        checkout = sources.resolve() / name
        if checkout.is_dir():
            with_ampkit, made = run(suite, checkout, "-p", "as_torch_amp")
            ours = with_ampkit - run(suite, checkout)[0]
            print(f"{name}: tests that made {made or 'nothing'} of ampkit's")
            differs += [f"{name}: no test made ampkit's {kind}" for kind in CLASSES if not made.get(kind)]
            listed = {pattern: [test for test in ours if fnmatchcase(test, pattern)] for pattern in suite.expected}
            differs += [f"{name}: not expected to fail: {test}" for test in sorted(ours.difference(*listed.values()))]
            differs += [f"{name}: expected to fail: {pattern}" for pattern, found in listed.items() if not found]
    print("\n".join(differs or ["what differs is listed"]))
    return int(bool(differs))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
