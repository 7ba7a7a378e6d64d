"""The `ampkit` command: `doctor` finds faults, `explain` prints each operator's rule, interrupts end quietly."""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ampkit
import ampkit_kernels
from ampkit import doctor, dtype_times
from ampkit.__main__ import COMMANDS, main
from ampkit.dispatch import self_check
from ampkit.dtype_times import DtypeTime

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
    monkeypatch.setattr(dtype_times, "measure", lambda device: timed(1, 5, 0.5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(ampkit_kernels, "why_not_triton", lambda device: "too old")
    for capability, emulated in (((7, 5), True), ((8, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        text = run("doctor")
        assert f"cuda:0: Some GPU, compute capability {capability[0]}.{capability[1]}\n" in text
        assert ("bfloat16 is only emulated here and very slow" in text) is emulated
        assert "  kernels  PyTorch: too old\n" in text
        advice = (
            "train in float16 with a GradScaler: it takes 0.50 of float32's time, and bfloat16 10 times float16's\n"
        )
        assert f"  advice   {advice}" in text


def timed(*milliseconds: float, native: tuple[bool | None, ...] = (True, True, True)) -> list[DtypeTime]:
    """Times of float32, bfloat16 and float16, alike for product and convolution."""
    rows = zip(dtype_times.DTYPES, native, milliseconds, strict=True)
    return [DtypeTime(dtype, known, took, took) for dtype, known, took in rows]


@pytest.mark.parametrize(
    ("times", "best", "says"),
    [
        (
            (1, 0.5, 30),
            "bfloat16",
            "it takes 0.50 of float32's time; float16 is emulated and takes 60 times bfloat16's",
        ),
        ((1, 0.5, 0.5), "bfloat16", "it takes 0.50 of float32's time; float16, with a GradScaler, is as fast"),
        ((1, 8, 0.5), "float16", "it takes 0.50 of float32's time, and bfloat16 16 times float16's"),
        ((1, 2, 40), "float32", "no 16-bit dtype is faster here: bfloat16 takes 2.0 times its time, float16 40 times"),
    ],
)
def test_the_advice_is_the_fastest_dtype(times: tuple[float, ...], best: str, says: str) -> None:
    """On a CPU with AVX-512 BF16, a GPU, an older GPU, and a CPU without 16-bit instructions."""
    measured = timed(*times, native=(True, True, times[2] < 1))
    assert dtype_times.best_dtype(measured) == getattr(torch, best)
    advice = dtype_times.advice(measured)
    assert advice.startswith(f"train in {best}")
    assert advice.endswith(says)


def test_doctor_times_each_dtype_and_prints_json(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least of several calls of the real operators; a device that cannot be timed is no fault of ampkit."""
    dtypes_seen = []
    matmul, convolution = torch.Tensor.__matmul__, torch.nn.functional.conv2d

    def noted(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*args: torch.Tensor, **options: object) -> torch.Tensor:
            dtypes_seen.append((function.__name__, args[0].dtype))
            return function(*args, **options)

        return call

    monkeypatch.setattr(doctor, "CHECKS", {})
    monkeypatch.setattr(torch.Tensor, "__matmul__", noted(matmul))
    monkeypatch.setattr(torch.nn.functional, "conv2d", noted(convolution))
    found = json.loads(run("doctor", "--json"))
    cpu = found["devices"][0]
    assert (found["all_well"], found["torch"]["version"], cpu["device"]) == (True, torch.__version__, "cpu")
    assert [row["dtype"] for row in cpu["dtypes"]] == ["float32", "bfloat16", "float16"]
    assert min(row[key] for row in cpu["dtypes"] for key in ("matmul_ms", "convolution_ms")) > 0
    assert cpu["dtypes"][0]["native"] is True
    assert cpu["advice"].startswith("train in ")
    assert len(dtypes_seen) == 10 * len(set(dtypes_seen)) == 60

    def out_of_memory(device: torch.device) -> None:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(dtype_times, "measure", out_of_memory)
    text = run("doctor")
    assert "  not timed: OutOfMemoryError: no memory left\n" in text
    assert text.endswith("\nall well\n")


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
