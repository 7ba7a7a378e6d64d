"""`ampkit doctor`: what this machine can run, how fast, the implementations used, and whether they are right.

Prints versions, whether autocast works with this torch, and for each device the time of a matrix product and of a
convolution in each dtype with advice on which one to train in, and the implementation that `impl="auto"` selects; then
takes a few steps with it on small tensors and compares them with float64. `--json` prints the same for programs. The
exit code is 1 if torch is too old, autocast does not work, or a step gives a wrong result, else 0.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

import ampkit
import ampkit_kernels as kernels
from ampkit import dtype_times
from ampkit.dispatch import self_check
from ampkit.dtypes import dtype_name
from ampkit.matmul.float8_matmul import lacks_float8
from ampkit.text_tables import table
from ampkit.torch_private import INSTALL, NEWEST, OLDEST, SUPPORTED, parsed

Comparison = tuple[Tensor, Tensor, float]  # the result, the expected result, and the allowed absolute difference


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
    """What `--json` prints: numbers, strings, lists and None, which stands for no fault."""
    torch_report, device_reports = _torch(), [_device(device) for device in devices()]
    faults = [torch_report["autocast"], *(fault for found in device_reports for fault in found["checks"].values())]
    all_well = parsed(torch.__version__) >= OLDEST and not any(faults)
    versions = {"ampkit": ampkit.__version__, "python": platform.python_version(), "threads": torch.get_num_threads()}
    return {**versions, "torch": torch_report, "devices": device_reports, "all_well": all_well}


def devices() -> list[torch.device]:
    """The CPU and every CUDA device."""
    return [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]


def _torch() -> dict[str, Any]:
    """Versions, and whether autocast works. With a newer torch than was tested, the self-check decides."""
    version = parsed(torch.__version__)
    try:
        fault = self_check.fault()
    except RuntimeError as error:
        fault = str(error)
    tested = OLDEST <= version <= NEWEST
    return {"version": torch.__version__, "supported": SUPPORTED, "tested": tested, "autocast": fault}


def _device(device: torch.device) -> dict[str, Any]:
    """The device, its times in each dtype, the implementation of the kernel operations, and whether it is right."""
    missing_float8 = lacks_float8(device)  # the reason, if the device has no FP8
    found: dict[str, Any] = {"device": str(device), "remarks": []}
    if device.type == "cpu":
        found["name"] = torch.cpu.get_capabilities().get("cpu_name") or platform.processor() or platform.machine()
        found["kernels"] = "PyTorch: CPU tensors take PyTorch's own operators"
        found["float8"] = "emulated by PyTorch's CPU operators: for tests, not for speed"
    else:
        major, minor = torch.cuda.get_device_capability(device)
        found["name"] = f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
        if torch.version.hip is None and major < 8:
            emulated = "bfloat16 is only emulated here and very slow: train in float16 with a GradScaler"
            found["remarks"].append(emulated)
        reason = kernels.why_not_triton(device)
        found["kernels"] = f"PyTorch: {reason}" if reason else "Triton, fused over lists of tensors"
        follows = f"none, FP8 rules follow LOWER: {missing_float8}"
        found["float8"] = follows if missing_float8 else "computed by the tensor cores"
    found |= _dtypes(device)
    checks = {name: check for name, check in CHECKS.items() if check is not _float8 or not missing_float8}
    return found | {"checks": {name: _fault(check, device) for name, check in checks.items()}}


def _dtypes(device: torch.device) -> dict[str, Any]:
    """Times in each dtype, and advice; why there are none, if the measurement fails."""
    try:
        times = dtype_times.measure(device)
    except (RuntimeError, AssertionError) as error:  # too little memory, say; not a reason to distrust ampkit
        return {"dtypes": [], "advice": None, "not_timed": f"{type(error).__name__}: {error}"}
    rows = [asdict(found) | {"dtype": dtype_name(found.dtype)} for found in times]
    return {"dtypes": rows, "advice": dtype_times.advice(times), "not_timed": None}


def _lines(found: dict[str, Any]) -> Iterator[str]:
    """The report as text."""
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
        yield f"  not timed: {device['not_timed']}" if device["not_timed"] else f"  advice   {device['advice']}"
        yield f"  kernels  {device['kernels']}"
        yield f"  FP8      {device['float8']}"
        yield from (_result(name, fault) for name, fault in device["checks"].items())
    yield ""
    yield "all well" if found["all_well"] else "something is wrong: see above"


def _table(rows: list[dict[str, Any]]) -> list[str]:
    """The times of each dtype, a row each."""
    if not rows:
        return []
    words = {True: "native", False: "emulated", None: "unknown"}
    header = ("dtype", "matrix product", "convolution", "arithmetic")
    cells = [
        (row["dtype"], f"{row['matmul_ms']:.3g} ms", f"{row['convolution_ms']:.3g} ms", words[row["native"]])
        for row in rows
    ]
    return table([header, *cells], {"matrix product", "convolution"})


def _result(checked: str, fault: str | None) -> str:
    return f"  ok       {checked}" if fault is None else f"  FAIL     {checked}: {fault}"


def _fault(check: Callable[[torch.device], Comparison], device: torch.device) -> str | None:
    try:
        result, expected, allowed = check(device)
    except Exception as error:  # reported with the other checks
        return f"{type(error).__name__}: {error}"
    difference = (result.double().cpu() - expected).abs().max().item()
    return None if difference <= allowed else f"differs from float64 by {difference:.3g}, allowed {allowed:.3g}"


def _steps(device: torch.device, tested: Callable[..., Optimizer], exact: Callable[..., Optimizer]) -> Comparison:
    """A step that is skipped, then two with scaled and clipped gradients; expected: those two in float64 on the CPU."""
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(n, generator=generator).to(device) for n in (1, 17, 5000)]
    params = [Parameter(grad.clone()) for grad in grads]
    exact_params = [Parameter(grad.double().cpu()) for grad in grads]
    optimizer, exact_optimizer = tested(params, lr=0.01), exact(exact_params, lr=0.01)
    scaler = ampkit.GradScaler(device)
    for overflow in (float("inf"), 0.0, 0.0):
        scaled_grads = [scaler.scale(grad) for grad in grads]
        scaled_grads[-1][4321] += overflow
        for param, exact_param, grad, scaled_grad in zip(params, exact_params, grads, scaled_grads, strict=True):
            param.grad, exact_param.grad = scaled_grad, grad.double().cpu()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        if not overflow:
            torch.nn.utils.clip_grad_norm_(exact_params, 1.0)
            exact_optimizer.step()
    return torch.cat([p.detach() for p in params]), torch.cat([p.detach() for p in exact_params]), 1e-5


def _float8(device: torch.device) -> Comparison:
    """A linear layer by an FP8 rule; expected: float64 on the CPU."""
    x, w = (torch.randn(32, 64, generator=torch.Generator().manual_seed(i)).to(device) for i in range(2))
    policy = ampkit.Policy.default(device.type).with_rules({"aten::linear": ampkit.Rule.FLOAT8_ROWWISE})
    with ampkit.autocast(device.type, torch.bfloat16, policy=policy):
        result = torch.nn.functional.linear(x, w)
    expected = x.double().cpu() @ w.double().cpu().t()
    return result, expected, 0.1 * expected.abs().max().item()


CHECKS: dict[str, Callable[[torch.device], Comparison]] = {
    "unscale, clip and skip": lambda device: _steps(device, torch.optim.SGD, torch.optim.SGD),
    "AdamW step": lambda device: _steps(device, ampkit.optim.AdamW, torch.optim.AdamW),
    "SGD step": lambda device: _steps(device, ampkit.optim.SGD, torch.optim.SGD),
    "FP8 product": _float8,
}
