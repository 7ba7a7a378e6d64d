"""Regions for Apple GPUs, by fake tensors: the dtypes of results are torch.autocast's. Without gradients and values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import ampkit

CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mm": lambda x: x @ x,
    "bmm": lambda x: torch.bmm(x.view(1, 4, 4), x.view(1, 4, 4)),
    "addmm": lambda x: torch.addmm(x, x, x),
    "linear": lambda x: F.linear(x, x),
    "conv2d": lambda x: F.conv2d(x.view(1, 1, 4, 4), x.view(1, 1, 4, 4)),
    "softmax": lambda x: x.softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "sum": lambda x: x.sum(),
    "exp": lambda x: x.exp(),
    "pow": lambda x: x.pow(2),
    "mse_loss": lambda x: F.mse_loss(x, x),
    "cat": lambda x: torch.cat([x, x.float()]),
    "add": lambda x: x + x,
    "relu": lambda x: x.relu(),
}


@pytest.mark.parametrize("given", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_dtypes_are_torchs(name: str, dtype: torch.dtype, given: torch.dtype) -> None:
    def result(region: Any) -> tuple[torch.dtype, str]:
        with region:
            output = CALLS[name](x)
        return output.dtype, output.device.type

    with FakeTensorMode(), torch.no_grad():
        x = torch.empty(4, 4, device="mps", dtype=given)
        expected = result(torch.autocast("mps", dtype))
        assert result(ampkit.autocast("mps", dtype, policy="torch")) == expected
        assert result(ampkit.autocast("mps", dtype, enabled=False)) == result(torch.autocast("mps", enabled=False))
    assert expected[1] == "mps"


def test_the_default_policy_lowers_products_and_keeps_softmax_in_float32() -> None:
    policy = ampkit.Policy.default("mps")
    with FakeTensorMode(), torch.no_grad(), ampkit.autocast("mps", torch.bfloat16, policy=policy):
        scores = torch.empty(4, 4, device="mps") @ torch.empty(4, 4, device="mps")
        assert (scores.dtype, scores.softmax(-1).dtype) == (torch.bfloat16, torch.float32)
