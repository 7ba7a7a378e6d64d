"""The `ampkit` command: `doctor` finds problems, `explain` prints each operator's rule, interrupts end quietly."""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ampkit
import ampkit_kernels
from ampkit import doctor
from ampkit.__main__ import COMMANDS, main
from ampkit.dispatch import self_check
from ampkit.doctor import FormatTime

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
    assert "FAIL     unscale, clip and skip: differs from the expected result by" in text
    assert "FAIL     AdamW step: RuntimeError: no kernel image" in text
    assert text.endswith("\na check failed: see above\n")


def test_doctor_lets_the_self_check_decide_for_a_newer_torch(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    """An old one is refused; what a torch lacks is named."""
    monkeypatch.setattr(doctor, "CHECKS", {})
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    text = run("doctor")
    assert "2.99.0; supported are torch 2.11 to 2.15; this one is newer and untested" in text
    assert "to install a supported one: python -m pip install 'torch>=2.11,<2.16'" in text
    monkeypatch.setattr(self_check, "problem", lambda: "a cast is lost")
    assert "FAIL     autocast: a cast is lost" in run("doctor", code=1)
    monkeypatch.setattr(torch, "__version__", "2.10.1")
    assert "; this one is too old" in run("doctor", code=1)


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]) -> None:
    """Have the doctor find one GPU, without checks and with given times."""
    monkeypatch.setattr(doctor, "devices", lambda: [torch.device("cuda", 0)])
    monkeypatch.setattr(doctor, "CHECKS", {})
    monkeypatch.setattr(doctor, "measure", lambda device: timed(1, 5, 0.5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(ampkit_kernels, "why_not_triton", lambda device: "too old")


@pytest.mark.parametrize(("capability", "emulated"), [((7, 5), True), ((8, 0), False)])
def test_doctor_says_where_bfloat16_is_emulated_whether_tf32_is_allowed_and_why_triton_is_not_used(
    capability: tuple[int, int], emulated: bool, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    """On a T4 or V100 `torch.cuda.is_bf16_supported()` is True, and each bfloat16 product takes many times as long."""
    on_a_gpu(monkeypatch, "Tesla T4", capability)
    text = run("doctor")
    assert f"cuda:0: Tesla T4, compute capability {capability[0]}.{capability[1]}\n" in text
    assert ("bfloat16 is only emulated here and very slow" in text) is emulated
    tf32 = "TF32 is off in float32 matrix products and is allowed in convolutions: torch.backends.cuda.matmul.fp32_prec"
    assert (tf32 in text) is not emulated
    assert "  kernels  PyTorch: too old\n" in text
    assert "  train in float16 with a GradScaler: it takes 0.50x as long as float32; bfloat16 takes 10x as long" in text


@pytest.mark.parametrize(
    "name", ["NVIDIA GeForce GTX 1660 Ti", "NVIDIA GeForce GTX 1650", "Quadro T2000", "NVIDIA T600"]
)
def test_doctor_warns_of_cards_that_compute_float16_wrongly(
    name: str, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    on_a_gpu(monkeypatch, name, (7, 5))
    assert "  train in float32: float16 convolutions can give NaN on this series" in run("doctor")


@pytest.mark.parametrize(("operator", "checked"), [("__matmul__", "matrix product"), ("conv2d", "convolution")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_doctor_notices_wrong_16_bit_results(
    operator: str, checked: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    """As GTX 16 cards give: NaN in some elements."""
    owner: Any = torch.Tensor if operator == "__matmul__" else torch.nn.functional
    right = getattr(owner, operator)

    def wrong(*args: torch.Tensor, **options: Any) -> torch.Tensor:
        result = right(*args, **options)
        return result.masked_fill(result > result.max() / 2, torch.nan) if result.dtype is dtype else result

    monkeypatch.setattr(doctor, "measure", lambda device: timed(1, 1, 1))
    monkeypatch.setattr(owner, operator, wrong)
    failed = [line for line in run("doctor", code=1).splitlines() if line.startswith("  FAIL")]
    name = f"{str(dtype).removeprefix('torch.')} {checked}"
    assert [line.split(", allowed")[0] for line in failed] == [
        f"  FAIL     {name}: differs from the expected result by nan"
    ]


def timed(*milliseconds: float, native: tuple[bool | None, ...] = (True, True, True)) -> dict[str, FormatTime]:
    """Times of float32, bfloat16 and float16, alike for product and convolution."""
    rows = zip(("float32", "bfloat16", "float16"), native, milliseconds, strict=True)
    return {name: FormatTime(known, took, took) for name, known, took in rows}


def test_tf32_is_timed_where_it_exists_and_float32_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[tuple[str, str], int] = {}
    switches = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)
    before = [switch.fp32_precision for switch in switches]

    def noted(job: Callable[[], object], device: torch.device) -> float:
        key = tuple(switch.fp32_precision for switch in switches)
        seen[key] = seen.get(key, 0) + 1
        return 1.0

    monkeypatch.setattr(doctor, "_timed", noted)
    monkeypatch.setattr(doctor, "_jobs", lambda device, dtype: (lambda: None, lambda: None))
    for capability, formats in (((7, 5), 3), ((8, 0), 4)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        times = doctor.measure(torch.device("cuda", 0), repeats=1)
        assert ("TF32" in times, len(times)) == (formats == 4, formats)
        assert seen.pop(("ieee", "ieee")) == 12
        assert seen.pop(("tf32", "tf32"), 0) == (4 if formats == 4 else 0)
        assert not seen
    assert [switch.fp32_precision for switch in switches] == before


@pytest.mark.parametrize(
    ("times", "best", "says"),
    [
        (
            (1, 0.5, 30),
            "bfloat16",
            "it takes 0.50x as long as float32; float16 is emulated and takes 60x as long as bfloat16",
        ),
        ((1, 0.5, 0.5), "bfloat16", "it takes 0.50x as long as float32; float16, with a GradScaler, is as fast"),
        ((1, 8, 0.5), "float16", "it takes 0.50x as long as float32; bfloat16 takes 16x as long as float16"),
        ((1, 2, 40), "float32", "no 16-bit dtype is faster here: bfloat16 takes 2.0x as long, float16 40x"),
    ],
)
def test_the_recommendation_is_the_fastest_dtype(times: tuple[float, ...], best: str, says: str) -> None:
    """On a CPU with AVX-512 BF16, a GPU, an older GPU, and a CPU without 16-bit instructions."""
    measured = timed(*times, native=(True, True, times[2] < 1))
    assert doctor.best_dtype(measured) == getattr(torch, best)
    text = doctor.recommendation(measured)
    assert text.startswith(f"train in {best}")
    assert text.endswith(says)


def test_doctor_times_each_dtype_and_prints_json(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least of several calls of the real operators; a device that cannot be timed is not a problem of ampkit."""
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
    assert cpu["recommendation"].startswith("train in ")
    assert len(dtypes_seen) == 10 * len(set(dtypes_seen)) == 60

    def out_of_memory(device: torch.device) -> None:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(doctor, "measure", out_of_memory)
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
