"""Handlers: they compute what the general handler computes, to the bit."""

import contextlib
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampkit import Policy, autocast, record_casts
from ampkit.dispatch.handlers import BOUND_NAMES
from ampkit.policy.operators import python_binding, resolve
from ampkit.region.arguments import RegionSpec
from tests.helpers.op_samples import Call, difference, op_db_calls, region, run
from tests.helpers.regions import BF16, FP32

DEFAULT = Policy.default("cpu").with_rules({"aten::batch_norm": "float32"})  # as torch's list for MPS has it


@pytest.mark.parametrize("policy", [Policy.torch("cpu"), DEFAULT], ids=lambda policy: policy.base)
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.filterwarnings("ignore")  # torch warns once in a process
def test_every_sample_comes_out_the_same_in_both_ways(policy: Policy, dtype: torch.dtype) -> None:
    """While its casts are recorded, a region has the general handler for every operator."""
    calls = [call for call in op_db_calls(dtype, 2) if "empty" not in call.name]
    volumes, rows = torch.randn(2, 2, 2, 2, 2, dtype=dtype), torch.randn(3, 4, dtype=dtype)
    calls += [Call("conv3d", F.conv3d, (volumes, volumes), {}), Call("lerp", torch.lerp, tuple(rows), {})]
    want = [run(call, region(policy, BF16), backward="outside") for call in calls]
    with record_casts() as record:
        got = [run(call, region(policy, BF16), backward="outside") for call in calls]
    differences = {call.name: difference(*pair) for call, *pair in zip(calls, want, got, strict=True)}
    assert {name: text for name, text in differences.items() if text} == {}
    assert len(calls) > 900
    assert policy is not DEFAULT or {f"aten::{name}" for name in BOUND_NAMES} <= {call.op for call in record.calls}


def test_bindings_are_found() -> None:
    assert [name for name in BOUND_NAMES if python_binding(resolve(name)) is None] == []


def test_an_operator_of_another_policy_goes_on_below() -> None:
    """Both policies have entries in this process; the one without a rule leaves the operator as torch.amp does."""
    x = torch.randn(4, 4, dtype=BF16, requires_grad=True)
    with autocast("cpu", policy=Policy.torch("cpu").with_rules({"aten::softmax.int": "float32"})):
        assert torch.softmax(x, -1).dtype is FP32
    with autocast("cpu"):
        assert torch.softmax(x, -1).dtype is FP32
        assert torch.logsumexp(x, -1).dtype is FP32
    with autocast("cpu", policy=Policy.torch("cpu")):
        assert torch.softmax(x, -1).dtype is BF16
        assert torch.logsumexp(x, -1).dtype is BF16
        assert torch.einsum("ij,jk", x.float(), x.float()).dtype is BF16  # a composite: its parts meet the region
        assert torch.pow(x, 2).grad_fn is not None
        assert torch.rsub(x, 1).dtype is BF16


def python_of(call: Callable[[], Any]) -> list[str]:
    """The files of ampkit whose functions a call enters, in order."""
    called = []
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_filename) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [file for file in called if "ampkit" in file and file != __file__]


def test_no_python_runs_for_operators_that_only_ampkit_lists() -> None:
    """Under `Policy.torch`, for any device, once regions with the default list have run."""
    x = torch.randn(4, 4)
    with autocast("cpu"):
        assert torch.special.bessel_j0(x.bfloat16()).dtype is FP32
    with autocast("cpu", policy=Policy.torch("cpu")):
        assert python_of(lambda: torch.special.bessel_j0(x)) == []


def test_a_disabled_region_calls_the_operator_at_once() -> None:
    """For plain tensors; the parts of a composite take no Python."""
    x, w = torch.randn(4, 4), nn.Parameter(torch.randn(4, 4))
    with autocast("cpu"), torch.autocast("cpu", enabled=False):
        F.linear(x, w)
        files = [Path(file).name for file in python_of(lambda: F.linear(x, w))]
        assert files == ["dispatcher.py", "handlers.py"]


def test_torch_s_kernel_leaves_a_call_as_the_general_handler_does() -> None:
    """16-bit operands of the other dtype, float64 and mixtures: what a handler leaves to torch's kernel, to the bit."""
    torch.manual_seed(0)
    dtypes = FP32, BF16, torch.float16, torch.float64
    for left, right in itertools.product(dtypes, dtypes):
        a, b = (torch.randn(4, 4).to(dtype).requires_grad_() for dtype in (left, right))

        def results(a: torch.Tensor = a, b: torch.Tensor = b) -> list[torch.Tensor] | str:
            try:
                with autocast("cpu", BF16):
                    out = torch.mm(a, b)
                return [out, *torch.autograd.grad(out.float().sum(), (a, b))]
            except RuntimeError as error:
                return str(error)

        generated = results()
        with record_casts():
            general = results()
        if isinstance(general, str) or isinstance(generated, str):
            assert generated == general
        else:
            assert [*map(torch.equal, generated, general)] == [True] * 3
            assert [each.dtype for each in generated] == [each.dtype for each in general]


@pytest.mark.parametrize("record", [contextlib.nullcontext, record_casts], ids=["closure", "general handler"])
def test_promotion_in_a_float32_region_widens_to_float32(record: Callable[[], Any]) -> None:
    """As in torch.amp, which allows such a region on CUDA alone; one that is made past the checks shows it here."""
    low, wide = torch.ones(2, dtype=torch.bfloat16), torch.ones(2)
    spec = RegionSpec("cpu", torch.float32, True, False, Policy.torch("cpu"))
    for operands in ([low, low], [low, wide], [wide, wide]):
        with record(), autocast._of(spec):
            ours = torch.stack(operands)
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_dtype("cpu", torch.float32)
        try:
            expected = torch.stack(operands)
        finally:
            torch.set_autocast_enabled("cpu", False)
            torch.set_autocast_dtype("cpu", torch.bfloat16)
        assert (ours.dtype, expected.dtype) == (torch.float32, torch.float32)
