"""The scaler's examples run, and show what they say they show."""

import importlib.util
import re
from types import ModuleType

from tests.helpers.paths import EXAMPLES
from tests.helpers.processes import torchrun
from tests.helpers.ranks import on_ranks, run_script


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_basic() -> None:
    assert load("scaler_basic").main() < 4.0


def test_two_losses() -> None:
    seen = load("scaler_two_losses").main()
    assert seen["steps"] == 40
    assert seen["score"] < 1.0


def test_accumulation() -> None:
    assert load("scaler_accumulation").main() < 4.0


def test_gradient_penalty() -> None:
    assert load("scaler_gradient_penalty").main() < 6.0


def test_clipping(capsys) -> None:
    scaler = load("scaler_clipping").main()
    assert scaler.stats().skips >= 1
    said = "step 6 was skipped:\nfinite down to 2.bias; first bad: 2.weight\n  2.weight: 0 inf, 1 NaN of 32 (float32)"
    assert said in capsys.readouterr().out


def test_gan() -> None:
    assert load("scaler_gan").main() == {"updates": 40, "steps": 40}


def test_resume_from_torch() -> None:
    ours, theirs = load("scaler_resume_from_torch").main()
    assert ours == theirs == 2.0**19


def test_ddp_under_torchrun() -> None:
    """As a user starts it."""
    assert_alike(torchrun(EXAMPLES / "scaler_ddp.py", ranks=2), r"rank (\d): 1 skipped, scale 512, (weights -?[\d.]+)")


def test_fsdp() -> None:
    printed = "".join(on_ranks(run_script, EXAMPLES / "scaler_fsdp.py"))
    assert_alike(printed, r"rank (\d): 1 skipped, scale 512, (norm [\d.]+)")


def assert_alike(printed: str, pattern: str) -> None:
    """Both ranks end with the same figures."""
    seen = dict(re.findall(pattern, printed))
    assert set(seen) == {"0", "1"}, printed
    assert seen["0"] == seen["1"]
