"""Shared by the tests of FP8 rules: regions under one, and a step of a model in them."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ampkit import Policy, Rule, autocast
from tests.helpers import op_samples

TENSORWISE, ROWWISE, GW_HP = Rule.FLOAT8_TENSORWISE, Rule.FLOAT8_ROWWISE, Rule.FLOAT8_ROWWISE_GW_HP
RULES = (TENSORWISE, ROWWISE, GW_HP)
OPERATORS = ("aten::linear", "aten::mm", "aten::addmm", "aten::matmul")
BF16 = torch.bfloat16


def policy(rule: Rule, *operators: str, device_type: str = "cpu") -> Policy:
    """The default policy with one rule, for linear layers unless other operators are named."""
    return Policy.default(device_type).with_rules(dict.fromkeys(operators or ("aten::linear",), rule))


def fp8(rule: Rule, *operators: str, dtype: torch.dtype = BF16, device_type: str = "cpu", **options: Any) -> autocast:
    """A region under `policy`."""
    return autocast(device_type, dtype, policy=policy(rule, *operators, device_type=device_type), **options)


def step(model: Any, x: Tensor, grad: Tensor, region: Any) -> list[Any]:
    """The output of a model in a region, the gradient of its input, and those of its parameters."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    with region:
        y = model(x)
    y.backward(grad.to(y.dtype))
    return [y.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]


def with_forward(model: nn.Module, forward: Any) -> nn.Module:
    """`model` with another forward."""
    wrapped = copy.copy(model)
    wrapped.forward = forward
    return wrapped


def mlp(width: int = 64) -> nn.Module:
    """Two linear layers with FP8 sizes."""
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


def same(a: Any, b: Any) -> bool:
    """Whether two lists of tensors have the same dtypes and bits, NaN included."""
    return len(a) == len(b) and all(map(op_samples.same, a, b))
