"""Faults from public threads, with their answers, written down before the tools were changed for them.

Each has five answers: operator, module, line, cause, change. The line is the one with the comment `# here`; the cause
and the change are patterns that the report must contain. Nothing here is tuned to the tools: a fault that they do not
answer is listed in `test_battery.py` with what is missing.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampkit import GradScaler, autocast
from tests.debugging.wild import Middle

__all__ = ["FAULTS", "Fault", "judged"]

Step = Callable[[], Any]
F16, B16, F32 = torch.float16, torch.bfloat16, torch.float32
POLICY = r'for_modules\((model, )?\{"2": torch\.float32'
LINES = r"torch\.autocast\(\"cpu\", enabled=False\)"
FLOAT = r"\.float\(\)"


class Fault(NamedTuple):
    """What was planted, and what a report must say of it. An answer that is "" is not asked for."""

    name: str
    tool: str               # nonfinite, precision or loop
    build: Callable[[], tuple[nn.Module, Step]]
    source: Callable[..., Any]
    op: str
    module: str
    cause: str
    change: str

    @property
    def line(self) -> int:
        """Of this file, the one with the fault."""
        lines, first = inspect.getsourcelines(self.source)
        return first + next(i for i, text in enumerate(lines) if "# here" in text)


FAULTS: list[Fault] = []


def region(kind: str, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """What the user's step runs in."""
    if kind == "torch":
        return torch.autocast("cpu", dtype=dtype)
    return autocast("cpu", dtype=dtype) if kind == "ampkit" else nullcontext()


def planted(
    op: str, cause: str, change: str, *, dtype: torch.dtype = F32, kind: str = "none", tool: str = "nonfinite",
    loss: Callable[[Tensor], Tensor] = lambda y: y.float().mean(), module: str = "2",
) -> Callable[[Any], Any]:
    """A function of a layer's output, (8, 16), between layers; in a model of `dtype`, or in a region with it."""
    def add(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def build() -> tuple[nn.Module, Step]:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), Middle(function))
            batch = torch.randn(8, 16)
            if kind == "none":
                model, batch = model.to(dtype), batch.to(dtype)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

            def step() -> Tensor:
                optimizer.zero_grad()
                with region(kind, dtype):
                    out = loss(model(batch))
                out.backward()
                optimizer.step()
                return out.detach()

            return model, step

        FAULTS.append(Fault(function.__name__, tool, build, function, op, module, cause, change))
        return function

    return add


def whole(tool: str, cause: str, change: str, op: str = "", module: str = "") -> Callable[[Any], Any]:
    """A function that returns a model and its step."""
    def add(build: Callable[[], tuple[nn.Module, Step]]) -> Callable[[], tuple[nn.Module, Step]]:
        FAULTS.append(Fault(build.__name__, tool, build, build, op, module, cause, change))
        return build

    return add


# --- constants that are 0 in float16: the report must name the constant and its line, and not blame the arithmetic


@planted("aten::div.Tensor", r"1e-12 is 0 in float16", FLOAT, dtype=F16)
def normalise_with_a_small_eps(x: Tensor) -> Tensor:
    y = x * 0
    length = y.norm(dim=-1, keepdim=True) + 1e-12       # here
    return y / length + x


@planted("aten::log", r"1e-08 is 0 in float16", FLOAT, dtype=F16)
def log_of_a_clamp(x: Tensor) -> Tensor:
    y = (x * 0).clamp(min=1e-8)     # here
    return y.log() * x


@planted("aten::div.Tensor", r"1e-08 is 0 in float16", FLOAT, dtype=F16)
def a_norm_of_ones_own(x: Tensor) -> Tensor:
    y = x * 0 + 1
    spread = (y - y.mean(-1, keepdim=True)).square().mean(-1, keepdim=True).sqrt().detach()
    spread = spread + 1e-8       # here
    return (y - 1) / spread + x


@planted("aten::reciprocal", r"1e-09 is 0 in float16", FLOAT, dtype=F16)
def a_factory_of_eps(x: Tensor) -> Tensor:
    eps = torch.full((16,), 1e-9, dtype=x.dtype)        # here
    return (x * 0 + eps).reciprocal() * x * 1e-9


@planted("aten::log", r"1e-10 is 0 in float16|rounded.*to 0|0 in float16", FLOAT, dtype=F16)
def eps_in_a_tensor(x: Tensor) -> Tensor:
    eps = torch.tensor(1e-10)
    eps = eps.to(x.dtype)       # here
    return (x * 0 + eps).log() * x


