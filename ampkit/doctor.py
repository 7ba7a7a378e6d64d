"""`ampkit doctor`: what this machine can run, which path serves which operation and why, and whether it works.

Prints versions, whether regions work with this torch, devices with their dtypes, and for every device the
implementation that `impl="auto"` takes; then runs each kernel operation once on small tensors and compares with
float64. Exit code 0 when all is well, 1 when torch is older than any supported, regions do not work or an operation
gives a wrong result. With `--operators` it compares the operator lists with this torch instead: exit code 1 when they
differ.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import ampkit
from ampkit import operator_drift
from ampkit.gradients import kernels
from ampkit.policy.op_table import TORCH, Rule
from ampkit.torch_internals import self_check
from ampkit.torch_internals.versions import INSTALL, NEWEST, OLDEST, SUPPORTED, parsed

OPTIONAL = {
    "triton": "GPU kernels",
    "numpy": "pointer tables, Triton's interpreter",
    "matplotlib": "plots",
    "rich": "the demo's tables",
    "scikit-learn": "the demo's data",
}


@dataclass(frozen=True)
class Path:
    """Which implementation serves the kernel operations on a device."""

    device: str
    name: str
    dtypes: list[str]
    serves: str
    because: str


@dataclass(frozen=True)
class Check:
    """One operation run on one device."""

    device: str
    operation: str
    ok: bool
    detail: str


def versions() -> dict[str, str]:
    """Installed versions; "missing" for what is not installed."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "ampkit": ampkit.__version__}
    for package in OPTIONAL:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "missing"
    return found


@dataclass(frozen=True)
class Torch:
    """What is known of the running torch, and whether regions work with it."""

    version: str
    tried: bool             # ampkit is tested with this version
    new_enough: bool
    regions: str            # "ok", or what does not work

    @property
    def ok(self) -> bool:
        """Whether ampkit can be used. For untested versions the self-check decides."""
        return self.new_enough and self.regions == "ok"


def torch_found() -> Torch:
    """Try regions out with the running torch."""
    try:
        fault = self_check.fault()
    except RuntimeError as error:
        fault = str(error)
    version = parsed(torch.__version__)
    return Torch(torch.__version__, OLDEST <= version <= NEWEST, version >= OLDEST, fault or "ok")


def devices() -> list[torch.device]:
    """The CPU and every CUDA device."""
    return [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]


def path_for(device: torch.device) -> Path:
    """What `impl="auto"` does on this device, and why."""
    dtypes = ["float32", "float64", "float16", "bfloat16"]
    if device.type == "cpu":
        name = platform.processor() or platform.machine()
        return Path(str(device), name, dtypes, "PyTorch", "CPU tensors take PyTorch's own operators")
    capability = torch.cuda.get_device_capability(device)
    name = f"{torch.cuda.get_device_name(device)}, compute capability {capability[0]}.{capability[1]}"
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        dtypes.remove("bfloat16")
    reason = kernels.why_not_triton(device)
    if reason is None:
        return Path(str(device), name, dtypes, "Triton", "one launch per dtype for a whole list of tensors")
    return Path(str(device), name, dtypes, "PyTorch", reason)


def _close(got: Tensor, want: Tensor, tolerance: float) -> str | None:
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
    return _close(torch.cat(grads), want, 0.0) or _close(found_inf, torch.zeros(()), 0.0)


def _found_inf(device: torch.device) -> str | None:
    grads = _lists(device)
    grads[-1][4321] = float("nan")
    found_inf = torch.zeros((), device=device)
    kernels.norm_and_check(grads, torch.ones((), device=device), found_inf)
    counts = kernels.nonfinite_counts(grads).sum(0).cpu()
    return _close(found_inf, torch.ones(()), 0.0) or _close(counts, torch.tensor([0, 1]), 0.0)


def _norm(device: torch.device) -> str | None:
    grads = _lists(device)
    want = torch.cat(grads).double().norm() * 0.5
    half = torch.tensor(0.5, device=device)
    return _close(kernels.norm_and_check(grads, half, torch.zeros((), device=device)), want, 1e-3)


def _multiply(device: torch.device) -> str | None:
    grads = _lists(device)
    want = torch.cat(grads).double() * 0.5
    kernels.multiply_(grads, torch.tensor(0.5, device=device))
    return _close(torch.cat(grads), want, 0.0)


def _adamw(device: torch.device) -> str | None:
    from ampkit.optim import AdamW

    return _step(device, AdamW, torch.optim.AdamW)


