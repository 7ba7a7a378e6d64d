"""Operators of a step are seen once each, with their module, call, line and phase; nothing about the step changes."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks

from ampkit import GradScaler
from ampkit.debugging.operator_calls import OperatorCall, OperatorObserver
from ampkit.debugging.report import NonFiniteReport, Operation
from ampkit.debugging.storage_map import StorageMap


class Seen(OperatorObserver):
    """Keeps what it saw."""

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__(model, NonFiniteReport())
        self.calls: list[Operation] = []

    def __enter__(self) -> Any:
        super().__enter__()
        return self

    def observe(self, call: OperatorCall, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        self.calls.append(Operation(**self.where(call)))
        return out

    def of(self, op: str, phase: str) -> list[Operation]:
        return [call for call in self.calls if call.op == op and call.phase == phase]


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


SQUARE_LINE = Square.forward.__code__.co_firstlineno + 1


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), Square(), nn.Linear(4, 2))


def test_forward_backward_and_optimizer() -> None:
    """Each operator has its phase; one of backward has the module and line of its forward."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), foreach=True)
    with Seen(net) as seen:
        net(torch.randn(3, 4)).sum().backward()
        optimizer.step()
    forward, = seen.of("aten::mul.Tensor", "forward")
    assert (forward.path, forward.call, forward.line) == ("1", 1, SQUARE_LINE)
    assert Path(forward.file).name == Path(__file__).name
    for backward in seen.of("aten::mul.Tensor", "backward"):
        assert (backward.path, backward.call, backward.line) == ("1", 1, SQUARE_LINE)
        assert backward.backward_of == "aten::mul.Tensor"
    assert len(seen.of("aten::mul.Tensor", "backward")) == 2
    assert seen.of("aten::_foreach_addcdiv_.ScalarList", "optimizer")
    assert seen.step == 1
    assert [call.index for call in seen.calls] == list(range(seen.count))


def test_a_scaler_s_own_work_has_a_phase_of_its_own() -> None:
    """torch's and ampkit's; the optimizer that they call is the optimizer."""
    for make in (GradScaler, torch.amp.GradScaler):
        net = model()
        scaler = make("cpu")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with Seen(net) as seen:
            scaler.scale(net(torch.randn(3, 4)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        phases = {call.op: call.phase for call in seen.calls if "amp" in call.op}
        assert set(phases.values()) == {"scaler"}
        assert "aten::_amp_update_scale_" in phases
        assert seen.of("aten::_foreach_add_.List", "optimizer") or seen.of("aten::add_.Tensor", "optimizer")


def test_what_a_tool_computes_when_a_step_ends_is_not_observed() -> None:
    class Computes(Seen):
        def step_ended(self, optimizer: Any) -> None:
            torch.ones(1).exp()

    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Computes(net) as seen:
        optimizer.step()
    assert not seen.of("aten::exp", "forward")


def test_printing_a_tensor_is_not_observed() -> None:
    with Seen() as seen:
        repr(torch.arange(3.0) / 3)
    assert [call.op for call in seen.calls] == ["aten::arange", "aten::div.Tensor"]


def test_tensor_subclasses_take_themselves_apart() -> None:
    """The parts come by; the subclass gets its own operators."""
    from torch.testing._internal.two_tensor import TwoTensor

    both = TwoTensor(torch.ones(2), torch.zeros(2))
    with Seen() as seen:
        out = both.exp()
    assert isinstance(out, TwoTensor)
    assert len(seen.of("aten::exp", "forward")) == 2


def test_hooks_leave_with_the_context() -> None:
    """Also after an exception, and when entering fails."""
    tables = (
        module_hooks._global_forward_hooks, module_hooks._global_forward_pre_hooks,
        optimizer_hooks._global_optimizer_pre_hooks, optimizer_hooks._global_optimizer_post_hooks,
    )
    before = [len(table) for table in tables]
    with pytest.raises(KeyError), Seen():   # noqa: PT012  the context's own end is what is tested
        assert all(len(table) > count for table, count in zip(tables, before, strict=True))
        raise KeyError
    assert [len(table) for table in tables] == before


def test_the_model_must_be_a_module() -> None:
    with pytest.raises(TypeError, match=r"model is list; expected a torch\.nn\.Module, or None"):
        Seen([model()])     # type: ignore[arg-type]


# --- the parts


def test_memory_that_is_gone_is_forgotten() -> None:
    """Its address is not given to another storage while the map remembers it."""
    found: StorageMap[int] = StorageMap()
    for i in range(3000):
        tensor = torch.empty(4)
        assert found.get(tensor) is None
        found.set(tensor[1:], i)
        assert found.get(tensor) == i
    gc.collect()
    found.set(torch.empty(1), 0)
    assert len(found) <= 2048
