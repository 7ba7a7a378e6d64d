"""`ampkit doctor`: formats that this machine can run, how fast, the implementations used, and whether they are right.

Prints versions, whether autocast works with this PyTorch version, and for each device the time of a matrix product and
of a convolution in each format, the format to train in, and the implementation that `impl="auto"` selects.
Then it compares 16-bit products with float32 ones, and a few steps on small tensors with float64. `--json` prints the
same for programs. The exit code is 1 if torch is too old, autocast does not work, or a result is wrong, otherwise 0.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

import ampkit
import ampkit_kernels as kernels
from ampkit.dispatch import self_check
from ampkit.matmul.float8_matmul import lacks_float8
from ampkit.text_tables import table
from ampkit.torch_private import INSTALL, NEWEST, OLDEST, SUPPORTED, parsed

Comparison = tuple[Tensor, Tensor, float]  # the result, the expected result, and the allowed absolute difference

FORMATS = {"float32": torch.float32, "TF32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Instructions that multiply in a 16-bit type, by their names in `torch.cpu.get_capabilities`.
CPU_INSTRUCTIONS = {
    "bfloat16": ("avx512_bf16", "amx_bf16", "avx10_2", "bf16", "sve_bf16"),
    "float16": ("avx512_fp16", "amx_fp16", "avx10_2", "fp16_arith"),
}
# Compute capabilities from which an NVIDIA GPU multiplies in a format on its tensor cores.
CUDA_CAPABILITIES = {"TF32": (8, 0), "bfloat16": (8, 0), "float16": (7, 0)}
# Turing GPUs without tensor cores, whose float16 convolutions give NaN in some shapes: pytorch issues 58123 and 77955
# (GTX 16), 59515 (Quadro T2000). Ultralytics' check_amp refuses the same series.
WRONG_FLOAT16 = re.compile(r"\bGTX 16\d0\b|\bT(400|500|550|600|1000|1200|2000)\b")
_CUDNN: Any = torch.backends.cudnn  # type checkers find only some of its attributes
FLOAT32_SWITCHES = (torch.backends.cuda.matmul, _CUDNN.conv)  # by their `fp32_precision` CUDA computes in TF32 or not
FASTER = 0.9  # a 16-bit type is faster if it takes at most this share of float32's time
AS_FAST = 1.1  # two 16-bit types are equally fast if one takes at most this multiple of the other's time


@dataclass(frozen=True)
class FormatTime:
    """The milliseconds of a matrix product and a convolution in one format.

    Attributes:
        native: whether the device has instructions for it; otherwise they are emulated. None if that is unknown.
        matmul_ms: least time of a matrix product.
        convolution_ms: least time of a convolution.
    """

    native: bool | None
    matmul_ms: float
    convolution_ms: float

    def times(self, other: FormatTime) -> float:
        """Return this format's time as a multiple of another's, the geometric mean of product and convolution."""
        return math.sqrt(self.matmul_ms / other.matmul_ms * self.convolution_ms / other.convolution_ms)


def main(argv: list[str] | None = None) -> int:
    """Print the report. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="ampkit doctor", description="Report what this machine can run.")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    as_json = parser.parse_args(argv).json
    found = report()
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        for line in _lines(found):
            print(line)
    return 0 if found["all_well"] else 1


def report() -> dict[str, Any]:
    """Return the contents of `--json`: numbers, strings, lists and None, which stands for no problem."""
    torch_report, device_reports = _torch(), [_device(device) for device in devices()]
    problems = [
        torch_report["autocast"],
        *(problem for found in device_reports for problem in found["checks"].values()),
    ]
    all_well = parsed(torch.__version__) >= OLDEST and not any(problems)
    versions = {"ampkit": ampkit.__version__, "python": platform.python_version(), "threads": torch.get_num_threads()}
    return {**versions, "torch": torch_report, "devices": device_reports, "all_well": all_well}


def devices() -> list[torch.device]:
    """Return the CPU, every CUDA device, and the GPU of a Mac."""
    cuda = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return [torch.device("cpu"), *cuda, *([torch.device("mps")] if torch.backends.mps.is_available() else [])]


def _torch() -> dict[str, Any]:
    """Return versions, and whether autocast works. For versions newer than the tested ones, the self-check decides."""
    version = parsed(torch.__version__)
    try:
        problem = self_check.problem()
    except RuntimeError as error:
        problem = str(error)
    tested = OLDEST <= version <= NEWEST
    return {"version": torch.__version__, "supported": SUPPORTED, "tested": tested, "autocast": problem}


