"""Faults as people write them, each in its own few lines: what goes wrong, where, and why."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampkit.torch_internals.versions import parsed

__all__ = ["WILD", "Wild", "step_of"]


class Wild(NamedTuple):
    """A function of a layer's output, (8, 16) in float16 or float32, that is no longer finite, or whose gradient is."""

    name: str
    function: Callable[[Tensor], Tensor]
    op: str                     # the operator to name; of backward, the forward operator
    phase: str
    kinds: tuple[str, ...]
    dtype: torch.dtype

    @property
    def lines(self) -> range:
        """Of this file, where the operator may stand."""
        source, first = inspect.getsourcelines(self.function)
        return range(first, first + len(source))


# Since torch 2.15 a number that is assigned is filled in; before, it was copied.
NEWEST = parsed(torch.__version__) >= (2, 15)
WILD: list[Wild] = []
OVER = ("overflow", "too large", "intermediate")
UNDEFINED, FROM_INF, CONSTANT = ("undefined",), ("from inf",), ("constant",)


def wild(
    op: str, kinds: tuple[str, ...], *, phase: str = "forward", dtype: torch.dtype = torch.float32
) -> Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]:
    def add(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        WILD.append(Wild(function.__name__, function, op, phase, kinds, dtype))
        return function

    return add


@wild("aten::exp", OVER)
def exponential_of_logits(x: Tensor) -> Tensor:
    return (x * 0 + 100).exp()


@wild("aten::logit", UNDEFINED)
def logit_of_a_sure_thing(x: Tensor) -> Tensor:
    return torch.logit(x * 0 + 1)


@wild("aten::_log_softmax", FROM_INF)
def a_row_that_is_masked_out(x: Tensor) -> Tensor:
    mask = torch.zeros(8, 1, dtype=torch.bool)
    mask[3] = True
    return F.log_softmax(x.masked_fill(mask, -math.inf), -1)


@wild("aten::_softmax", FROM_INF)
def attention_without_keys(x: Tensor) -> Tensor:
    scores = x @ x.t()
    scores = scores.masked_fill(torch.ones(8, 8).tril(-1).bool() | (torch.arange(8) == 7), -math.inf)
    return scores.softmax(-1) @ x


@wild("aten::div.Tensor", UNDEFINED)
def mean_over_a_mask_that_is_empty(x: Tensor) -> Tensor:
    chosen = x > 1e9
    return (x * chosen).sum(-1) / chosen.sum(-1)


@wild("aten::mean", UNDEFINED)
def mean_of_nothing(x: Tensor) -> Tensor:
    return x[x > 1e9].mean() + x


@wild("aten::std.correction", UNDEFINED)
def deviation_of_one(x: Tensor) -> Tensor:
    return x / x[:, :1].std(-1, keepdim=True)


@wild("aten::sqrt", UNDEFINED, phase="backward")
def norm_by_hand_at_zero(x: Tensor) -> Tensor:
    return (x * 0).square().sum(-1).sqrt() + x.sum(-1)


@wild("aten::pow.Tensor_Scalar", UNDEFINED, phase="backward")
def power_at_zero(x: Tensor) -> Tensor:
    return (x * 0) ** 0.5 + x


@wild("aten::acos", UNDEFINED, phase="backward")
def angle_between_the_same(x: Tensor) -> Tensor:
    return torch.acos(x * 0 + 1)


@wild("aten::log", UNDEFINED, phase="backward")
def where_that_hides_a_log(x: Tensor) -> Tensor:
    y = x * 0
    return torch.where(y > 0, y.log(), y)


@wild("aten::addmm", OVER, dtype=torch.float16)
def a_layer_with_large_weights(x: Tensor) -> Tensor:
    return F.linear(x * 0 + 300, torch.full((4, 16), 300.0, dtype=x.dtype), torch.ones(4, dtype=x.dtype))


@wild("aten::bmm", OVER, dtype=torch.float16)
def einsum_of_large_factors(x: Tensor) -> Tensor:
    y = x * 0 + 200
    return torch.einsum("ij,kj->ik", y, y)


@wild("aten::sum", OVER, dtype=torch.float16)
def sum_in_half(x: Tensor) -> Tensor:
    return (x * 0 + 600).sum() + x


@wild("aten::_to_copy", OVER)
def cast_to_half(x: Tensor) -> Tensor:
    return (x * 0 + 1e5).half().float()


@wild("aten::cumprod", OVER)
def cumulative_product(x: Tensor) -> Tensor:
    return torch.cumprod(x.abs() * 0 + 1e6, -1)


@wild("aten::cumsum", OVER, dtype=torch.float16)
def cumulative_sum(x: Tensor) -> Tensor:
    return torch.cumsum(x * 0 + 6e3, -1)


@wild("aten::mul_.Tensor", OVER, dtype=torch.float16)
def in_place_on_a_copy(x: Tensor) -> Tensor:
    y = (x * 0 + 500).detach().clone()
    return x + y.mul_(y)


@wild("aten::index_add_", OVER, dtype=torch.float16)
def scattered_sum(x: Tensor) -> Tensor:
    index = torch.zeros(8, dtype=torch.int64)
    return torch.zeros_like(x).index_add_(0, index, x * 0 + 30000.0).detach() + x


@wild("aten::fill_.Scalar" if NEWEST else "aten::copy_", CONSTANT)
def an_infinity_assigned(x: Tensor) -> Tensor:
    y = x.detach().clone()
    y[0, 0] = math.inf
    return x + y


@wild("aten::masked_fill_.Scalar" if NEWEST else "aten::index_put_", CONSTANT)
def nan_where_a_mask_is_set(x: Tensor) -> Tensor:
    y = x.detach().clone()
    y[y > 0] = math.nan
    return x + y


@wild("aten::scalar_tensor", CONSTANT)
def nan_where_nothing_is_known(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, math.nan)


@wild("aten::full_like", CONSTANT)
def a_bound_that_gets_into_the_sum(x: Tensor) -> Tensor:
    return x + torch.full_like(x, math.inf)


@wild("aten::rsqrt", UNDEFINED)
def inverse_root_of_nothing(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * 0).sum(-1, keepdim=True))


