"""Operators that no tool observes, bad arguments of the tools, and that no hook stays registered."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks  # pyright: ignore[reportAttributeAccessIssue]

from ampkit import GradScaler
from ampkit.debugging import check_loop, compare_precision, detect_nonfinite, find_nonfinite
from ampkit.debugging.storage_map import StorageMap


def test_printing_a_tensor_is_not_observed() -> None:
    with detect_nonfinite() as report:
        repr(torch.arange(3.0) / 3)
    assert report.operators == 2


def test_tensor_subclasses_take_themselves_apart() -> None:
    """The operators on the parts are observed; the subclass gets its own operator."""
    from torch.testing._internal.two_tensor import TwoTensor

    both = TwoTensor(torch.ones(2), torch.zeros(2))
    with detect_nonfinite() as report:
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
        nn.utils.clip_grad_value_,
    ]


def test_nothing_is_left_behind() -> None:
    """Also after an exception. A wrapped function keeps its name."""
    before = state()
    with pytest.raises(KeyError), detect_nonfinite() as report:  # noqa: PT012  the context's own end is what is tested
        unchanged = [i for i, (old, new) in enumerate(zip(before, state(), strict=True)) if old == new]
        assert unchanged == []
        assert torch.autograd.backward.__name__ == "backward"
        raise KeyError
    assert report.status == "inconclusive"
    assert before == state()
    with pytest.raises(KeyError), check_loop() as report:
        raise KeyError
    assert report.status == "inconclusive"
    assert before == state()


WRONG: Any = 3


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: detect_nonfinite(WRONG), TypeError, r"model is int; expected a torch\.nn\.Module, or None"),
        (
            lambda: compare_precision(lambda: None, WRONG),
            TypeError,
            r"model is int; expected a torch\.nn\.Module, or None",
        ),
        (lambda: detect_nonfinite(on_found=WRONG), ValueError, "on_found is 3; expected 'raise' or 'record'"),
        (
            lambda: compare_precision(lambda: None, None, torch.float16),
            ValueError,
            r"reference is torch\.float16; expected torch\.float32 or torch\.float64",
        ),
        (
            lambda: find_nonfinite(lambda: None, nn.Linear(1, 1), state=[WRONG]),
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
    gc.collect()
    values.set(torch.empty(1), 0)
    assert len(list(values.values())) <= 2048