def _device(device: torch.device) -> dict[str, Any]:
    """Return the device, its times in each format, the kernels' implementation, and whether results are right."""
    missing_float8 = lacks_float8(device)  # the reason, if the device has no FP8
    found: dict[str, Any] = {"device": str(device), "name": platform.processor() or platform.machine(), "remarks": []}
    if device.type == "cpu":
        found["name"] = torch.cpu.get_capabilities().get("cpu_name") or found["name"]
        found["kernels"] = "PyTorch: CPU tensors take PyTorch's own operators"
        found["float8"] = "emulated by PyTorch's CPU operators: for tests, not for speed"
    else:
        reason = kernels.why_not_triton(device)
        found["kernels"] = f"PyTorch: {reason}" if reason else "Triton, fused over lists of tensors"
        follows = f"none, FP8 rules follow LOWER: {missing_float8}"
        found["float8"] = follows if missing_float8 else "computed by the tensor cores"
    found |= _times(device)
    if device.type == "cuda":
        name, (major, minor) = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        found["name"] = f"{name}, compute capability {major}.{minor}"
        found["remarks"] = list(_remarks((major, minor)))
        if (major, minor) == (7, 5) and WRONG_FLOAT16.search(name):
            found["recommendation"] = (
                "train in float32: float16 convolutions can give NaN on this series "
                "(github.com/pytorch/pytorch/issues/77955)"
            )
    checks = {name: check for name, check in CHECKS.items() if check is not _float8 or not missing_float8}
    return found | {"checks": {name: _problem(check, device) for name, check in checks.items()}}


def _remarks(capability: tuple[int, int]) -> Iterator[str]:
    """Yield the facts about a CUDA device that its times do not show."""
    if torch.version.hip is not None:
        return
    if capability < CUDA_CAPABILITIES["bfloat16"]:
        yield "bfloat16 is only emulated here and very slow"
    else:
        matmul, conv = (switch.fp32_precision for switch in FLOAT32_SWITCHES)
        words = {True: "is allowed", False: "is off"}
        yield (
            f"TF32 {words[matmul == 'tf32']} in float32 matrix products and {words[conv == 'tf32']} in convolutions: "
            f"torch.backends.cuda.matmul.fp32_precision is {matmul!r}, ...cudnn.conv.fp32_precision is {conv!r}"
        )


def _times(device: torch.device) -> dict[str, Any]:
    """Return times in each format, and a recommendation; the reason if the measurement fails."""
    try:
        times = measure(device)
    except (RuntimeError, AssertionError) as error:  # such as too little memory: not a reason to distrust ampkit
        return {"dtypes": [], "recommendation": None, "not_timed": f"{type(error).__name__}: {error}"}
    rows = [{"dtype": name} | asdict(took) for name, took in times.items()]
    return {"dtypes": rows, "recommendation": recommendation(times), "not_timed": None}


# --- times


def measure(device: torch.device, repeats: int = 9) -> dict[str, FormatTime]:
    """Time a matrix product and a convolution in each format; waits for the device.

    Args:
        device: The device to measure.
        repeats: Number of calls of each, taken in turns with the other formats; the least time counts.

    Returns:
        The times of "float32", "bfloat16" and "float16", and of "TF32" on GPUs that have it.
    """
    names = [name for name in FORMATS if name != "TF32" or (device.type == "cuda" and is_native(device, "TF32"))]
    jobs = {name: _jobs(device, FORMATS[name]) for name in names}
    times: dict[tuple[str, int], list[float]] = {}
    for turn in range(repeats + 1):
        for name, pair in jobs.items():
            with _float32_computed_in("tf32" if name == "TF32" else "ieee"):
                for index, job in enumerate(pair):
                    milliseconds = _timed(job, device)
                    if turn:  # the first call warms up
                        times.setdefault((name, index), []).append(milliseconds)
    return {name: FormatTime(is_native(device, name), min(times[name, 0]), min(times[name, 1])) for name in names}


def is_native(device: torch.device, name: str) -> bool | None:
    """Return whether a device has instructions that multiply in a format; None if that is unknown."""
    if name == "float32":
        return True
    if device.type == "cpu":
        capabilities = torch.cpu.get_capabilities()
        return any(capabilities.get(instruction, False) for instruction in CPU_INSTRUCTIONS[name])
    if device.type == "cuda":
        if torch.version.hip is not None:
            return name != "TF32"
        return torch.cuda.get_device_capability(device) >= CUDA_CAPABILITIES[name]
    return None


