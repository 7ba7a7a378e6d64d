"""torch's own autocast test lists, and every operator torch registers, under ampkit: on CPU, and on absent devices."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ampkit import Policy
from ampkit.policy.operator_keys import resolve
from tests.helpers.op_samples import Call, difference, native, region, run, run_fake

pytest.importorskip("expecttest", reason="torch's test helpers import it; it is in ampkit[dev]")
# The samples call deprecated operators on purpose.
pytestmark = pytest.mark.filterwarnings("ignore")

LOWER = [torch.bfloat16, torch.float16]
DEVICES = ["cpu", "cuda", "mps", "xpu"]


MODULES = {
    "torch": torch, "nn": torch._C._nn, "linalg": torch._C._linalg, "methods": torch.Tensor, "banned": torch._C._nn,
}


def entries(lists: Any) -> Iterator[Call]:
    """Every entry of an `AutocastTestLists` or `AutocastCPUTestLists` as a call, named after its list.

    A row is a name, one or more tuples of arguments, perhaps keywords, and at the end what the list's own test wants
    to know. `einsum` has its equation before the tuple.
    """
    for group, rows in vars(lists).items():
        for name, *rest in rows:
            first = (rest.pop(0),) if isinstance(rest[0], str) else ()
            kwargs = next((part for part in rest if isinstance(part, dict)), {})
            function = getattr(MODULES[group.split("_")[0]], name)
            for index, args in enumerate(part for part in rest if isinstance(part, tuple)):
                yield Call(f"{group}: {name} #{index}", function, (*first, *args), kwargs)


def lists_for(device: str) -> Any:
    """torch's lists of operators to test; the tensors are on the CPU for every device."""
    from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists

    return (AutocastCPUTestLists if device == "cpu" else AutocastTestLists)(torch.device("cpu"))


def outcomes(call: Call, device: str, policy: Policy, dtype: torch.dtype) -> tuple[Any, Any]:
    """What a call comes to under torch.amp and under ampkit."""
    if device == "cpu":
        return run(call, torch.autocast("cpu", dtype)), run(call, region(policy, dtype))
    return run_fake(call, device, native(device, dtype)), run_fake(call, device, region(policy, dtype))


def unconvolved(device: str) -> set[str]:
    """`_convolution`, if it raises on an absent device whatever autocast does: before torch 2.12 it cannot be fake."""
    image = torch.rand(1, 2, 6, 6)
    args = (image, torch.rand(2, 2, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, False, False, True)
    call = Call("_convolution", resolve("_convolution.deprecated"), args, {})
    raised = device != "cpu" and isinstance(run_fake(call, device, contextlib.nullcontext()), Exception)
    return {"_convolution"} if raised else set()


# What cannot run without the device or depends on values: the result is two errors, whatever autocast does. The
# entry for einsum has too few tensors for its equation.
NEEDS_DEVICE = {"equal", "cudnn_convolution", "cudnn_convolution_transpose", "gru_cell", "grid_sampler", "einsum"}


@pytest.mark.parametrize("dtype", LOWER, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_every_entry_of_torch_s_lists_comes_to_the_same(device: str, dtype: torch.dtype) -> None:
    policy, compared, wrong, raised = Policy.torch(device), 0, [], set()
    for call in entries(lists_for(device)):
        want, got = outcomes(call, device, policy, dtype)
        # torch.amp cannot promote float16 beside bfloat16, and takes a narrow first argument for the answer; here the
        # result is float32. See docs/differences.md.
        if "at::autocast::prioritize" in str(want) and "promote" in call.name:
            assert isinstance(got, Exception) or all(row[0] is torch.float32 for row in _described(got)), call.name
            continue
        if isinstance(want, Exception):
            raised.add(call.name.split()[1])
        compared += 1
        if found := difference(want, got):
            wrong.append(f"{call.name}: {found}")
    assert not wrong, "\n".join(wrong)
    assert compared > (50 if device == "cpu" else 100)
    assert raised <= NEEDS_DEVICE | {"binary_cross_entropy", "vdot"} | unconvolved(device)


def _described(results: list[Any]) -> list[tuple[Any, ...]]:
    return [(out.dtype,) if isinstance(out, torch.Tensor) else out for out in results]