def _sgd(device: torch.device) -> str | None:
    from ampkit.optim import SGD

    return _step(device, SGD, torch.optim.SGD)


def _step(device: torch.device, ours: Callable[..., Any], theirs: Callable[..., Any]) -> str | None:
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
}


def check(device: torch.device) -> list[Check]:
    """Run every operation once; an exception is a failed check with its message."""
    results = []
    for operation, run in CHECKS.items():
        try:
            fault = run(device)
        except Exception as error:  # reported with the other checks
            fault = f"{type(error).__name__}: {error}"
        results.append(Check(str(device), operation, fault is None, fault or "ok"))
    return results


def _unless_ok(detail: str) -> str:
    return "" if detail == "ok" else f": {detail}"


def _verdict(found: Torch) -> str:
    if found.tried:
        return ""
    return "; this one is newer, and nobody has tried it" if found.new_enough else "; this one is too old"


def operators(*, as_json: bool = False) -> int:
    """Print how the lists differ from the running torch, for every device type. Returns the exit code."""
    drifts = {device: operator_drift.list_drift(device) for device in TORCH}
    new, gone = operator_drift.composite_drift()
    agree = not (any(drifts.values()) or new or gone)
    if as_json:
        report = {
            "torch": torch.__version__,
            "supported": SUPPORTED,
            "lists": {
                device: {
                    "new": {name: _rule(rule) for name, rule in drift.new.items()},
                    "gone": {name: _rule(rule) for name, rule in drift.gone.items()},
                    "different": {name: [_rule(rule) for rule in both] for name, both in drift.different.items()},
                }
                for device, drift in drifts.items()
            },
            "composites": {"new": new, "gone": gone},
            "agree": agree,
        }
        print(json.dumps(report, indent=2))
        return 0 if agree else 1
    print(f"torch {torch.__version__}; the lists are made for {SUPPORTED}")
    for device, drift in drifts.items():
        print(f"{device:14s}{'differs' if drift else 'as listed'}")
        for name, rule in drift.new.items():
            print(f"  new        {name}: torch {_rule(rule)}")
        for name, rule in drift.gone.items():
            print(f"  gone       {name}: listed as {_rule(rule)}")
        for name, (ours, torchs) in drift.different.items():
            print(f"  different  {name}: listed as {_rule(ours)}, torch {_rule(torchs)}")
    print(f"composites    {'differ' if new or gone else 'as classified'}")
    for name in new:
        print(f"  new        {name}")
    for name in gone:
        print(f"  gone       {name}")
    print("\nthe lists are those of this torch" if agree else "\nthe lists are not those of this torch: see above")
    return 0 if agree else 1


def _rule(rule: Rule | None) -> str:
    return "has a rule that could not be observed" if rule is None else rule.name


def main(argv: list[str] | None = None) -> int:
    """Print the report. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="ampkit doctor", description="Say what this machine can run.")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--operators", action="store_true", help="compare the operator lists with this torch")
    options = parser.parse_args(argv)
    if options.operators:
        return operators(as_json=options.json)
    installed = versions()
    found = torch_found()
    paths = [path_for(device) for device in devices()]
    checks = [result for device in devices() for result in check(device)]
    healthy = found.ok and all(result.ok for result in checks)
    if options.json:
        report = {
            "versions": installed,
            "torch": asdict(found) | {"supported": SUPPORTED, "install": INSTALL},
            "paths": [asdict(path) for path in paths],
            "checks": [asdict(result) for result in checks],
            "healthy": healthy,
        }
        print(json.dumps(report, indent=2))
        return 0 if healthy else 1
    for package, version in installed.items():
        use = f"  ({OPTIONAL[package]})" if package in OPTIONAL else ""
        print(f"{package:14s}{version}{use}")
    print(f"\ntorch: {installed['torch']}; supported are {SUPPORTED}" + _verdict(found))
    print(f"  {'ok  ' if found.regions == 'ok' else 'FAIL'}     regions" + _unless_ok(found.regions))
    if not (found.tried and found.ok):
        print(f"  to get a supported one: {INSTALL}")
    for path in paths:
        print(f"\n{path.device}: {path.name}\n  dtypes   {', '.join(path.dtypes)}")
        print(f"  kernels  {path.serves}: {path.because}")
        for result in checks:
            if result.device == path.device:
                print(f"  {'ok  ' if result.ok else 'FAIL'}     {result.operation}" + _unless_ok(result.detail))
    print("\nall well" if healthy else "\nsomething is wrong: see above")
    return 0 if healthy else 1
