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

import torch
from torch import Tensor

import ampkit
import ampkit_kernels as kernels
from ampkit.region import self_check
from ampkit.torch_internals.float8 import lacks_float8
from ampkit.torch_internals.versions import INSTALL, NEWEST, OLDEST, SUPPORTED, parsed

OPTIONAL = {"triton": "GPU kernels", "numpy": "pointer tables, Triton's interpreter"}
Finding = tuple[bool, str]      # whether all is well, and a line that says what was found
Compared = tuple[Tensor, Tensor, float]     # what an operation gives, what it should be, and the allowed distance


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
    for operation, check in CHECKS.items():
        if operation != "FP8 product" or not lacks_float8(device):      # of which the line above says why
            yield _result(operation, _fault(check, device))


def _result(what: str, fault: str | None) -> Finding:
    return fault is None, f"  ok       {what}" if fault is None else f"  FAIL     {what}: {fault}"


def _fault(check: Callable[[torch.device], Compared], device: torch.device) -> str | None:
    try:
        got, want, allowed = check(device)
    except Exception as error:  # reported with the other checks
        return f"{type(error).__name__}: {error}"
    error = (got.double().cpu() - want.double().cpu()).abs().max().item()
    return None if error <= allowed else f"differs from float64 by {error:.3g}, allowed {allowed:.3g}"


def _lists(device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, generator=generator).to(device) for n in (1, 17, 5000)]


def _unscale(device: torch.device) -> Compared:
    """The last element is the flag, which stays clear."""
    tensors = [*_lists(device), torch.zeros(1, device=device)]
    want = torch.cat(tensors).double() * 0.25
    kernels.unscale_(tensors[:-1], torch.tensor(0.25, device=device), tensors[-1])
    return torch.cat(tensors), want, 0.0


def _found_inf(device: torch.device) -> Compared:
    grads = _lists(device)
    grads[-1][4321] = float("nan")
    found_inf = torch.zeros(1, device=device)
    kernels.norm_and_check(grads, torch.ones((), device=device), found_inf)
    return found_inf, torch.ones(1), 0.0


def _norm(device: torch.device) -> Compared:
    grads = _lists(device)
    norm = kernels.norm_and_check(grads, torch.tensor(0.5, device=device), torch.zeros((), device=device))
    return norm, torch.cat(grads).double().norm() * 0.5, 1e-3


def _multiply(device: torch.device) -> Compared:
    grads = _lists(device)
    want = torch.cat(grads).double() * 0.5
    kernels.multiply_(grads, torch.tensor(0.5, device=device))
    return torch.cat(grads), want, 0.0


def _two_steps(device: torch.device, name: str) -> Compared:
    """Two steps on the device, beside torch's in float64 on the CPU."""
    grads = _lists(device)
    params = [torch.nn.Parameter(g.clone()) for g in grads]
    yardstick = [torch.nn.Parameter(g.double().cpu()) for g in grads]
    steppers = (getattr(ampkit.optim, name)(params, lr=0.01), getattr(torch.optim, name)(yardstick, lr=0.01))
    for _ in range(2):
        for param, one, grad in zip(params, yardstick, grads, strict=True):
            param.grad, one.grad = grad, grad.double().cpu()
        for stepper in steppers:
            stepper.step()
    return torch.cat([p.detach() for p in params]), torch.cat([p.detach() for p in yardstick]), 1e-5


def _float8(device: torch.device) -> Compared:
    x, w = (torch.randn(32, 64, generator=torch.Generator().manual_seed(i)).to(device) for i in range(2))
    policy = ampkit.Policy.default(device.type).with_rules({"aten::linear": ampkit.Rule.FLOAT8_ROWWISE})
    with ampkit.autocast(device.type, torch.bfloat16, policy=policy):
        got = torch.nn.functional.linear(x, w)
    want = x.double() @ w.double().t()
    return got, want, 0.1 * want.abs().max().item()


CHECKS: dict[str, Callable[[torch.device], Compared]] = {
    "unscale": _unscale,
    "overflow found": _found_inf,
    "norm": _norm,
    "multiply": _multiply,
    "AdamW step": lambda device: _two_steps(device, "AdamW"),
    "SGD step": lambda device: _two_steps(device, "SGD"),
    "FP8 product": _float8,
}
