"""The `ampkit` command: `doctor` finds faults, `explain` prints each operator's rule, interrupts end quietly."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ampkit
import ampkit_kernels
from ampkit import doctor
from ampkit.__main__ import COMMANDS, main
from ampkit.engine import self_check

Run = Callable[..., str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command and return what it printed on both streams; the exit code has to be the expected one."""

    def run(*arguments: str, code: int = 0) -> str:
        assert main(list(arguments)) == code
        printed = capsys.readouterr()
        return printed.out + printed.err

    return run


def test_doctor_reports_versions_torch_and_every_operation(run: Run) -> None:
    text = run("doctor")
    assert text.startswith(f"ampkit {ampkit.__version__}, Python 3.")
    assert f"torch {torch.__version__}; supported are torch 2.11 to 2.15\n  ok       autocast\n" in text
    assert [operation for operation in doctor.CHECKS if f"  ok       {operation}\n" not in text] == [], text
    assert text.endswith("\nall well\n")


def test_doctor_notices_a_wrong_result_and_an_exception(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(ampkit.GradScaler, "clip_grad_norm_", lambda self, optimizer, norm: self.unscale_(optimizer))
    monkeypatch.setattr(ampkit.optim.AdamW, "step", broken)
    text = run("doctor", code=1)
    assert "FAIL     unscale, clip and skip: differs from float64 by" in text
    assert "FAIL     AdamW step: RuntimeError: no kernel image" in text
    assert text.endswith("\nsomething is wrong: see above\n")


def test_doctor_lets_the_self_check_decide_for_a_newer_torch(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    """An old one is refused; what a torch lacks is named."""
    monkeypatch.setattr(doctor, "CHECKS", {})
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    text = run("doctor")
    assert "2.99.0; supported are torch 2.11 to 2.15; this one is newer and untested" in text
    assert "to install a supported one: python -m pip install 'torch>=2.11,<2.16'" in text
    monkeypatch.setattr(self_check, "fault", lambda: "a cast is lost")
    assert "FAIL     autocast: a cast is lost" in run("doctor", code=1)
    monkeypatch.setattr(torch, "__version__", "2.10.1")
    assert "; this one is too old" in run("doctor", code=1)


def test_doctor_says_where_bfloat16_is_emulated_and_why_triton_is_not_used(
    monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    """On a T4 or V100 `torch.cuda.is_bf16_supported()` is True, and each bfloat16 product takes many times as long."""
    monkeypatch.setattr(doctor, "devices", lambda: [torch.device("cuda", 0)])
    monkeypatch.setattr(doctor, "CHECKS", {})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(ampkit_kernels, "why_not_triton", lambda device: "too old")
    for capability, emulated in (((7, 5), True), ((8, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        text = run("doctor")
        assert f"cuda:0: Some GPU, compute capability {capability[0]}.{capability[1]}\n" in text
        assert ("bfloat16 is only emulated here and very slow" in text) is emulated
        assert "  kernels  PyTorch: too old\n" in text


def test_explain(run: Run) -> None:
    assert "aten::softmax.int: FLOAT32_DTYPE_ARG (set by torch)" in run("explain", "softmax")
    assert "under Policy.torch:\naten::softmax.int: DECOMPOSE" in run("explain", "aten::softmax.int", "--device", "cpu")
    every = run("explain")
    assert "aten::linear: LOWER (set by torch)" in every
    assert "aten::binary_cross_entropy: BANNED (set by torch)" in every
    assert "unknown operator 'nosuch'" in run("explain", "nosuch", code=2)
    assert "no operator lists for device type 'toaster'" in run("explain", "mm", "--device", "toaster", code=2)


def test_help_version_and_an_unknown_command(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    listed = run()
    for name, (module, what) in COMMANDS.items():
        assert f"  {name:10s}{what}" in listed
        assert callable(importlib.import_module(module).main)
    assert run("--version") == f"ampkit {ampkit.__version__}, torch {torch.__version__}\n"
    for arguments, said in ((["tune"], "invalid choice: 'tune'"), (["doctor", "--help"], "usage: ampkit doctor")):
        with pytest.raises(SystemExit):
            main(arguments)
        printed = capsys.readouterr()
        assert said in printed.out + printed.err


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (BrokenPipeError, 141)])
def test_a_command_that_is_cut_off_ends_without_a_traceback(
    error: type[BaseException], code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ctrl-C, also while its module is imported, and a reader such as `head` that has seen enough."""

    def cut_off(name: str) -> None:
        raise error

    with open(tmp_path / "out", "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(importlib, "import_module", cut_off)
        assert main(["doctor"]) == code
