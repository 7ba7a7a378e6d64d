"""`ampkit doctor`: what this machine can run, which implementation is used on each device, and whether it is right.

Prints versions, whether autocast works with this torch, and for each device its dtypes and the implementation that
`impl="auto"` selects; then runs each kernel operation once on small tensors and compares it with float64. Exit code 0
when all is well; 1 when torch is too old, autocast does not work, or an operation gives a wrong result.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import ampkit
import ampkit_kernels as kernels
from ampkit.torch_internals import self_check
from ampkit.torch_internals.float8 import lacks_float8
from ampkit.torch_internals.versions import INSTALL, NEWEST, OLDEST, SUPPORTED, parsed

OPTIONAL = {
    "triton": "GPU kernels",
    "numpy": "pointer tables, Triton's interpreter",
    "matplotlib": "plots",
    "scikit-learn": "the demo's data",
}
Finding = tuple[bool, str]      # whether all is well, and a line that says what was found


def main(argv: list[str] | None = None) -> int:
    """Print the report. Returns the exit code."""
    argparse.ArgumentParser(prog="ampkit doctor", description="Say what this machine can run.").parse_args(argv)
    well = True
    for findings in (_versions(), _torch(), *map(_device, devices())):
        for ok, line in findings:
            well = well and ok
            print(line)
        print()
    print("all well" if well else "something is wrong: see above")
    return 0 if well else 1


def devices() -> list[torch.device]:
    """The CPU and every CUDA device."""
    return [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]


def _versions() -> Iterator[Finding]:
    yield True, f"{'python':14s}{platform.python_version()}"
    yield True, f"{'ampkit':14s}{ampkit.__version__}"
    for package, use in OPTIONAL.items():
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "missing"
        yield True, f"{package:14s}{version}  ({use})"


def _torch() -> Iterator[Finding]:
    """Versions that ampkit is not tested with are judged by the self-check alone."""
    version = parsed(torch.__version__)
    tested = OLDEST <= version <= NEWEST
    remark = "" if tested else "; this one is too old" if version < OLDEST else "; this one is newer and untested"
    yield version >= OLDEST, f"{'torch':14s}{torch.__version__}; supported are {SUPPORTED}{remark}"
    try:
        fault = self_check.fault()
    except RuntimeError as error:
        fault = str(error)
    yield _result("autocast", fault)
    if fault or not tested:
        yield True, f"  to install a supported one: {INSTALL}"


def _device(device: torch.device) -> Iterator[Finding]:
    """The device, its dtypes, the implementation of the kernel operations, and a check of each."""
    if device.type == "cpu":
        yield True, f"{device}: {platform.processor() or platform.machine()}"
        yield True, "  kernels  PyTorch: CPU tensors take PyTorch's own operators"
        yield True, "  FP8      emulated by PyTorch's CPU operators: for tests, not for speed"
    else:
        major, minor = torch.cuda.get_device_capability(device)
        yield True, f"{device}: {torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
        if torch.version.hip is None and major < 8:
            yield True, "  bfloat16 is only emulated here and very slow: train in float16 with a GradScaler"
        reason = kernels.why_not_triton(device)
        yield True, f"  kernels  {f'PyTorch: {reason}' if reason else 'Triton: fused over lists of tensors'}"
        lack = lacks_float8(device)
        yield True, f"  FP8      {f'none, FP8 rules follow LOWER: {lack}' if lack else 'computed by the tensor cores'}"
    for operation, run in CHECKS.items():
        try:
            fault = run(device)
        except Exception as error:  # reported with the other checks
            fault = f"{type(error).__name__}: {error}"
        yield _result(operation, fault)


def _result(what: str, fault: str | None) -> Finding:
    return fault is None, f"  ok       {what}" if fault is None else f"  FAIL     {what}: {fault}"


def _close(got: Tensor, want: Tensor, tolerance: float = 0.0) -> str | None:
    error = (got.double().cpu() - want.double().cpu()).abs().max().item()
    return None if error <= tolerance else f"differs from float64 by {error:.3g}, allowed {tolerance:.3g}"


def _lists(device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, generator=generator).to(device) for n in (1, 17, 5000)]


def _unscale(device: torch.device) -> str | None:
    grads = _lists(device)
    want = torch.cat(grads).double() * 0.25
    found_inf = torch.zeros((), device=device)
    kernels.unscale_(grads, torch.tensor(0.25, device=device), found_inf)
    return _close(torch.cat(grads), want) or _close(found_inf, torch.zeros(()))


def _found_inf(device: torch.device) -> str | None:
    grads = _lists(device)
    grads[-1][4321] = float("nan")
    found_inf = torch.zeros((), device=device)
    kernels.norm_and_check(grads, torch.ones((), device=device), found_inf)
    counts = kernels.nonfinite_counts(grads).sum(0).cpu()
    return _close(found_inf, torch.ones(())) or _close(counts, torch.tensor([0, 1]))


def _norm(device: torch.device) -> str | None:
    grads = _lists(device)
    want = torch.cat(grads).double().norm() * 0.5
    half = torch.tensor(0.5, device=device)
    return _close(kernels.norm_and_check(grads, half, torch.zeros((), device=device)), want, 1e-3)


def _multiply(device: torch.device) -> str | None:
    grads = _lists(device)
    want = torch.cat(grads).double() * 0.5
    kernels.multiply_(grads, torch.tensor(0.5, device=device))
    return _close(torch.cat(grads), want)


def _adamw(device: torch.device) -> str | None:
    return _two_steps(device, ampkit.optim.AdamW, torch.optim.AdamW)


def _sgd(device: torch.device) -> str | None:
    return _two_steps(device, ampkit.optim.SGD, torch.optim.SGD)


def _float8(device: torch.device) -> str | None:
    """Nothing to check where FP8 rules follow LOWER, which the line above says."""
    if lacks_float8(device):
        return None
    x, w = (torch.randn(32, 64, generator=torch.Generator().manual_seed(i)).to(device) for i in range(2))
    policy = ampkit.Policy.default(device.type).with_rules({"aten::linear": ampkit.Rule.FLOAT8_ROWWISE})
    with ampkit.autocast(device.type, torch.bfloat16, policy=policy):
        got = torch.nn.functional.linear(x, w)
    want = x.double() @ w.double().t()
    return _close(got, want, 0.1 * want.abs().max().item())


def _two_steps(device: torch.device, ours: Callable[..., Any], theirs: Callable[..., Any]) -> str | None:
    """Two steps on the device, compared with torch's in float64 on the CPU."""
    grads = _lists(device)
    params = [torch.nn.Parameter(g.clone()) for g in grads]
    yardstick = [torch.nn.Parameter(g.double().cpu()) for g in grads]
    steppers = (ours(params, lr=0.01), theirs(yardstick, lr=0.01))
    for _ in range(2):
        for param, one, grad in zip(params, yardstick, grads, strict=True):
            param.grad, one.grad = grad, grad.double().cpu()
        for stepper in steppers:
            stepper.step()
    return _close(torch.cat([p.detach() for p in params]), torch.cat([p.detach() for p in yardstick]), 1e-5)


CHECKS: dict[str, Callable[[torch.device], str | None]] = {
    "unscale": _unscale,
    "overflow found": _found_inf,
    "norm": _norm,
    "multiply": _multiply,
    "AdamW step": _adamw,
    "SGD step": _sgd,
    "FP8 product": _float8,
}
