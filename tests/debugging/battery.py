"""Faults from public threads and as people write them, with their answers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ampkit import autocast
from ampkit.torch_private import parsed
from tests.debugging.models import Middle, filled, mlp
from tests.debugging.planted import B16, F16, FLOAT, LINES, POLICY, SGD, loss_of, planted, table, whole

# Since torch 2.15 a number that is assigned is filled in; before, it was copied.
NEWEST = parsed(torch.__version__) >= (2, 15)


# --- in one line


# fmt: off
# A fault is a row of two or three lines; the tools must find the line of its lambda.
ALL_BUT_3 = (torch.arange(8) != 3)[:, None].expand(8, 16).float()

table(rows=[
    ("log_of_zero", lambda x: (x * 0).log() + x, "aten::log", r"log.*0|of 0", r"clamp"),
    ("angle_of_the_same", lambda x: torch.acos(x * 0 + 1) + x, "aten::acos", r"at 1", r"clamp"),
    ("mean_of_an_empty_choice", lambda x: x[x > 5].mean() + x,
     "aten::mean", r"no elements|0 elements", r"numel\(\)|empty"),
    ("deviation_of_one_value", lambda x: x / (x[:, :1].std(-1, keepdim=True) + 1),
     "aten::std.correction", r"1 element|one element", r"correction=0|unbiased"),
    ("diagonal_of_nothing", lambda x: torch.hypot(x * 0, x.detach() * 0) + x,
     "aten::hypot", r"at 0|0 / 0|is 0", r"where"),
    ("exponential_too_large", lambda x: (x * 0 + 800).exp().log() + x,
     "aten::exp", r"overflow", r"clamp|logsumexp|softplus|subtract"),
    ("class_weights_that_are_zero",
     lambda x: F.cross_entropy(x, torch.zeros(8, dtype=torch.int64), weight=torch.tensor([0.0] + [1.0] * 15)),
     "aten::nll_loss_forward", r"weight", r"targets that count"),
    ("logit_of_a_sure_thing", lambda x: torch.logit(x * 0 + 1), "aten::logit", r"of 1\b|at 1\b", "clamp"),
    ("power_at_zero", lambda x: (x * 0) ** 0.5 + x, "in backward of aten::pow.Tensor_Scalar", "at 0", "where"),
    ("cumulative_product", lambda x: torch.cumprod(x.abs() * 0 + 1e6, -1), "aten::cumprod", "overflow", r"clamp|logs"),
    ("nan_where_nothing_is_known", lambda x: torch.where(x > 0, x, math.nan),
     "aten::scalar_tensor", "written explicitly", r"do not write"),
    ("a_bound_that_gets_into_the_sum", lambda x: x + torch.full_like(x, math.inf),
     "aten::full_like", "written explicitly", r"do not write|finfo"),
    ("inverse_root_of_nothing", lambda x: x * torch.rsqrt((x * 0).sum(-1, keepdim=True)),
     "aten::rsqrt", "division by 0", "clamp"),
    ("inverse_tanh_of_a_saturated_tanh", lambda x: torch.atanh(torch.tanh(x * 0 + 50)),
     "aten::atanh", "atanh of 1", "clamp"),
    ("entropy_of_a_negative", lambda x: torch.xlogy(x * 0 + 1, x * 0 - 1),
     "aten::xlogy.Tensor", r"negative|of -", "clamp"),
    ("one_over_nothing", lambda x: 1 / (x * 0) * x, "aten::reciprocal", "division by 0", "clamp"),
    ("adding_nothing_to_infinity", lambda x: torch.logaddexp((x * 0 + 1e38) * 10, x),
     "aten::mul.Tensor", "overflow", r"clamp"),
    ("product_of_many", lambda x: (x * 0 + 1e3).prod() * x, "aten::prod", "overflow", r"clamp|logs"),
    ("two_to_the_power", lambda x: 2.0 ** (x * 0 + 200), "aten::pow.Scalar", "overflow", "clamp"),
    ("division_by_a_number", lambda x: x / 0, "aten::div.Tensor", "division by 0", "clamp"),
    ("division_by_a_count", lambda x: x / torch.zeros(8, 1, dtype=torch.int64),
     "aten::div.Tensor", "division by 0", "clamp"),
    ("log_of_positions", lambda x: x * torch.arange(16).log(), "aten::log", "log of 0", "clamp"),
    ("times_without_end", lambda x: x * torch.linspace(0, math.inf, 16),
     "aten::linspace", "written explicitly", r"do not write"),
    ("exponential_beyond_any_dtype", lambda x: x * (x * 0 + 1e30).exp(), "aten::exp", "beyond float64 too", "clamp"),
    ("nan_in_a_literal", lambda x: x * torch.tensor([math.nan] + [0.0] * 15),
     "aten::lift_fresh", "written explicitly", r"NaN"),
    ("a_reentrant_checkpoint", lambda x: checkpoint(lambda y: (y * 0).sqrt() + y, x, use_reentrant=True),
     "in backward of aten::sqrt", "at 0", "where"),
    ("a_checkpoint", lambda x: checkpoint(lambda y: (y * 0).sqrt() + y, x, use_reentrant=False),
     "in backward of aten::sqrt", "at 0", "where"),
    ("length_by_hand", lambda x: (x * 0).square().sum(-1).sqrt() + x.sum(-1), "aten::sqrt", r"at 0", r"where"),
    ("mean_over_no_element", lambda x: (x * (x > 5)).sum() / (x > 5).sum() + x,
     "aten::div.Tensor", r"0 / 0|by 0|is 0", r"clamp"),
    ("a_row_that_is_masked_out", lambda x: F.log_softmax(x.masked_fill(torch.arange(8)[:, None] == 3, -math.inf), -1),
     "aten::_log_softmax", "1 of 8 rows are -inf throughout", "unmasked"),
    ("one_sample_without_elements", lambda x: (x * ALL_BUT_3).sum(-1) / ALL_BUT_3.sum(-1),
     "aten::div.Tensor", r"row 3", r"clamp"),
    ("where_that_hides_a_log", lambda x: torch.where(x > 9, (x * 0).log(), x),
     "in backward of aten::log", "division by 0|of 0", "clamp"),
    ("targets_longer_than_inputs",
     lambda x: F.ctc_loss(x[:, None].log_softmax(-1), torch.ones(1, 8).long(), torch.tensor([8]), torch.tensor([8])),
     "aten::_ctc_loss.Tensor", r"longer than|target", r"zero_infinity"),
])
table(dtype=F16, rows=[
    ("sum_of_many_in_half", lambda x: (x * 0 + 600).sum() / 128 + x, "aten::sum", r"overflow", FLOAT),
    ("log_sum_exp_by_hand", lambda x: (x + 12).exp().sum(-1).log(), "aten::exp", r"overflow", FLOAT + "|" + POLICY),
    ("cumulative_sum", lambda x: torch.cumsum(x + 6e3, -1), "aten::cumsum", "overflow", FLOAT),
    ("a_moving_average", lambda x: torch.lerp(x + 60000, x - 60000, -1.0), "aten::lerp.Scalar", "overflow", FLOAT),
    ("length_of_a_diagonal", lambda x: torch.hypot(x + 60000, x + 60000), "aten::hypot", "overflow", FLOAT),
    ("norm_in_half", lambda x: torch.linalg.vector_norm(x + 60000, dim=-1),
     "aten::linalg_vector_norm", "overflow", FLOAT),
    ("cast_of_positions", lambda x: x * (torch.arange(16) * 5000).half(),
     "aten::_to_copy", "overflow", r"float32|clamp"),
    ("positions_in_half", lambda x: x * torch.arange(0, 80000, 5000, dtype=x.dtype),
     "aten::arange.start_step", "overflow", FLOAT + "|float32"),
    ("squared_error_in_half", lambda x: (x + 300).pow(2) * 1e-3, "aten::pow.Tensor_Scalar", r"overflow", FLOAT),
    ("einsum_of_large_factors", lambda x: torch.einsum("ij,kj->ik", x + 200, x + 200) * 1e-4,
     "aten::bmm", "overflow", FLOAT),
    ("scattered_sum", lambda x: torch.zeros_like(x).index_add_(0, torch.zeros(8).long(), x.detach() * 0 + 3e4) + x,
     "aten::index_add_", "overflow", FLOAT),
    ("in_place_on_a_copy", lambda x: x + (x * 0 + 500).detach().clone().mul_(x.detach() * 0 + 500),
     "aten::mul_.Tensor", "overflow", FLOAT),
    ("convolution_with_large_weights",
     lambda x: F.conv2d((x + 300).view(1, 1, 8, 16), torch.full((1, 1, 3, 3), 300.0, dtype=x.dtype)) * 1e-4,
     "aten::convolution", "overflow", FLOAT),
])
table(dtype=F16, kind="torch", rows=[
    ("a_layer_under_torch_autocast", lambda x: F.linear(x + 300, torch.full((4, 16), 300.0), torch.ones(4)) / 1e4,
     "aten::addmm", r"overflow", LINES),
])
table(dtype=F16, kind="ampkit", rows=[
    ("cast_of_a_time", lambda x: x * (x.float() * 0 + 1.7e5).half(),
     "aten::_to_copy", r"overflow", r"float32|clamp|\.float\(\)"),
])


# --- constants that are 0 in float16: the report must name the constant and its line, and not blame the arithmetic

@planted("aten::div.Tensor", r"1e-12 is 0 in float16", FLOAT, dtype=F16)
def normalise_with_a_small_eps(x: Tensor) -> Tensor:
    y = x * 0
    length = y.norm(dim=-1, keepdim=True) + 1e-12  # here
    return y / length + x

@planted("aten::log", r"1e-08 is 0 in float16", FLOAT, dtype=F16)
def log_of_a_clamp(x: Tensor) -> Tensor:
    y = (x * 0).clamp(min=1e-8)  # here
    return y.log() * x

@planted("aten::div.Tensor", r"1e-08 is 0 in float16", FLOAT, dtype=F16)
def a_norm_of_ones_own(x: Tensor) -> Tensor:
    y = x * 0 + 1
    spread = (y - y.mean(-1, keepdim=True)).square().mean(-1, keepdim=True).sqrt().detach()
    spread = spread + 1e-8  # here
    return (y - 1) / spread + x

@planted("aten::reciprocal", r"1e-09 is 0 in float16", FLOAT, dtype=F16)
def a_factory_of_eps(x: Tensor) -> Tensor:
    eps = torch.full((16,), 1e-9, dtype=x.dtype)  # here
    return (x * 0 + eps).reciprocal() * x * 1e-9

@planted("aten::log", r"1e-10 is 0 in float16|rounded.*to 0|0 in float16", FLOAT, dtype=F16)
def eps_in_a_tensor(x: Tensor) -> Tensor:
    eps = torch.tensor(1e-10)
    eps = eps.to(x.dtype)  # here
    return (x * 0 + eps).log() * x

@planted("aten::log", r"the cast to float16|0 in float16", LINES + "|" + FLOAT + "|" + POLICY, dtype=F16, kind="ampkit")
def probabilities_in_half(x: Tensor) -> Tensor:
    p = torch.softmax(x.float() + torch.arange(16.0) * 2.5, -1)
    p = p.half()  # here
    return p.log() * x

@planted("aten::rsqrt", r"0 in float16|underflow", FLOAT, dtype=F16)
def square_that_underflows(x: Tensor) -> Tensor:
    y = x * 0 + 1e-5
    y = y * y  # here
    return torch.rsqrt(y) * x * 1e-5

@planted("aten::div.Tensor", r"0 in float16|underflow", FLOAT, dtype=F16)
def exponential_that_underflows(x: Tensor) -> Tensor:
    weight = torch.exp(x * 0 - 20)  # here
    return weight / weight.sum(-1, keepdim=True) * x

for name, foreach, op in (
    ("adam_in_half", False, "aten::addcdiv_"),
    ("adam_in_half_on_lists", True, "aten::_foreach_addcdiv_"),
):

    @whole("nonfinite", r"1e-08 is 0 in float16", r"eps|FP16Optimizer", op, name=name,
           model=lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).half(),
           state=functools.partial(torch.optim.Adam, lr=1e-3, foreach=foreach))
    def adam(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.zeros(2, 4, dtype=F16)).float().sum().backward()
        optimizer.step()  # here

@whole("nonfinite", r"-1e\+10|is -inf in float16|cast to float16", r"finfo|" + FLOAT, "aten::_to_copy",
       model=lambda: nn.Linear(8, 8).half())
def mask_of_large_numbers(model: nn.Module) -> None:
    mask = torch.zeros(8, 8)
    mask[3] = torch.finfo(torch.float32).min
    scores = model(torch.randn(8, 8).half()) + mask.to(F16)  # here
    (scores.softmax(-1) @ scores.detach().nan_to_num(0, 0, 0)).float().mean().backward()

@planted("aten::rsqrt", r"1e-10 is 0 in float16", FLOAT, dtype=F16)
def root_mean_square_norm(x: Tensor) -> Tensor:
    y = x * 0
    square = y.pow(2).mean(-1, keepdim=True) + 1e-10  # here
    return y * torch.rsqrt(square) + x

@planted("aten::log", r"0 in float16.*underflows", FLOAT, dtype=F16)
def log_of_a_softmax(x: Tensor) -> Tensor:
    p = torch.softmax(x + torch.arange(16.0).half() * 3, -1)  # here
    return p.log() * 1e-3

@planted("aten::log", r"0 in float16.*rounded", FLOAT, dtype=F16)
def entropy_by_hand(x: Tensor) -> Tensor:
    p = torch.sigmoid(x * 0 + 12)  # here
    return (1 - p).log() * x


# --- integers among the causes

@planted(
    "aten::nll_loss_forward",
    r"8 of 8 targets are -100, which is ignore_index",
    r"ignore_index|skip",
    module="",
    loss=lambda y: F.cross_entropy(y, torch.full((8,), -100)),  # here
)
def every_target_ignored(x: Tensor) -> Tensor:
    return x * 1


# --- overflows, in the dialect of the user's region

@planted("aten::mm", r"overflow", LINES, dtype=F16, kind="torch", name="attention_under_torch_autocast")
@planted("aten::mm", r"overflow", POLICY, dtype=F16, kind="ampkit", name="attention_under_ampkit")
@planted("aten::mm", r"overflow", FLOAT, dtype=F16, name="attention_in_a_half_model")
def attention(x: Tensor) -> Tensor:
    q = x * 0 + 300
    return (q @ q.t()).softmax(-1).to(x.dtype) @ x  # here

@whole("nonfinite", r"overflow", r"loss / 32\b", "aten::mm", model=lambda: nn.Linear(16, 1).half())
def loss_that_is_too_large(model: nn.Module) -> None:
    model.zero_grad()
    out = model(torch.ones(8, 16, dtype=F16) * 100)  # here
    (out.float().sum() * 2e3).backward()


# --- the same in operators of all kinds: numbers, integers, literals, masks, poles, writes in place

@planted("aten::_softmax", "rows are -inf throughout", "unmasked")
def attention_without_keys(x: Tensor) -> Tensor:
    scores = x @ x.t()
    scores = scores.masked_fill(torch.ones(8, 8).tril(-1).bool() | (torch.arange(8) == 7), -math.inf)
    return scores.softmax(-1) @ x  # here

@planted("aten::fill_.Scalar" if NEWEST else "aten::copy_", "written explicitly", r"do not write|finfo")
def an_infinity_assigned(x: Tensor) -> Tensor:
    y = x.detach().clone()
    y[0, 0] = math.inf  # here
    return x + y

@planted("aten::masked_fill_.Scalar" if NEWEST else "aten::index_put_", "written explicitly", r"do not write")
def nan_where_a_mask_is_set(x: Tensor) -> Tensor:
    y = x.detach().clone()
    y[y > 0] = math.nan  # here
    return x + y


# --- code that backward calls, modules that run twice, optimizers

class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return (grad * 0 + 100).exp()  # here

@planted("aten::exp in backward of aten::mul.Tensor", "overflow", r"clamp", source=Exponential.backward)
def a_function_with_a_backward_of_its_own(x: Tensor) -> Tensor:
    return Exponential.apply(x)  # type: ignore[no-any-return]

@planted("aten::div.Tensor in backward", "division by 0", r"clamp|eps", module="1")
def a_hook(x: Tensor) -> Tensor:
    x.register_hook(lambda grad: grad / grad.sum(-1, keepdim=True).mul(0))  # here
    return x * 1

@planted("in backward of aten::sqrt", "at 0", r"where")
def a_gradient_inside_forward(x: Tensor) -> Tensor:
    y = x * 0
    y = y.sqrt()  # here
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return grad

def grow(x: Tensor) -> Tensor:
    return x * 300  # here

def grown_twice() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), Middle(grow)).half()
    return model.append(model[1])

@whole("nonfinite", "overflow", FLOAT, "aten::mul.Tensor", "1 (call 2)", model=grown_twice, source=grow)
def the_second_call_of_a_module(model: nn.Module) -> None:
    model(torch.ones(2, 4).half()).float().mean().backward()


# --- a bad sample, a bad micro-batch: which

def logarithm(x: Tensor) -> Tensor:
    return x.log()  # here

@whole("nonfinite", r"micro-batch 3", r"clamp", "aten::log", "1", source=logarithm, state=SGD,
       model=lambda: filled(nn.Sequential(nn.Linear(4, 1, bias=False), Middle(logarithm)), 1.0))
def third_micro_batch(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    optimizer.zero_grad()
    losses = []
    for value in (1.0, 2.0, 0.0, 3.0):
        losses.append(model(torch.full((2, 4), value)).mean() / 4)
        losses[-1].backward()
    optimizer.step()
    return torch.stack(losses).detach()


# --- state

@whole("nonfinite", r"overflow|running_var", r"float32|\.float\(\)|BatchNorm", "aten::(native_)?batch_norm.*", "1",
       model=lambda: filled(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).half(), 400.0))
def running_variance_in_half(model: nn.Module) -> None:
    model(torch.tensor([[1.0], [-1.0]]).expand(2, 4).half()).float().mean().backward()  # here

def with_a_buffer() -> nn.Module:
    model = nn.Linear(4, 4)
    model.register_buffer("seen", torch.zeros((), dtype=F16))
    return model

@whole("nonfinite", r"overflow", FLOAT, "aten::_to_copy", model=with_a_buffer)
def a_moving_average_in_half(model: Any) -> None:
    model(torch.ones(2, 4)).mean().backward()
    model.seen = (model.seen.float() + 7e4).half()  # here


# --- rounding outside of matrix products, forward and backward

table(dtype=B16, tool="precision", rows=[
    ("positions_in_bfloat16", lambda x: x * (torch.arange(4096, dtype=x.dtype)[-16:] - 4088),
     "aten::arange.*", r"arange", FLOAT + "|float32"),
    ("a_filled_tensor", lambda x: x * (torch.full((16,), 1000.7, dtype=x.dtype) - 1000),
     "aten::full.*", r"full", FLOAT + "|float32"),
])
table(dtype=F16, tool="precision", rows=[
    ("times_in_float16", lambda x: x * (torch.linspace(0, 5000, 4999, dtype=x.dtype)[-16:] - 4992),
     "aten::linspace", r"linspace", FLOAT + "|float32"),
])

@planted("aten::_to_copy", r"cast", FLOAT + "|float32", dtype=B16, tool="precision", kind="ampkit")
def a_cast_of_large_numbers(x: Tensor) -> Tensor:
    year = torch.tensor([2001.0, 2003.0]).repeat(8).bfloat16()  # here
    return x * (year - 2000)

@whole("precision", r"seen.*(not|lost|nothing)|update.*(nothing|lost|rounds)|moving|add_|lerp", r"float32|float\(\)",
       "aten::(add_|lerp_).*", model=lambda: nn.Linear(8, 8).bfloat16(),
       state=lambda parameters: [p.detach().clone() + 0.5 for p in parameters])
def moving_average_of_weights(model: nn.Module, average: list[Tensor]) -> None:
    model(torch.ones(2, 8, dtype=B16)).float().mean().backward()
    with torch.no_grad():
        for mean, p in zip(average, model.parameters(), strict=True):
            mean.lerp_(p, 1e-3)  # here

@whole("precision", r"update.*(nothing|lost|rounds)|add_", r"float32|float\(\)|master", "aten::(add_|sub_).*",
       model=lambda: nn.Linear(8, 8).bfloat16())
def update_by_hand(model: Any) -> None:
    model(torch.ones(2, 8, dtype=B16)).float().mean().backward()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(p.grad, alpha=-1e-4)  # here

@whole("precision", r"gradients? .*(0|zero|gone|lost|underflow)", r"GradScaler",
       model=lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)), state=SGD)
def gradients_that_vanish(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    model.zero_grad()
    with autocast("cpu", dtype=F16):
        out = model(torch.ones(4, 8))
    (out.float().mean() * 1e-9).backward()  # here


# --- the loop: what each step of it does, in this order; the line is that of one of them

def inside(model: nn.Module, x: Tensor, optimizer: Any, scaler: Any) -> None:
    with autocast("cpu", dtype=F16):
        loss = model(x).float().square().mean()
        scaler.scale(loss).backward()  # here

DOES: dict[str, Callable[..., Any]] = {
    "zero_grad": lambda model, x, optimizer, scaler: optimizer.zero_grad(),
    "backward": lambda model, x, optimizer, scaler: scaler.scale(loss_of(model, x)).backward(),
    "bfloat16": lambda model, x, optimizer, scaler: scaler.scale(loss_of(model, x, B16)).backward(),
    "unscaled": lambda model, x, optimizer, scaler: loss_of(model, x, B16).backward(),
    "quarter": lambda model, x, optimizer, scaler: (loss_of(model, x, B16) / 4).backward(),
    "inside": inside,
    "unscale_": lambda model, x, optimizer, scaler: scaler.unscale_(optimizer),
    "clip": lambda model, x, optimizer, scaler: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "norm": lambda model, x, optimizer, scaler: nn.utils.get_total_norm([p.grad for p in model.parameters()]),
    "step": lambda model, x, optimizer, scaler: scaler.step(optimizer),
    "update": lambda model, x, optimizer, scaler: scaler.update(),
    "optimizer.step": lambda model, x, optimizer, scaler: optimizer.step(),
}

def six_times(does: list[Callable[..., Any]], *parts: Any) -> None:
    for _ in range(6):
        for one in does:
            one(parts[0], torch.randn(4, 8), *parts[1:])

for name, does, at, cause, change in (
    ("clipped_while_scaled", "zero_grad backward clip step update", "clip", r"clip.*scaled", r"unscale_\(optimizer\)"),
    ("stepped_past_the_scaler", "zero_grad backward optimizer.step update", "optimizer.step",
     r"step.*scaled", r"scaler\.step\(optimizer\)"),
    ("update_forgotten", "zero_grad backward step", "step", r"update", r"scaler\.update\(\)"),
    ("updated_twice", "zero_grad backward step update update", "update", r"update.*(twice|2 times)", r"once"),
    ("unscaled_twice", "zero_grad backward unscale_ unscale_ step update", "unscale_",
     r"unscale_.*(twice|2 times)", r"once"),
    ("backward_inside_the_region", "zero_grad inside step update", "inside",
     r"backward.*(region|autocast)", r"after|outside"),
    ("scaler_with_bfloat16", "zero_grad bfloat16 step update", "bfloat16", r"bfloat16", r"GradGuard"),
    ("gradients_never_zeroed", "unscaled optimizer.step", "optimizer.step", r"zero_grad", r"zero_grad\(\)"),
    ("accumulated_without_dividing", "zero_grad" + 4 * " unscaled" + " optimizer.step", "unscaled",
     r"(4|four) (times|backward).*", r"/ 4"),
    ("norm_read_while_scaled", "zero_grad backward norm step update", "norm",
     r"read.*scaled|scaled.*read", r"unscale_\(optimizer\)"),
    ("stepped_by_both", "zero_grad backward step optimizer.step update", "optimizer.step",
     r"step.*(twice|again|2 times|second)|past the scaler", r"remove|once|scaler\.step"),  # IAHispano/Applio#860
    ("zeroed_before_the_step", "unscaled zero_grad optimizer.step", "zero_grad",
     r"zero_grad", r"before .*backward|after .*step"),  # IDEA-Research/DN-DETR#18
    ("clipped_after_each_micro_batch", "zero_grad" + 4 * " quarter clip" + " optimizer.step", "clip",
     r"clip", r"once|after the last|before .*step"),  # huggingface/transformers#1563
    ("zeroed_for_each_micro_batch", 4 * "zero_grad quarter " + "optimizer.step", "zero_grad",
     r"zero_grad", r"before the first|once|after .*step"),  # pytorch/torchtitan#3575
):
    whole("loop", cause, change, name=name, source=DOES[at], state=SGD, scale=256.0, model=lambda: mlp(8, 8, 1))(
        functools.partial(six_times, [DOES[one] for one in does.split()])
    )

@whole("loop", r"scheduler", r"get_scale|skipped|stepped", state=SGD, scale=2.0**40, model=lambda: mlp(8, 8, 1))
def scheduler_on_skipped_steps(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(6):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, torch.randn(4, 8))).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()  # here