@wild("aten::atanh", UNDEFINED)
def inverse_tanh_of_a_saturated_tanh(x: Tensor) -> Tensor:
    return torch.atanh(torch.tanh(x * 0 + 50))


@wild("aten::log", UNDEFINED)
def log_of_a_probability_that_is_zero(x: Tensor) -> Tensor:
    y = torch.softmax(x * 0 + torch.arange(16.0) * 100, -1)
    return y.log() * x


@wild("aten::xlogy.Tensor", UNDEFINED)
def entropy_of_a_negative(x: Tensor) -> Tensor:
    return torch.xlogy(x * 0 + 1, x * 0 - 1)


@wild("aten::reciprocal", UNDEFINED)
def one_over_nothing(x: Tensor) -> Tensor:
    return 1 / (x * 0) * x


@wild("aten::mul.Tensor", OVER)
def adding_nothing_to_infinity(x: Tensor) -> Tensor:
    return torch.logaddexp((x * 0 + 1e38) * 10, x)


@wild("aten::convolution", OVER, dtype=torch.float16)
def convolution_with_large_weights(x: Tensor) -> Tensor:
    y = (x * 0 + 300).view(1, 1, 8, 16)
    return F.conv2d(y, torch.full((1, 1, 3, 3), 300.0, dtype=x.dtype))


@wild("aten::prod", OVER)
def product_of_many(x: Tensor) -> Tensor:
    return (x * 0 + 1e3).prod() * x


@wild("aten::pow.Scalar", OVER)
def two_to_the_power(x: Tensor) -> Tensor:
    return 2.0 ** (x * 0 + 200)


@wild("aten::lerp.Scalar", OVER, dtype=torch.float16)
def a_moving_average(x: Tensor) -> Tensor:
    return torch.lerp(x * 0 + 60000, x * 0 - 60000, -1.0)


@wild("aten::hypot", OVER, dtype=torch.float16)
def length_of_a_diagonal(x: Tensor) -> Tensor:
    return torch.hypot(x * 0 + 60000, x * 0 + 60000)


@wild("aten::linalg_vector_norm", OVER, dtype=torch.float16)
def norm_in_half(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x * 0 + 60000, dim=-1)


class Middle(nn.Module):
    """Where the fault is called."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def step_of(fault: Wild) -> tuple[nn.Module, Callable[[], Any]]:
    """A model with the fault in it, and its step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), Middle(fault.function)).to(fault.dtype)
    batch = torch.randn(8, 16).to(fault.dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(batch).float().mean().backward()
        optimizer.step()

    return model, step