@planted("aten::log", r"the cast to float16|0 in float16", LINES + "|" + FLOAT + "|" + POLICY, dtype=F16, kind="ampkit")
def probabilities_in_half(x: Tensor) -> Tensor:
    p = torch.softmax(x.float() + torch.arange(16.0) * 2.5, -1)
    p = p.half()       # here
    return p.log() * x


@planted("aten::rsqrt", r"0 in float16|underflow", FLOAT, dtype=F16)
def square_that_underflows(x: Tensor) -> Tensor:
    y = (x * 0 + 1e-5)
    y = y * y       # here
    return torch.rsqrt(y) * x * 1e-5


@planted("aten::div.Tensor", r"0 in float16|underflow", FLOAT, dtype=F16)
def exponential_that_underflows(x: Tensor) -> Tensor:
    weight = torch.exp(x * 0 - 20)     # here
    return weight / weight.sum(-1, keepdim=True) * x


@whole("nonfinite", r"1e-08 is 0 in float16", r"eps|FP16Optimizer", "aten::(_foreach_)?addcdiv_")
def adam_in_half() -> tuple[nn.Module, Step]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.zeros(2, 4, dtype=F16)).float().sum().backward()
        optimizer.step()        # here

    return model, step


@whole("nonfinite", r"-1e\+10|is -inf in float16|the cast to float16|ends at", r"finfo|" + FLOAT,
       "aten::_to_copy", "")
def mask_of_large_numbers() -> tuple[nn.Module, Step]:
    model = nn.Linear(8, 8).half()

    def step() -> None:
        mask = torch.zeros(8, 8)
        mask[3] = torch.finfo(torch.float32).min
        scores = model(torch.randn(8, 8).half()) + mask.to(F16)     # here
        (scores.softmax(-1) @ scores.detach().nan_to_num(0, 0, 0)).float().mean().backward()

    return model, step


@planted("aten::rsqrt", r"1e-10 is 0 in float16", FLOAT, dtype=F16)
def root_mean_square_norm(x: Tensor) -> Tensor:
    y = x * 0
    square = y.pow(2).mean(-1, keepdim=True) + 1e-10     # here
    return y * torch.rsqrt(square) + x


@planted("aten::log", r"0 in float16.*underflows", FLOAT, dtype=F16)
def log_of_a_softmax(x: Tensor) -> Tensor:
    p = torch.softmax(x + torch.arange(16.0).half() * 3, -1)    # here
    return p.log() * 1e-3


@planted("aten::log", r"0 in float16.*rounded", FLOAT, dtype=F16)
def entropy_by_hand(x: Tensor) -> Tensor:
    p = torch.sigmoid(x * 0 + 12)       # here
    return (1 - p).log() * x


# --- undefined in any precision: advice for the user's own code, by operator


@planted("aten::sqrt", r"at 0", r"where", module="2")
def length_by_hand(x: Tensor) -> Tensor:
    return (x * 0).square().sum(-1).sqrt() + x.sum(-1)      # here


@planted("aten::log", r"log.*0|of 0", r"clamp")
def log_of_zero(x: Tensor) -> Tensor:
    return (x * 0).log() + x        # here


@planted("aten::acos", r"at 1", r"clamp")
def angle_of_the_same(x: Tensor) -> Tensor:
    return torch.acos(x * 0 + 1) + x        # here


@planted("aten::div.Tensor", r"0 / 0|by 0|is 0", r"clamp")
def mean_over_no_element(x: Tensor) -> Tensor:
    chosen = x > 5
    return (x * chosen).sum() / chosen.sum() + x        # here


@planted("aten::mean", r"no elements|0 elements", r"numel\(\)|empty")
def mean_of_an_empty_choice(x: Tensor) -> Tensor:
    return x[x > 5].mean() + x      # here


@planted("aten::std.correction", r"1 element|one element", r"correction=0|unbiased")
def deviation_of_one_value(x: Tensor) -> Tensor:
    return x / (x[:, :1].std(-1, keepdim=True) + 1)     # here


@planted("aten::hypot", r"at 0|0 / 0|is 0", r"where")
def diagonal_of_nothing(x: Tensor) -> Tensor:
    return torch.hypot(x * 0, x * 0) + x        # here


@planted("aten::exp", r"overflow", r"clamp|logsumexp|softplus|subtract")
def exponential_too_large(x: Tensor) -> Tensor:
    return (x * 0 + 800).exp().log() + x        # here


# --- integers among the causes


@planted("aten::nll_loss_forward", r"8 of 8 targets are -100", r"ignore_index|skip", module="",
         loss=lambda y: F.cross_entropy(y, torch.full((8,), -100)))
def every_target_ignored(x: Tensor) -> Tensor:
    return x * 1        # here (the loss, on line of its lambda)


