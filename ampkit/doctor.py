"""`ampkit doctor`: what this machine can run, which implementation is used on each device, and whether it is right.

Prints versions, whether autocast works with this torch, and for each device the implementation that `impl="auto"`
selects; then takes a few steps with it on small tensors and compares them with float64. Exit code 0 when all is
well; 1 when torch is too old, autocast does not work, or a step gives a wrong result.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

import ampkit
import ampkit_kernels as kernels
from ampkit.engine import self_check
from ampkit.torch_internals.float8_matmul import lacks_float8
from ampkit.torch_internals.versions import INSTALL, NEWEST, OLDEST, SUPPORTED, parsed

Finding = tuple[bool, str]      # whether all is well, and a line that says what was found
Compared = tuple[Tensor, Tensor, float]     # what an operation gives, what it should be, and the allowed distance


def main(argv: list[str] | None = None) -> int:
    """Print the report. Returns the exit code."""
    argparse.ArgumentParser(prog="ampkit doctor", description="Say what this machine can run.").parse_args(argv)
    well = True
    for findings in (_torch(), *map(_device, devices())):
        for ok, line in findings:
            well = well and ok
            print(line)
        print()
    print("all well" if well else "something is wrong: see above")
    return 0 if well else 1


def devices() -> list[torch.device]:
    """The CPU and every CUDA device."""
    return [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]


def _torch() -> Iterator[Finding]:
    """Versions that ampkit is not tested with are judged by the self-check alone."""
    version = parsed(torch.__version__)
    tested = OLDEST <= version <= NEWEST
    remark = "" if tested else "; this one is too old" if version < OLDEST else "; this one is newer and untested"
    yield True, f"ampkit {ampkit.__version__}, Python {platform.python_version()}"
    yield version >= OLDEST, f"torch {torch.__version__}; supported are {SUPPORTED}{remark}"
    try:
        fault = self_check.fault()
    except RuntimeError as error:
        fault = str(error)
    yield _result("autocast", fault)
    if fault or not tested:
        yield True, f"  to install a supported one: {INSTALL}"


def _device(device: torch.device) -> Iterator[Finding]:
    """The device, the implementation of the kernel operations, and whether it computes right."""
    lack = lacks_float8(device)
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
        yield True, f"  kernels  {f'PyTorch: {reason}' if reason else 'Triton, fused over lists of tensors'}"
        yield True, f"  FP8      {f'none, FP8 rules follow LOWER: {lack}' if lack else 'computed by the tensor cores'}"
    for operation, check in CHECKS.items():
        if check is not _float8 or not lack:
            yield _result(operation, _fault(check, device))


def _result(what: str, fault: str | None) -> Finding:
    return fault is None, f"  ok       {what}" if fault is None else f"  FAIL     {what}: {fault}"


def _fault(check: Callable[[torch.device], Compared], device: torch.device) -> str | None:
    try:
        got, want, allowed = check(device)
    except Exception as error:  # reported with the other checks
        return f"{type(error).__name__}: {error}"
    error = (got.double().cpu() - want).abs().max().item()
    return None if error <= allowed else f"differs from float64 by {error:.3g}, allowed {allowed:.3g}"


def _steps(device: torch.device, made: Callable[..., Optimizer], exact: Callable[..., Optimizer]) -> Compared:
    """A step that overflows, then two of scaled and clipped gradients, beside those two in float64 on the CPU."""
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(n, generator=generator).to(device) for n in (1, 17, 5000)]
    params = [Parameter(grad.clone()) for grad in grads]
    yardstick = [Parameter(grad.double().cpu()) for grad in grads]
    optimizer, reference = made(params, lr=0.01), exact(yardstick, lr=0.01)
    scaler = ampkit.GradScaler(device)
    for overflow in (float("inf"), 0.0, 0.0):
        scaled = [scaler.scale(grad) for grad in grads]
        scaled[-1][4321] += overflow
        for param, one, grad, given in zip(params, yardstick, grads, scaled, strict=True):
            param.grad, one.grad = given, grad.double().cpu()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        if not overflow:
            torch.nn.utils.clip_grad_norm_(yardstick, 1.0)
            reference.step()
    return torch.cat([p.detach() for p in params]), torch.cat([p.detach() for p in yardstick]), 1e-5


def _float8(device: torch.device) -> Compared:
    x, w = (torch.randn(32, 64, generator=torch.Generator().manual_seed(i)).to(device) for i in range(2))
    policy = ampkit.Policy.default(device.type).with_rules({"aten::linear": ampkit.Rule.FLOAT8_ROWWISE})
    with ampkit.autocast(device.type, torch.bfloat16, policy=policy):
        got = torch.nn.functional.linear(x, w)
    want = x.double().cpu() @ w.double().cpu().t()
    return got, want, 0.1 * want.abs().max().item()


CHECKS: dict[str, Callable[[torch.device], Compared]] = {
    "unscale, clip and skip": lambda device: _steps(device, torch.optim.SGD, torch.optim.SGD),
    "AdamW step": lambda device: _steps(device, ampkit.optim.AdamW, torch.optim.AdamW),
    "SGD step": lambda device: _steps(device, ampkit.optim.SGD, torch.optim.SGD),
    "FP8 product": _float8,
}
