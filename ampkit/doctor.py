"""`ampkit doctor`: what this machine can run, the implementation used on each device, and whether it is right.

Prints versions, whether autocast works with this torch, and for each device the implementation that `impl="auto"`
selects; then takes a few steps with it on small tensors and compares them with float64. The exit code is 1 if torch is
too old, autocast does not work, or a step gives a wrong result, else 0.
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

Line = tuple[bool, str]  # whether all is well, and the text of the line
Comparison = tuple[Tensor, Tensor, float]  # the result, the expected result, and the allowed absolute difference


def main(argv: list[str] | None = None) -> int:
    """Print the report. Returns the exit code."""
    argparse.ArgumentParser(prog="ampkit doctor", description="Report what this machine can run.").parse_args(argv)
    all_well = True
    for paragraph in (_torch(), *map(_device, devices())):
        for is_well, text in paragraph:
            all_well = all_well and is_well
            print(text)
        print()
    print("all well" if all_well else "something is wrong: see above")
    return 0 if all_well else 1


def devices() -> list[torch.device]:
    """The CPU and every CUDA device."""
    return [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]


def _torch() -> Iterator[Line]:
    """Versions, and whether autocast works. With a newer torch than was tested, the self-check decides."""
    version = parsed(torch.__version__)
    tested = OLDEST <= version <= NEWEST
    remark = ""
    if not tested:
        remark = "; this one is too old" if version < OLDEST else "; this one is newer and untested"
    yield True, f"ampkit {ampkit.__version__}, Python {platform.python_version()}"
    yield version >= OLDEST, f"torch {torch.__version__}; supported are {SUPPORTED}{remark}"
    try:
        fault = self_check.fault()
    except RuntimeError as error:
        fault = str(error)
    yield _result("autocast", fault)
    if fault or not tested:
        yield True, f"  to install a supported one: {INSTALL}"


def _device(device: torch.device) -> Iterator[Line]:
    """The device, the implementation of the kernel operations, and whether it computes right."""
    missing_float8 = lacks_float8(device)  # the reason, if the device has no FP8
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
        yield True, f"  kernels  PyTorch: {reason}" if reason else "  kernels  Triton, fused over lists of tensors"
        if missing_float8:
            yield True, f"  FP8      none, FP8 rules follow LOWER: {missing_float8}"
        else:
            yield True, "  FP8      computed by the tensor cores"
    for operation, check in CHECKS.items():
        if check is not _float8 or not missing_float8:
            yield _result(operation, _fault(check, device))


def _result(checked: str, fault: str | None) -> Line:
    return fault is None, f"  ok       {checked}" if fault is None else f"  FAIL     {checked}: {fault}"


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