@planted("aten::_ctc_loss.Tensor", r"longer than|target", r"zero_infinity")
def targets_longer_than_inputs(x: Tensor) -> Tensor:
    long = torch.ones(1, 8, dtype=torch.int64)
    return F.ctc_loss(x[:, None].log_softmax(-1), long, torch.tensor([8]), torch.tensor([8]))        # here


@planted("aten::nll_loss_forward", r"weight", r"weight")
def class_weights_that_are_zero(x: Tensor) -> Tensor:
    return F.cross_entropy(x, torch.zeros(8, dtype=torch.int64), weight=torch.tensor([0.0] + [1.0] * 15))  # here


# --- overflows, in the dialect of the user's region


def scores(x: Tensor) -> Tensor:
    return x * 0 + 300


@planted("aten::mm", r"overflow", LINES, dtype=F16, kind="torch")
def attention_under_torch_autocast(x: Tensor) -> Tensor:
    q = scores(x)
    return (q @ q.t()).softmax(-1) @ x      # here


@planted("aten::mm", r"overflow", POLICY, dtype=F16, kind="ampkit")
def attention_under_ampkit(x: Tensor) -> Tensor:
    q = scores(x)
    return (q @ q.t()).softmax(-1) @ x      # here


@planted("aten::mm", r"overflow", FLOAT, dtype=F16)
def attention_in_a_half_model(x: Tensor) -> Tensor:
    q = scores(x)
    return (q @ q.t()).softmax(-1).to(x.dtype) @ x      # here


@planted("aten::addmm", r"overflow", LINES, dtype=F16, kind="torch")
def a_layer_under_torch_autocast(x: Tensor) -> Tensor:
    y = F.linear(x + 300, torch.full((4, 16), 300.0), torch.ones(4))        # here
    return y / 1e4


@planted("aten::pow.Tensor_Scalar", r"overflow", FLOAT, dtype=F16, loss=lambda y: y.float().mean() * 1e-3)
def squared_error_in_half(x: Tensor) -> Tensor:
    return (x + 300).pow(2)      # here


@planted("aten::sum", r"overflow", FLOAT, dtype=F16)
def sum_of_many_in_half(x: Tensor) -> Tensor:
    return (x * 0 + 600).sum() / 128 + x        # here


@planted("aten::exp", r"overflow", FLOAT + "|" + POLICY, dtype=F16)
def log_sum_exp_by_hand(x: Tensor) -> Tensor:
    return (x + 12).exp().sum(-1).log()     # here


@planted("aten::_to_copy", r"overflow", r".", dtype=F16, kind="ampkit")
def cast_of_a_time(x: Tensor) -> Tensor:
    when = (x.float() * 0 + 1.7e5).half()      # here
    return x * when


@whole("nonfinite", r"overflow", r"loss / 32\b", "aten::mm", "")
def loss_that_is_too_large() -> tuple[nn.Module, Step]:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1)).half()

    def step() -> None:
        model.zero_grad()
        out = model(torch.ones(8, 16, dtype=F16) * 100)     # here
        (out.float().sum() * 2e3).backward()

    return model, step


# --- a bad sample, a bad micro-batch: which


@planted("aten::div.Tensor", r"row 3", r"clamp")
def one_sample_without_elements(x: Tensor) -> Tensor:
    mask = torch.ones(8, 16)
    mask[3] = 0
    return (x * mask).sum(-1) / mask.sum(-1)        # here


@whole("nonfinite", r"micro-batch 3", r".", "aten::log", "1")
def third_micro_batch() -> tuple[nn.Module, Step]:
    def logarithm(x: Tensor) -> Tensor:
        return x.log()      # here

    model = nn.Sequential(nn.Linear(4, 1), Middle(logarithm))
    nn.init.constant_(model[0].weight, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        for value in (1.0, 2.0, 0.0, 3.0):
            (model(torch.full((2, 4), value) - model[0].bias.detach().expand(2, 1) / 4).mean() / 4).backward()
        optimizer.step()

    return model, step


# --- state


@whole("nonfinite", r"overflow|running_var", r"float32|\.float\(\)|BatchNorm", "aten::(native_)?batch_norm.*", "1")
def running_variance_in_half() -> tuple[nn.Module, Step]:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).half()
    nn.init.constant_(model[0].weight, 400.0)

    def step() -> None:
        model(torch.tensor([[1.0], [-1.0]]).expand(2, 4).half()).float().mean().backward()      # here

    return model, step