def best_dtype(times: Mapping[str, FormatTime]) -> torch.dtype:
    """Return the dtype to train in: the fastest, float32 unless a 16-bit type is faster, bfloat16 if both are alike."""
    single, bfloat16, float16 = times["float32"], times["bfloat16"], times["float16"]
    if min(bfloat16.times(single), float16.times(single)) > FASTER:
        return torch.float32
    return torch.bfloat16 if bfloat16.times(float16) <= AS_FAST else torch.float16


def recommendation(times: Mapping[str, FormatTime]) -> str:
    """Return one sentence on the dtype to train in, with the ratios that support it."""
    single, bfloat16, float16 = times["float32"], times["bfloat16"], times["float16"]
    best = best_dtype(times)
    if best == torch.float32:
        ratios = f"bfloat16 takes {_ratio(bfloat16, single)} as long, float16 {_ratio(float16, single)}"
        return f"train in float32; no 16-bit dtype is faster here: {ratios}"
    if best == torch.float16:
        other = f"bfloat16 takes {_ratio(bfloat16, float16)} as long as float16"
        return f"train in float16 with a GradScaler: it takes {_ratio(float16, single)} as long as float32; {other}"
    if float16.times(bfloat16) <= AS_FAST:
        other = "float16, with a GradScaler, is as fast"
    else:
        emulated = "is emulated and " if float16.native is False else ""
        other = f"float16 {emulated}takes {_ratio(float16, bfloat16)} as long as bfloat16"
    return f"train in bfloat16: it takes {_ratio(bfloat16, single)} as long as float32; {other}"


def _ratio(one: FormatTime, other: FormatTime) -> str:
    ratio = one.times(other)
    return f"{ratio:.2f}x" if ratio < 1 else f"{ratio:.1f}x" if ratio < 10 else f"{ratio:.0f}x"


def _jobs(device: torch.device, dtype: torch.dtype) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Return a square matrix product and a 3x3 convolution of the same values in every dtype.

    They are small on a CPU, where float16 may take 60 times as long. On a GPU the convolution has the shape for which
    GTX 16 cards were seen to give NaN (github.com/huggingface/diffusers/issues/1556).
    """
    size, batch, channels, side = (256, 4, 32, 28) if device.type == "cpu" else (4096, 2, 640, 64)
    generator = torch.Generator().manual_seed(0)

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, torch.float16).to(dtype)

    a, b, images, weight = (
        values(size, size),
        values(size, size),
        values(batch, channels, side, side),
        values(channels, channels, 3, 3),
    )
    return lambda: a @ b, lambda: torch.nn.functional.conv2d(images, weight, padding=1)


@contextmanager
def _float32_computed_in(precision: str) -> Iterator[None]:
    """Compute float32 matrix products and convolutions of CUDA in "tf32" or in "ieee"."""
    before = [switch.fp32_precision for switch in FLOAT32_SWITCHES]
    try:
        for switch in FLOAT32_SWITCHES:
            switch.fp32_precision = precision
        yield
    finally:
        for switch, value in zip(FLOAT32_SWITCHES, before, strict=True):
            switch.fp32_precision = value


def _timed(job: Callable[[], object], device: torch.device) -> float:
    """Return the milliseconds of one call, including the wait for the device."""
    wait = (lambda: None) if device.type == "cpu" else lambda: torch.accelerator.synchronize(device)
    wait()
    start = time.perf_counter()
    job()
    wait()
    return 1e3 * (time.perf_counter() - start)


# --- the report as text


def _lines(found: dict[str, Any]) -> Iterator[str]:
    torch_found = found["torch"]
    remark = ""
    if not torch_found["tested"]:
        too_old = parsed(torch_found["version"]) < OLDEST
        remark = "; this one is too old" if too_old else "; this one is newer and untested"
    yield f"ampkit {found['ampkit']}, Python {found['python']}"
    yield f"torch {torch_found['version']}; supported are {torch_found['supported']}{remark}"
    yield _result("autocast", torch_found["autocast"])
    if torch_found["autocast"] or not torch_found["tested"]:
        yield f"  to install a supported one: {INSTALL}"
    for device in found["devices"]:
        threads = f", {found['threads']} thread(s)" if device["device"] == "cpu" else ""
        yield ""
        yield f"{device['device']}: {device['name']}{threads}"
        yield from (f"  {remark}" for remark in device["remarks"])
        yield from (f"  {line}" for line in _table(device["dtypes"]))
        yield f"  not timed: {device['not_timed']}" if device["not_timed"] else f"  {device['recommendation']}"
        yield f"  kernels  {device['kernels']}"
        yield f"  FP8      {device['float8']}"
        yield from (_result(name, problem) for name, problem in device["checks"].items())
    yield ""
    yield "all well" if found["all_well"] else "a check failed: see above"


def _table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the times of each format, a row each."""
    if not rows:
        return []
    words = {True: "native", False: "emulated", None: "unknown"}
    header = ("dtype", "matrix product", "convolution", "arithmetic")
    cells = [
        (row["dtype"], f"{row['matmul_ms']:.3g} ms", f"{row['convolution_ms']:.3g} ms", words[row["native"]])
        for row in rows
    ]
    return table([header, *cells], {"matrix product", "convolution"})


