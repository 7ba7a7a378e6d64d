"""Planted faults: how they are written, and how the answers of a report are judged.

A fault is a row of a table, or a function under one of two decorators: a layer (`planted`) or a step (`whole`). Its
file is named in `test_battery.py`. Each has five answers: operator, module, line, cause, change. The line is that of
the lambda, or the one with the comment `# here`, in the function or its decorator; the others are patterns that the
report must contain, and "" is not asked for. An operator of backward is written "in backward of aten::sqrt".
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ampkit import GradScaler, autocast, debugging
from ampkit.debugging.finding import Finding, Report
from tests.debugging.models import Middle

Step = Callable[[], Any]
F16, B16, F32 = torch.float16, torch.bfloat16, torch.float32
# Changes: a policy for steps in ampkit's regions, code around lines for those in torch's, `.float()` for the rest.
POLICY = r'for_modules\((model, )?\{"2": torch\.float32'
LINES = r"torch\.autocast\(\"cpu\", enabled=False\)"
FLOAT = r"\.float\(\)"


def by_name(*functions: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    return {function.__name__: function for function in functions}


def line_in(function: Callable[..., Any]) -> int:
    """The number of the line of a lambda, or of the one with the comment `# here` in a function or its decorator."""
    line = function.__code__.co_firstlineno
    if function.__name__ != "<lambda>":
        line += next(i for i, text in enumerate(inspect.getsourcelines(function)[0]) if "# here" in text)
    return line


class Fault(NamedTuple):
    """A planted fault, and the answers that a report must give."""

    name: str
    tool: str  # nonfinite, precision or loop: how the step runs
    build: Callable[[], tuple[nn.Module, Step]]
    source: Callable[..., Any]
    op: str
    module: str
    cause: str
    change: str

    @property
    def line(self) -> str:
        """The file and the line with the fault."""
        return f"{Path(inspect.getfile(self.source)).name}:{line_in(self.source)}"


FAULTS: list[Fault] = []
SGD = functools.partial(torch.optim.SGD, lr=0.1)


def region(kind: str, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """The region that the user's step runs in; none for another `kind`."""
    if kind == "torch":
        return torch.autocast("cpu", dtype=dtype)
    return autocast("cpu", dtype=dtype) if kind == "ampkit" else nullcontext()


def planted(
    op: str,
    cause: str,
    change: str,
    *,
    dtype: torch.dtype = F32,
    kind: str = "none",
    tool: str = "nonfinite",
    loss: Callable[[Tensor], Tensor] = lambda y: y.float().mean(),
    module: str = "2",
    source: Callable[..., Any] | None = None,
    name: str = "",
) -> Callable[[Any], Any]:
    """A function of a layer's output, (8, 16), as the last layer; in a model of `dtype`, or in a region with it.

    `source`: the function with the line, if it is another one.
    """

    def add(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        low = dtype if kind == "none" else F32

        def step(model: nn.Module, state: tuple[torch.optim.Optimizer, Tensor]) -> Tensor:
            optimizer, batch = state
            optimizer.zero_grad()
            with region(kind, dtype):
                out = loss(model(batch))
            out.backward()
            optimizer.step()
            return out.detach()

        whole(
            tool,
            cause,
            change,
            op,
            module,
            source=source or function,
            name=name or function.__name__,
            model=lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh(), Middle(function)).to(low),
            state=lambda parameters: (SGD(parameters), torch.randn(8, 16).to(low)),
        )(step)
        return function

    return add


def table(rows: list[tuple[str, Callable[[Tensor], Tensor], str, str, str]], **how: Any) -> None:
    """Faults of one line: name, function, and the answers operator, cause and change."""
    for name, function, *answers in rows:
        planted(*answers, name=name, **how)(function)


def whole(
    tool: str,
    cause: str,
    change: str,
    op: str = "",
    module: str = "",
    *,
    model: Callable[[], nn.Module],
    state: Callable[[Any], Any] | None = None,
    scale: float = 0.0,
    before: int = 0,
    source: Callable[..., Any] | None = None,
    name: str = "",
) -> Callable[[Any], Any]:
    """A function as the step: of the model, and of an optimizer and a scaler where they are asked for.

    `state`: makes the optimizer, or other memory, of the parameters. `scale`: with which the scaler begins.
    `before`: so many steps run without a tool.
    """

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        def build() -> tuple[nn.Module, Step]:
            torch.manual_seed(0)
            parts: list[Any] = [model()]
            if state:
                parts.append(state(parts[0].parameters()))
            if scale:
                parts.append(GradScaler("cpu", init_scale=scale))
            for _ in range(before):
                function(*parts)
            return parts[0], functools.partial(function, *parts)

        FAULTS.append(Fault(name or function.__name__, tool, build, source or function, op, module, cause, change))
        return function

    return add


def loss_of(model: nn.Module, x: Tensor, dtype: torch.dtype = F16) -> Tensor:
    """A loss, in a region."""
    with autocast("cpu", dtype=dtype):
        return model(x).float().square().mean()


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """The model's state and that of torch's random number generator."""
    return {**model.state_dict(), "random numbers": torch.get_rng_state()}


def report_of(fault: Fault) -> Report:
    """The report of `examine`, or for a loop of an `Examination` around it."""
    model, step = fault.build()
    if fault.tool == "loop":
        with debugging.Examination(model) as report, contextlib.suppress(RuntimeError, AssertionError):
            step()
        return report
    before = {name: value.clone() for name, value in state_of(model).items()}
    report = debugging.examine(step, model, steps=1 if fault.tool == "nonfinite" else 12)
    changed = [name for name, value in state_of(model).items() if not torch.equal(value, before[name])]
    assert changed == [], "examine did not restore the state"
    return report


def judged(fault: Fault) -> tuple[dict[str, bool], Report]:
    """For each answer that is asked for, whether the first finding has it; and the report."""
    report = report_of(fault)
    first = next(iter(report.ranked()), None)
    text = "" if first is None else "\n".join(first.lines())
    module, _, call = fault.module.partition(" (call ")
    rows = {
        "op": rf"\b{fault.op}\b" if fault.op else "",
        "module": (rf'module "{re.escape(module)}"' + f", call {call[:-1]}" * bool(call)) if module else "",
        "line": rf"\b{re.escape(fault.line)}\b",
        "cause": fault.cause,
    }
    answers = {name: re.search(pattern, text) is not None for name, pattern in rows.items() if pattern}
    answers["change"] = first is not None and re.search(fault.change, first.fix.code) is not None
    return answers, report


@functools.cache
def lines_of(file: str) -> dict[str, int]:
    """The numbers of the lines of a file that end with a comment, by the comment."""
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    return {line.rpartition("  # ")[2]: number for number, line in enumerate(lines, 1) if "  # " in line}


def line_of(file: str, text: str) -> int:
    """The number of the line of a file that ends with a comment."""
    return lines_of(file)[text]


def findings(run: Step, model: nn.Module | None = None) -> list[Finding]:
    """The findings of an examination of a run."""
    with debugging.Examination(model) as report:
        run()
    return report.ranked()


def only(run: Step, model: nn.Module | None = None) -> Finding:
    """The one finding of an examination of a run."""
    (found,) = findings(run, model)
    return found


def trained(model: nn.Module, loss: Callable[[], Tensor], steps: int = 4) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def run() -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()

    return run
