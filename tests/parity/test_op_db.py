"""Every operator that torch has samples for, under torch.amp and under ampkit: same dtypes, same bits, same errors."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ampkit import Policy
from tests.helpers.op_samples import Call, difference, native, op_db_calls, region, run, run_fake

pytest.importorskip("expecttest", reason="torch's operator database imports it; it is in ampkit[dev]")
# The samples call deprecated operators on purpose.
pytestmark = pytest.mark.filterwarnings("ignore")

LOWER = [torch.bfloat16, torch.float16]
# Memory that nobody wrote, or a LAPACK routine whose last bits depend on where its operands lie.
UNREPEATABLE = ("empty", "new_empty", "linalg.lstsq")


def repeatable(dtype: torch.dtype, limit: int) -> Iterator[Call]:
    return (call for call in op_db_calls(dtype, limit) if not call.name.startswith(UNREPEATABLE))


@pytest.mark.parametrize("dtype", LOWER, ids=str)
def test_cpu_results_equal_torch_amp_to_the_bit(dtype: torch.dtype) -> None:
    policy, seen, wrong = Policy.torch("cpu"), 0, []
    for input_dtype in (torch.float32, dtype):
        for call in repeatable(input_dtype, 3):
            want = run(call, torch.autocast("cpu", dtype))
            got = run(call, region(policy, dtype))
            seen += not isinstance(want, Exception)
            if text := difference(want, got):
                wrong.append(f"{call.name}: {text}")
    assert not wrong, "\n".join(wrong)
    assert seen > 2500


@pytest.mark.parametrize("backward", ["outside", "inside"])
def test_cpu_gradients_equal_torch_amp_to_the_bit(backward: Any) -> None:
    policy, seen, wrong = Policy.torch("cpu"), 0, []
    for call in repeatable(torch.float32, 2):
        want = run(call, torch.autocast("cpu", torch.bfloat16), backward=backward)
        got = run(call, region(policy, torch.bfloat16), backward=backward)
        seen += not isinstance(want, Exception)
        if text := difference(want, got):
            wrong.append(f"{call.name}: {text}")
    assert not wrong, "\n".join(wrong)
    assert seen > 900


def test_cuda_gives_the_dtypes_torch_amp_gives() -> None:
    """On fake tensors. Other absent devices differ in their lists alone, which policy/test_op_registry.py compares."""
    device, policy, seen, wrong = "cuda", Policy.torch("cuda"), 0, []
    for input_dtype in (torch.float32, torch.float16):
        for call in op_db_calls(input_dtype, limit=1):
            want = run_fake(call, device, native(device, torch.float16))
            got = run_fake(call, device, region(policy, torch.float16))
            seen += not isinstance(want, Exception)
            if text := difference(want, got):
                wrong.append(f"{call.name}: {text}")
    assert not wrong, "\n".join(wrong)
    assert seen > 1000


@pytest.mark.parametrize(("dtype", "backward"), [(torch.bfloat16, "outside"), (torch.float16, "inside")], ids=str)
def test_the_default_policy_runs_everything_that_torch_amp_runs(dtype: torch.dtype, backward: Any) -> None:
    """Rules on top of torch's must not send an operator, or its derivative, to a dtype it has no kernel for."""
    policy, seen, wrong = Policy.default("cpu"), 0, []
    for input_dtype in (torch.float32, dtype):
        for call in op_db_calls(input_dtype, limit=2):
            if isinstance(run(call, torch.autocast("cpu", dtype), backward=backward), Exception):
                continue
            seen += 1
            got = run(call, region(policy, dtype), backward=backward)
            if isinstance(got, Exception):
                wrong.append(f"{call.name}: {type(got).__name__}: {str(got)[:160]}")
    assert not wrong, "\n".join(wrong)
    assert seen > 1500


# Kernels that torch's CPU list sends to float32 and that accelerators run in half precision, and three operators whose
# second and third results are float32 on CUDA by the kernel's own choice. A torch without CUDA cannot compare them all.
ONLY_FLOAT32_ON_CPU = {
    "grid_sampler_2d",
    "grid_sampler_3d",
    "nn.functional.grid_sample",
    "nn.functional.adaptive_avg_pool3d",
    "nn.functional.adaptive_max_pool3d",
    "nn.functional.fractional_max_pool2d",
    "nn.functional.fractional_max_pool3d",
    "nn.functional.max_pool3d",
    "nn.functional.max_unpool1d",
    "nn.functional.max_unpool2d",
    "nn.functional.max_unpool3d",
    "nn.functional.pad",
    "trace",
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_batch_norm_with_update",
}


def test_the_default_policy_gives_the_same_dtypes_on_cpu_and_cuda() -> None:
    cpu, cuda, seen, apart = Policy.default("cpu"), Policy.default("cuda"), 0, {}
    for input_dtype in (torch.float32, torch.bfloat16):
        for call in op_db_calls(input_dtype, limit=2):
            here = run(call, region(cpu, torch.bfloat16))
            there = run_fake(call, "cuda", region(cuda, torch.bfloat16))
            if isinstance(here, Exception) or isinstance(there, Exception):
                continue
            seen += 1
            ours = [out.dtype if isinstance(out, torch.Tensor) else None for out in here]
            theirs = [out[0] if isinstance(out, tuple) else None for out in there]
            if ours != theirs:
                apart[call.name.split()[0]] = f"{call.name}: {ours} on CPU, {theirs} on CUDA"
    assert seen > 1500
    assert not set(apart) - ONLY_FLOAT32_ON_CPU, "\n".join(apart.values())
    assert apart, "torch's CPU list sends some operators to float32 that CUDA's does not; this comparison sees none"
