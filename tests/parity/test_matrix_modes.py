"""Regions beside modes that watch or replace what runs: counters, fake tensors, tracers.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers.matrix import QUIET, Region, default, native, ours, weights

pytestmark = QUIET


@pytest.mark.parametrize("region", [ours, default])
def test_flops_are_counted_inside_and_outside(region: Region) -> None:
    def flops(*contexts: Callable[[], Any], backward: bool = True) -> int:
        """Of a step in these contexts, the first outermost; with the counter as one of them, or around it all."""
        model, x = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Conv1d(4, 3, 3)), torch.randn(2, 4, 6)
        counter = FlopCounterMode(display=False)
        with contextlib.ExitStack() as around, contextlib.ExitStack() as inside:
            if backward:
                around.enter_context(counter)
            for context in contexts:
                inside.enter_context(context())
            if not backward:
                inside.enter_context(counter)
            out = model(x)
            inside.close()
            out.float().sum().backward()
        return counter.get_total_flops()

    assert flops(region) == flops() > 0
    assert flops(region, backward=False) == flops(backward=False) > 0


class Seen(TorchDispatchMode):
    """Notes the operators that reach the Python key, with the dtypes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[torch.dtype, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func.name(), tuple(a.dtype for a in args if isinstance(a, Tensor))))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("outside", [True, False])
def test_dispatch_modes_see_what_runs(outside: bool) -> None:
    """A mode of the user's, whichever side of the region, sees casts and low-precision operators below autograd."""
    x, w = torch.randn(4, 6), torch.randn(3, 6, requires_grad=True)

    def calls(region: Region) -> list[Any]:
        seen = Seen()
        with contextlib.ExitStack() as stack:
            for context in (seen, region()) if outside else (region(), seen):
                stack.enter_context(context)
            F.linear(x, w).softmax(-1)
        return seen.calls

    assert calls(ours) == calls(native)
    assert ("aten::mm", (torch.bfloat16, torch.bfloat16)) in calls(default)


def test_function_modes_see_the_call_and_not_the_casts() -> None:
    names = []

    class Names(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    x, w = torch.randn(4, 6), torch.randn(3, 6)
    with Names(), default():
        out = F.linear(x, w)
    assert out.dtype is torch.bfloat16
    assert names.count("linear") == 1
    assert "to" not in names


@pytest.mark.parametrize("pre_dispatch", [False, True])
@pytest.mark.parametrize("tracing", ["real", "fake", "symbolic"])
def test_make_fx_records_the_casts(tracing: Any, pre_dispatch: bool) -> None:
    """The graph, run outside any region, computes what the region computes."""
    x, w, v = weights()

    def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        with default():
            return F.linear(torch.tanh(F.linear(x, w)), v).softmax(-1)

    graph = make_fx(function, tracing_mode=tracing, pre_dispatch=pre_dispatch)(x, w, v)
    with default():
        around = make_fx(
            lambda x, w, v: F.linear(torch.tanh(F.linear(x, w)), v).softmax(-1),
            tracing_mode=tracing, pre_dispatch=pre_dispatch,
        )(x, w, v)
    expected = function(x, w, v)
    for traced in (graph, around):
        got = traced(x, w, v)
        assert got.dtype is torch.float32
        assert torch.equal(got, expected)
        asked_for = [value for node in traced.graph.nodes for value in (*node.args, *node.kwargs.values())]
        assert asked_for.count(torch.bfloat16) >= 3, traced.code
    assert not torch.is_autocast_enabled("cpu")
