"""half_function and its kin: what functions see, inside regions and outside, and how they are registered."""

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ampkit import Policy, Rule, amp, autocast

LOW, TWICE = torch.bfloat16, "ampkit_function_casts::twice"


def seen(*args: Any, **kwargs: Any) -> list[torch.dtype]:
    """The dtypes of tensors among arguments, and of what a matrix product gives them now."""
    tensors = [*args, *kwargs.values()]
    return [t.dtype for t in tensors] + [torch.mm(tensors[0].reshape(1, 1), tensors[0].reshape(1, 1)).dtype]


@pytest.mark.parametrize(
    ("decorate", "expected"),
    [
        (amp.half_function, [LOW, LOW, LOW, torch.int64, LOW]),
        (amp.float_function, [torch.float32, torch.float32, torch.float32, torch.int64, torch.float32]),
        (amp.promote_function, [torch.float32, torch.float32, torch.float32, torch.int64, LOW]),
    ],
    ids=["half", "float", "promote"],
)
def test_what_a_function_sees(decorate: Callable[..., Any], expected: list[torch.dtype]) -> None:
    x, ids = torch.ones(1), torch.ones(1, dtype=torch.int64)
    args = (x, x.half(), x.to(LOW), ids)
    outside = [torch.float32, torch.float16, LOW, torch.int64, torch.float32]
    function = decorate(seen)
    assert function(*args) == outside
    with autocast("cpu", LOW):
        assert function(*args) == expected
        assert function(x, a=x.half(), b=x.to(LOW), c=ids) == expected
        with amp.disable_casts():
            assert function(*args) == outside
    with autocast("cpu", enabled=False):
        assert function(*args) == outside
    assert function.__name__ == "seen"
    assert function.__wrapped__ is seen


def test_containers_are_looked_into_and_casts_differentiated() -> None:
    """float64 passes."""
    x, wide = torch.ones(2, requires_grad=True), torch.ones(1).double()
    with autocast("cpu", LOW):
        y = amp.half_function(lambda batch: [batch["x"][0] * 2, batch["y"]])({"x": [x], "y": wide})
    y[0].float().sum().backward()
    assert [one.dtype for one in y] == [LOW, torch.float64]
    assert (x.grad.dtype, x.grad.tolist()) == (torch.float32, [2.0, 2.0])


@torch.library.custom_op(TWICE, mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x + x


@pytest.mark.parametrize(
    ("register", "owner", "name", "operator", "rule"),
    [
        (amp.register_half_function, torch, "cumsum", "aten::cumsum", Rule.LOWER),
        (amp.register_half_function, F, "softmax", "aten::softmax.int", Rule.LOWER),
        (amp.register_half_function, F, "cross_entropy", "aten::cross_entropy_loss", Rule.LOWER),
        (amp.register_float_function, torch.Tensor, "mm", "aten::mm", Rule.FLOAT32),
        (amp.register_float_function, torch.linalg, "norm", "aten::linalg_norm", Rule.FLOAT32),
        (amp.register_promote_function, torch.Tensor, "lerp", "aten::lerp.Tensor", Rule.PROMOTE),
        (amp.register_half_function, sys.modules[__name__], "twice", TWICE, Rule.LOWER),
        (amp.register_float_function, torch.ops.ampkit_function_casts, "twice", TWICE, Rule.FLOAT32),
    ],
)
def test_operators_get_rules_and_functions_stay(
    register: Callable[..., None], owner: Any, name: str, operator: str, rule: Rule
) -> None:
    """Of torch and of `torch.library`."""
    function = getattr(owner, name)
    register(owner, name)
    assert getattr(owner, name) is function
    assert Policy.default("cpu").explain(operator).rule is rule


def test_other_functions_are_wrapped_where_they_are_once() -> None:
    module = types.ModuleType("somebody_elses")
    module.fast = lambda x: x.dtype  # type: ignore[attr-defined]
    amp.register_half_function(module, "fast")
    wrapped = module.fast
    amp.register_half_function(module, "fast")
    assert module.fast is wrapped
    with autocast("cpu", LOW):
        assert module.fast(torch.ones(1)) is LOW
    assert module.fast(torch.ones(1)) is torch.float32


def test_what_is_refused() -> None:
    with pytest.raises(TypeError, match=r"half_function takes a function, got <class 'torch.nn.modules.linear"):
        amp.half_function(torch.nn.Linear)
    with pytest.raises(TypeError, match="float_function takes a function, got 3"):
        amp.float_function(3)  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="torch has no function 'bmmm' to register"):
        amp.register_half_function(torch, "bmmm")
    with pytest.raises(ValueError, match=r"functional.multi_head_attention_forward is no single operator that"):
        amp.register_half_function(F, "multi_head_attention_forward")