@whole("nonfinite", r"overflow", r".", "aten::_to_copy", "")
def a_moving_average_in_half() -> tuple[nn.Module, Step]:
    model = nn.Linear(4, 4)
    model.register_buffer("seen", torch.zeros((), dtype=F16))

    def step() -> None:
        model(torch.ones(2, 4)).mean().backward()
        model.seen = (model.seen.float() + 7e4).half()       # here

    return model, step


# --- rounding outside of matrix products, forward and backward


@planted("aten::arange.*", r"arange", FLOAT + "|float32", dtype=B16, tool="precision", kind="none")
def positions_in_bfloat16(x: Tensor) -> Tensor:
    where = torch.arange(4096, dtype=x.dtype)[-16:]     # here
    return x * (where - 4088)


@planted("aten::linspace", r"linspace", FLOAT + "|float32", dtype=F16, tool="precision", kind="none")
def times_in_float16(x: Tensor) -> Tensor:
    times = torch.linspace(0, 5000, 4999, dtype=x.dtype)[-16:]      # here
    return x * (times - 4992)


@planted("aten::full.*", r"full", FLOAT + "|float32", dtype=B16, tool="precision", kind="none")
def a_filled_tensor(x: Tensor) -> Tensor:
    level = torch.full((16,), 1000.7, dtype=x.dtype)      # here
    return x * (level - 1000)


@planted("aten::_to_copy", r"cast", FLOAT + "|float32", dtype=B16, tool="precision", kind="ampkit")
def a_cast_of_large_numbers(x: Tensor) -> Tensor:
    year = torch.tensor([2001.0, 2003.0]).repeat(8).bfloat16()        # here
    return x * (year - 2000)


@whole("precision", r"seen.*(not|lost|nothing)|update.*(nothing|lost|rounds)|moving|add_|lerp", r"float32|float\(\)",
       "aten::(add_|lerp_).*", "")
def moving_average_of_weights() -> tuple[nn.Module, Step]:
    model = nn.Linear(8, 8).bfloat16()
    average = [p.detach().clone() + 0.5 for p in model.parameters()]

    def step() -> None:
        model(torch.ones(2, 8, dtype=B16)).float().mean().backward()
        with torch.no_grad():
            for mean, p in zip(average, model.parameters(), strict=True):
                mean.lerp_(p, 1e-3)      # here

    return model, step


@whole("precision", r"update.*(nothing|lost|rounds)|add_", r"float32|float\(\)|master", "aten::(add_|sub_).*", "")
def update_by_hand() -> tuple[nn.Module, Step]:
    model = nn.Linear(8, 8).bfloat16()

    def step() -> None:
        model(torch.ones(2, 8, dtype=B16)).float().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad, alpha=-1e-4)      # here

    return model, step


@whole("precision", r"gradients? .*(0|zero|gone|lost)", r"GradScaler", "", "")
def gradients_that_vanish() -> tuple[nn.Module, Step]:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))

    def step() -> None:
        model.zero_grad()
        with autocast("cpu", dtype=F16):
            out = model(torch.ones(4, 8))
        (out.float().mean() * 1e-9).backward()      # here

    return model, step


# --- the loop