def _result(checked: str, problem: str | None) -> str:
    return f"  ok       {checked}" if problem is None else f"  FAIL     {checked}: {problem}"


# --- checks


def _problem(check: Callable[[torch.device], Comparison], device: torch.device) -> str | None:
    try:
        result, expected, allowed = check(device)
    except Exception as error:  # reported with the other checks
        return f"{type(error).__name__}: {error}"
    difference = (result.cpu().double() - expected.cpu().double()).abs().max().item()
    return (
        None
        if difference <= allowed
        else f"differs from the expected result by {difference:.3g}, allowed {allowed:.3g}"
    )


def _sixteen_bit(device: torch.device, index: int, name: str) -> Comparison:
    """Compute a job of `_jobs` in a 16-bit format; expected: the same values in IEEE float32 on the same device."""
    with _float32_computed_in("ieee"):
        expected = _jobs(device, torch.float32)[index]()
    return _jobs(device, FORMATS[name])[index](), expected, 0.02 * expected.abs().max().item()


def _steps(device: torch.device, tested: Callable[..., Optimizer], exact: Callable[..., Optimizer]) -> Comparison:
    """Take a skipped step, then two with scaled and clipped gradients; expected: those two in float64 on the CPU."""
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(n, generator=generator).to(device) for n in (1, 17, 5000)]
    params = [Parameter(grad.clone()) for grad in grads]
    exact_params = [Parameter(grad.cpu().double()) for grad in grads]
    optimizer, exact_optimizer = tested(params, lr=0.01), exact(exact_params, lr=0.01)
    scaler = ampkit.GradScaler(device)
    for overflow in (float("inf"), 0.0, 0.0):
        scaled_grads = [scaler.scale(grad) for grad in grads]
        scaled_grads[-1][4321] += overflow
        for param, exact_param, grad, scaled_grad in zip(params, exact_params, grads, scaled_grads, strict=True):
            param.grad, exact_param.grad = scaled_grad, grad.cpu().double()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        if not overflow:
            torch.nn.utils.clip_grad_norm_(exact_params, 1.0)
            exact_optimizer.step()
    return torch.cat([p.detach() for p in params]), torch.cat([p.detach() for p in exact_params]), 1e-5


def _float8(device: torch.device) -> Comparison:
    """Compute a linear layer by an FP8 rule; expected: float64 on the CPU."""
    x, w = (torch.randn(32, 64, generator=torch.Generator().manual_seed(i)).to(device) for i in range(2))
    policy = ampkit.Policy.default(device.type).with_rules({"aten::linear": ampkit.Rule.FLOAT8_ROWWISE})
    with ampkit.autocast(device.type, torch.bfloat16, policy=policy):
        result = torch.nn.functional.linear(x, w)
    expected = x.cpu().double() @ w.cpu().double().t()
    return result, expected, 0.1 * expected.abs().max().item()


CHECKS: dict[str, Callable[[torch.device], Comparison]] = {
    "bfloat16 matrix product": lambda device: _sixteen_bit(device, 0, "bfloat16"),
    "float16 matrix product": lambda device: _sixteen_bit(device, 0, "float16"),
    "bfloat16 convolution": lambda device: _sixteen_bit(device, 1, "bfloat16"),
    "float16 convolution": lambda device: _sixteen_bit(device, 1, "float16"),
    "unscale, clip and skip": lambda device: _steps(device, torch.optim.SGD, torch.optim.SGD),
    "AdamW step": lambda device: _steps(device, ampkit.optim.AdamW, torch.optim.AdamW),
    "SGD step": lambda device: _steps(device, ampkit.optim.SGD, torch.optim.SGD),
    "FP8 product": _float8,
}
