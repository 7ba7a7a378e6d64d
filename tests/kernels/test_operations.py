"""Each operation beside plain arithmetic: the checks of `tests.gpu_checks.operations`, in Triton's interpreter.

On a CUDA device the same checks run, and those that need a device.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ampkit_kernels import adamw_, reference, sgd_
from ampkit_kernels.configs import Config
from tests.gpu_checks import cuda_only, operations, training
from tests.gpu_checks.tools import gradients, same, scalar

ON_GPU = {**operations.CHECKS, **cuda_only.CHECKS, **training.CHECKS}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_on_the_gpu(name: str) -> None:
    ON_GPU[name](torch.device("cuda", torch.cuda.current_device()))


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("name", operations.CHECKS)
def test_reference(monkeypatch: pytest.MonkeyPatch, name: str, on_host: bool) -> None:
    """With branches on the host, and with tensor arithmetic in their place, as on a GPU without Triton."""
    if not on_host:
        monkeypatch.setattr(reference, "is_on_host", lambda scalar: False)
    operations.CHECKS[name](torch.device("cpu"), "reference")


@pytest.mark.parametrize("name", operations.CHECKS)
def test_interpreted(interpreted, name: str) -> None:
    if name == "every_half_pattern":  # long tensors; with small blocks the other lists have several blocks and chunks
        interpreted(Config(block=4096, chunk=65536))
    operations.CHECKS[name](torch.device("cpu"), "triton")


STEPS: list[tuple[Any, dict[str, Any]]] = [
    (adamw_, {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.01}),
    (adamw_, {"lr": 0.01, "beta1": 0.3, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0, "amsgrad": True}),
    (sgd_, {"lr": 0.1, "weight_decay": 0.1}),
    (sgd_, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True, "maximize": True}),
]


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="torch fuses nothing without AVX2")
@pytest.mark.parametrize(("operation", "options"), STEPS, ids=str)
def test_steps_fuse_multiply_adds_as_torch_does(
    interpreted, monkeypatch: pytest.MonkeyPatch, operation: Any, options: dict[str, Any]
) -> None:
    """float32 steps have the bits of torch's CPU operators where a fused multiply-add rounds once.

    The interpreter's own rounds the product too. torch's square root on a CPU is not correctly rounded.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def fused(_: Any, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        a, b, c = (np.float64(each.data) for each in (x, y, z))
        return TensorHandle((a * b + c).astype(x.data.dtype), z.dtype.scalar)

    def torchs_root(_: Any, x: TensorHandle) -> TensorHandle:
        return TensorHandle(torch.from_numpy(x.data).sqrt().numpy(), x.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_fma", fused)
    monkeypatch.setattr(InterpreterBuilder, "create_precise_sqrt", torchs_root)
    runs: list[list[Tensor]] = []
    for impl in ("triton", "reference"):
        torch.manual_seed(0)
        params = gradients(torch.float32, (5000,))
        states = [[torch.zeros_like(p) for p in params] for _ in range(3)]
        lists = [*states, [scalar(0.0)]] if operation is adamw_ else states[:1]
        for _ in range(3):
            grads = [torch.randn_like(p) for p in params]
            operation(params, grads, *lists, impl=impl, **options)
        runs.append([*params, *(t for tensors in lists for t in tensors)])
    same(*runs, f"{operation.__name__} {options}")