def training(
    loop: Callable[[nn.Module, Tensor, torch.optim.Optimizer, Any], None], scaler: bool = True
) -> tuple[nn.Module, Step]:
    """A model, and six iterations of a loop over one batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ours = GradScaler("cpu", init_scale=256.0) if scaler else None

    def step() -> None:
        for _ in range(6):
            loop(model, torch.randn(4, 8), optimizer, ours)

    return model, step


def loss_of(model: nn.Module, x: Tensor, dtype: torch.dtype = F16) -> Tensor:
    with autocast("cpu", dtype=dtype):
        return model(x).float().square().mean()


Loop = Callable[[nn.Module, Tensor, torch.optim.Optimizer, Any], None]


def loop(cause: str, change: str, *, scaler: bool = True) -> Callable[[Loop], Loop]:
    """A loop with something missing, twice, or out of order."""
    def add(body: Loop) -> Loop:
        FAULTS.append(Fault(body.__name__, "loop", lambda: training(body, scaler), body, "", "", cause, change))
        return body

    return add


@loop(r"clip.*scaled", r"unscale_\(optimizer\)")
def clipped_while_scaled(model: nn.Module, x: Tensor, optimizer: Any, scaler: Any) -> None:
    optimizer.zero_grad()
    scaler.scale(loss_of(model, x)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)       # here
    scaler.step(optimizer)
    scaler.update()


@loop(r"step.*scaled", r"scaler\.step\(optimizer\)")
def stepped_past_the_scaler(model: nn.Module, x: Tensor, optimizer: Any, scaler: Any) -> None:
    optimizer.zero_grad()
    scaler.scale(loss_of(model, x)).backward()
    optimizer.step()        # here
    scaler.update()


@loop(r"update", r"scaler\.update\(\)")
def update_forgotten(model: nn.Module, x: Tensor, optimizer: Any, scaler: Any) -> None:
    optimizer.zero_grad()
    scaler.scale(loss_of(model, x)).backward()
    scaler.step(optimizer)      # here


@loop(r"update.*(twice|2 times)", r"once")
def updated_twice(model: nn.Module, x: Tensor, optimizer: Any, scaler: Any) -> None:
    optimizer.zero_grad()
    scaler.scale(loss_of(model, x)).backward()
    scaler.step(optimizer)
    scaler.update()
    scaler.update()     # here


@loop(r"unscale_.*(twice|2 times)", r"once")
def unscaled_twice(model: nn.Module, x: Tensor, optimizer: Any, scaler: Any) -> None:
    optimizer.zero_grad()
    scaler.scale(loss_of(model, x)).backward()
    scaler.unscale_(optimizer)
    with contextlib.suppress(RuntimeError):
        scaler.unscale_(optimizer)      # here
    scaler.step(optimizer)
    scaler.update()


@loop(r"backward.*(region|autocast)", r"after|outside")
def backward_inside_the_region(model: nn.Module, x: Tensor, optimizer: Any, scaler: Any) -> None:
    optimizer.zero_grad()
    with autocast("cpu", dtype=F16):
        loss = model(x).float().square().mean()
        scaler.scale(loss).backward()       # here
    scaler.step(optimizer)
    scaler.update()


@loop(r"bfloat16", r"enabled=False|without")
def scaler_with_bfloat16(model: nn.Module, x: Tensor, optimizer: Any, scaler: Any) -> None:
    optimizer.zero_grad()
    loss = loss_of(model, x, B16)
    scaler.scale(loss).backward()       # here
    scaler.step(optimizer)
    scaler.update()


@loop(r"zero_grad", r"zero_grad\(\)", scaler=False)
def gradients_never_zeroed(model: nn.Module, x: Tensor, optimizer: Any, scaler: Any) -> None:
    loss_of(model, x, B16).backward()
    optimizer.step()        # here


@loop(r"(4|four) (times|backward).*", r"/ 4", scaler=False)
def accumulated_without_dividing(model: nn.Module, x: Tensor, optimizer: Any, scaler: Any) -> None:
    optimizer.zero_grad()
    for _ in range(4):
        loss_of(model, x, B16).backward()       # here
    optimizer.step()


@loop(r"read.*scaled|scaled.*read", r"unscale_\(optimizer\)")
def norm_read_while_scaled(model: nn.Module, x: Tensor, optimizer: Any, scaler: Any) -> None:
    optimizer.zero_grad()
    scaler.scale(loss_of(model, x)).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])     # here
    assert math.isfinite(norm)
    scaler.step(optimizer)
    scaler.update()


@whole("loop", r"scheduler", r"get_scale|skipped|stepped")
def scheduler_on_skipped_steps() -> tuple[nn.Module, Step]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    scaler = GradScaler("cpu", init_scale=2.0**40)

    def step() -> None:
        for _ in range(6):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, torch.randn(4, 8))).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()        # here

    return model, step


# --- judging


def report_of(fault: Fault) -> str:
    """What the tool says, as text."""
    from ampkit import debugging

    model, step = fault.build()
    if fault.tool == "nonfinite":
        return str(debugging.find_nonfinite(step, model))
    if fault.tool == "precision":
        return str(debugging.compare_precision(step, model))
    with debugging.check_loop() as report, contextlib.suppress(RuntimeError, AssertionError):
        step()
    return str(report)


def judged(fault: Fault) -> tuple[dict[str, bool], str]:
    """Each answer, right or not, and the report. What is not asked for is not in it."""
    text = report_of(fault)
    finding = text.partition("\nthen ")[0]
    change = "\n".join(re.findall(r"^  (?:change|advice) .*(?:\n {12}.*)*", finding, re.MULTILINE))
    rows = {
        "op": rf"\b{fault.op}\b" if fault.op else "",
        "module": rf", {re.escape(fault.module)}[ ,(\n]" if fault.module else "",
        "line": rf"battery\.py:{fault.line}\b" if fault.name != "every_target_ignored" else r"battery\.py:",
        "cause": fault.cause,
    }
    answers = {name: re.search(pattern, finding) is not None for name, pattern in rows.items() if pattern}
    answers["change"] = re.search(fault.change, change) is not None and "not verified: with it" not in finding
    return answers, text
