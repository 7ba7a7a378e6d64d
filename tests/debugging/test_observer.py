"""Operators that no tool observes, bad arguments of the tools, and that no hook stays registered."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks  # pyright: ignore[reportAttributeAccessIssue]
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ampkit import GradScaler
from ampkit.debugging import Examination, NonFiniteError, examine
from ampkit.debugging.checks import LoopOrder
from ampkit.debugging.finding import Report
from ampkit.debugging.observe import observer
from ampkit.debugging.observe.storage_map import StorageMap
from ampkit.debugging.observe.training_loop import Iterations


def test_printing_a_tensor_is_not_observed() -> None:
    with Examination() as report:
        repr(torch.arange(3.0) / 3)
    assert report.operators == 2


def test_tensor_subclasses_take_themselves_apart() -> None:
    """The operators on the parts are observed; the subclass gets its own operator."""
    from torch.testing._internal.two_tensor import TwoTensor

    both = TwoTensor(torch.ones(2), torch.zeros(2))
    with Examination() as report:
        out = both.exp()
    assert isinstance(out, TwoTensor)
    assert report.operators == 2


def state() -> list[Any]:
    """Numbers of hooks, and functions that a tool wraps."""
    tables = (
        module_hooks._global_forward_hooks,
        module_hooks._global_forward_pre_hooks,
        optimizer_hooks._global_optimizer_pre_hooks,
        optimizer_hooks._global_optimizer_post_hooks,
    )
    return [
        *map(len, tables),
        vars(torch.amp.GradScaler)["step"],
        vars(GradScaler)["step"],
        torch.autograd.backward,
        vars(torch.autocast)["__enter__"],
        torch.optim.Optimizer.__init__,
        nn.utils.clip_grad_value_,
    ]


def test_nothing_is_left_behind() -> None:
    """Also after an exception. A wrapped function keeps its name."""
    before, enter = state(), torch.no_grad.__enter__
    with pytest.raises(KeyError), Examination() as report:  # noqa: PT012  the context's own end is what is tested
        unchanged = [i for i, (old, new) in enumerate(zip(before, state(), strict=True)) if old == new]
        assert unchanged == []
        assert torch.autograd.backward.__name__ == "backward"
        assert torch.no_grad.__enter__ is not enter
        raise KeyError
    assert report.status == "inconclusive"
    assert before == state()
    assert torch.no_grad.__enter__ is enter
    with pytest.raises(KeyError), Examination(checks=[LoopOrder]) as report:
        raise KeyError
    assert report.status == "inconclusive"
    assert before == state()


WRONG: Any = 3


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: Examination(WRONG), TypeError, r"model is int; expected a torch\.nn\.Module, or None"),
        (lambda: Examination(on_nonfinite=WRONG), ValueError, "on_nonfinite is 3; expected 'record' or 'raise'"),
        (
            lambda: examine(lambda: None, nn.Linear(1, 1), state=[WRONG]),
            TypeError,
            "state holds int, which cannot be put back; expected state_dict and load",
        ),
    ],
)
def test_bad_input(call: Callable[[], Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call()


def test_memory_that_is_gone_is_forgotten() -> None:
    """Its address is not reused while the map has an entry for it."""
    values: StorageMap[int] = StorageMap()
    for i in range(3000):
        tensor = torch.empty(4)
        assert values.get(tensor) is None
        values.set(tensor[1:], i)
        assert values.get(tensor) == i
    assert len(values._entries) <= 2048


def test_the_loop_check_alone_enters_no_dispatch_mode() -> None:
    """So it may stay on in real training: nothing is observed, and compiled functions stay compiled."""
    compiled = torch.compile(nn.Linear(4, 1), backend="eager")
    with Examination(checks=[LoopOrder]) as report:
        assert _get_current_dispatch_mode_stack() == []
        compiled(torch.ones(2, 4)).sum().backward()
    assert (report.operators, report.compiled, report.status) == (0, False, "clean")


def test_iterations_of_several_optimizers() -> None:
    """Steps of two optimizers are one iteration; one that appears late, or anew in each epoch, changes nothing."""
    iterations = Iterations()
    keys = [type("Optimizer", (), {})() for _ in range(6)]
    for _ in range(5):
        iterations.step_ended(keys[0])
    assert iterations.number == 5
    for _ in range(10):
        iterations.step_ended(keys[0])
        iterations.step_ended(keys[1])
    assert iterations.number == 15
    one = Iterations()
    for optimizer in keys:
        for _ in range(10):
            one.step_ended(optimizer)
    assert 50 <= one.number <= 60


def test_a_torch_without_the_callback_of_compiled_functions_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a report of compiled functions would not say that they ran eagerly."""
    from torch._dynamo import eval_frame

    monkeypatch.delattr(eval_frame, "_callback_from_stance")
    with pytest.raises(ImportError, match="_callback_from_stance"):
        Examination().__enter__()


def _seen_in(examination: Examination, factor: float) -> tuple[list[int], Report]:
    """Return the steps whose operators are observed, if the loss of step 60 is multiplied by a factor."""
    model, seen = nn.Linear(2, 1), []
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with examination as report:
        for step in range(160):
            if _get_current_dispatch_mode_stack():
                seen.append(step)
            loss = model(torch.ones(1, 2)).square().sum() * (factor if step == 60 else 1.0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return seen, report


@pytest.mark.parametrize("fault", [False, True])
def test_some_steps_of_a_long_run_are_observed(fault: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between them the loss is observed: one that is not finite is reported, and operators are observed again."""
    monkeypatch.setattr(observer, "_FULL_OPERATORS", 0)
    seen, report = _seen_in(Examination(), math.inf if fault else 1.0)
    expected = [*range(32), *range(128, 144), *(range(61, 77) if fault else ())]
    assert seen == sorted(expected)
    assert [len(losses) for losses in report.losses.values()] == [160]
    assert report.steps == 160
    assert f"the operators of {160 - len(expected)} of 160 steps" in report.not_checked[0]
    assert ["--from-step 60" in text for text in report.not_checked[1:]] == [True] * bool(fault)
    arrived = [finding.fix.code for finding in report.nonfinite if finding.kind == "arrived"]
    assert [code.startswith("--from-step 0: ") for code in arrived] == [True] * bool(fault)
    assert not _get_current_dispatch_mode_stack()
    with pytest.raises(NonFiniteError, match="step 60"):  # which observes all
        _seen_in(Examination(on_nonfinite="raise"), math.inf)
