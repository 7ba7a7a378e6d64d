"""Operators of a step are seen once each, with their module, call, line and phase; nothing about the step changes."""

import gc
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks
from torch.utils.checkpoint import checkpoint

from ampkit import GradScaler, autocast
from ampkit.debugging.operator_calls import OperatorCall, OperatorObserver, Place
from ampkit.debugging.operator_facts import facts_of, readable, tensors_in
from ampkit.debugging.source_lines import find_caller
from ampkit.debugging.storage_map import StorageMap


class Seen(OperatorObserver):
    """Keeps what it saw."""

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__(model)
        self.calls: list[tuple[OperatorCall, Place]] = []

    def observe(self, call: OperatorCall, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        self.calls.append((call, self.place(call)))
        return out

    def of(self, op: str, phase: str) -> list[tuple[OperatorCall, Place]]:
        return [(call, place) for call, place in self.calls if call.op == op and call.phase == phase]


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
    (_, forward), = seen.of("aten::mul.Tensor", "forward")
    assert (forward.module.path, forward.module.number) == ("1", 1)     # type: ignore[union-attr]
    assert forward.line is not None
    assert (Path(forward.line.file).name, forward.line.line) == (Path(__file__).name, SQUARE_LINE)
    backward = seen.of("aten::mul.Tensor", "backward")
    assert [place[:2] for _, place in backward] == [forward[:2]] * 2
    assert {place.backward_of for _, place in backward} == {"aten::mul.Tensor"}
    assert {call.node for call, _ in backward} == {"MulBackward0"}
    assert seen.of("aten::_foreach_addcdiv_.ScalarList", "optimizer")
    assert {call.step for call, _ in seen.calls if call.op.startswith("aten")} == {0}
    assert seen.step == 1
    assert [call.index for call, _ in seen.calls] == list(range(seen.count))


def test_the_number_of_a_call_starts_anew_with_each_step() -> None:
    """A module called twice has two calls, in backward too."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    with Seen(net) as seen:
        for _ in range(2):
            net[2](net[1](net[1](net[0](torch.randn(3, 4))))).sum().backward()
            optimizer.step()
    assert [(call.step, place.module.number) for call, place in seen.of("aten::mul.Tensor", "forward")] == [
        (0, 1), (0, 2), (1, 1), (1, 2),
    ]   # type: ignore[union-attr]
    assert [place.module.number for _, place in seen.of("aten::mul.Tensor", "backward")] == [2, 2, 1, 1] * 2   # type: ignore[union-attr]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recompute_is_the_call_that_it_was(use_reentrant: bool) -> None:
    """It is no forward and no backward, and what backward computes after it finds its forward."""
    net = model()
    x = torch.randn(3, 4, requires_grad=True)
    with Seen(net) as seen:
        checkpoint(net, x, use_reentrant=use_reentrant).sum().backward()
    assert len(seen.of("aten::mul.Tensor", "forward")) == 1
    (_, again), = seen.of("aten::mul.Tensor", "recompute")
    assert again.module is not None
    assert (again.module.path, again.module.number) == ("1", 1)
    for _, place in seen.of("aten::mul.Tensor", "backward"):
        assert (place.module and (place.module.path, place.module.number)) == ("1", 1)
        assert place.line is not None
        assert place.line.line == SQUARE_LINE


def test_a_plain_function_in_a_checkpoint_is_a_recompute() -> None:
    """Also where backward itself builds a graph."""
    x = torch.randn(3, requires_grad=True)
    with Seen() as seen:
        y = checkpoint(lambda t: t.exp() * 2, x, use_reentrant=False)
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        grad.sum().backward()
    assert len(seen.of("aten::exp", "forward")) == 1
    assert seen.of("aten::exp", "recompute")
    assert not seen.of("aten::exp", "backward")


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:     # type: ignore[override]
        return grad.mul(3)


def test_custom_functions_and_double_backward() -> None:
    """A custom function's backward belongs to the module that applied it; double backward to the first forward."""
    class Custom(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Triple.apply(x)      # type: ignore[no-any-return]

    net = nn.Sequential(nn.Linear(4, 4), Custom(), Square())
    x = torch.randn(3, 4, requires_grad=True)
    with Seen(net) as seen:
        (grad,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        grad.square().sum().backward()
    custom = [place for call, place in seen.calls if call.node == "TripleBackward"]
    assert custom
    assert {place.module.path for place in custom if place.module} == {"1"}
    assert {call.phase for call, _ in seen.calls} == {"forward", "backward"}


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
        phases = {call.op: call.phase for call, _ in seen.calls if "amp" in call.op}
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
    assert [call.op for call, _ in seen.calls] == ["aten::arange", "aten::div.Tensor"]


def test_a_closure_is_no_optimizer() -> None:
    """LBFGS calls the forward in its step."""
    net = model()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = net(torch.ones(3, 4)).square().mean()
        loss.backward()
        return loss

    with Seen(net) as seen:
        optimizer.step(closure)
    assert seen.of("aten::addmm", "forward")
    assert not seen.of("aten::addmm", "optimizer")
    assert seen.of("aten::cat", "optimizer")


def test_compiled_functions_run_eagerly() -> None:
    compiled = torch.compile(model(), backend="aot_eager")
    with Seen(compiled) as seen:
        compiled(torch.randn(3, 4))
    (_, place), = seen.of("aten::mul.Tensor", "forward")
    assert place.module is not None
    assert place.module.path == "1"


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
        optimizer_hooks._global_optimizer_pre_hooks, optimizer_hooks._global_optimizer_post_hooks, warnings.filters,
    )
    before = [len(table) for table in tables]
    with pytest.raises(KeyError), Seen():   # noqa: PT012  the context's own end is what is tested
        assert [len(table) for table in tables] == [count + 1 for count in before]
        raise KeyError
    assert [len(table) for table in tables] == before


def test_a_module_that_raised_is_left() -> None:
    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError

    net = nn.Sequential(nn.Linear(4, 4), Raises())
    with Seen(net) as seen:
        with pytest.raises(KeyError):
            net(torch.ones(1, 4))
        torch.ones(1).exp()
    (_, place), = seen.of("aten::exp", "forward")
    assert place.module is None


def test_the_model_must_be_a_module() -> None:
    with pytest.raises(TypeError, match=r"model is list; expected a torch\.nn\.Module, or None"):
        OperatorObserver([model()])     # type: ignore[arg-type]


def test_results_are_the_same_bits() -> None:
    """With random numbers, in-place writes and an optimizer."""
    def train(watched: bool) -> list[Tensor]:
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(inplace=True), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(net.parameters())
        def steps() -> None:
            for _ in range(3):
                optimizer.zero_grad()
                with autocast("cpu"):
                    loss = net(torch.randn(6, 4)).float().square().mean()
                loss.backward()
                optimizer.step()
        if watched:
            with Seen(net):
                steps()
        else:
            steps()
        return [*net.state_dict().values(), torch.get_rng_state()]

    for one, other in zip(train(False), train(True), strict=True):
        assert torch.equal(one, other)


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


def test_facts() -> None:
    """What is a view, what is written, and whether it was read before."""
    aten = torch.ops.aten
    assert facts_of(aten.transpose.int).is_view
    assert facts_of(aten._unsafe_view.default).is_view
    assert not facts_of(aten.mm.default).is_view
    assert facts_of(aten.add_.Tensor).mutable
    assert not facts_of(aten.add_.Tensor).overwrites
    assert facts_of(aten.copy_.default).overwrites
    assert facts_of(aten.add.out).overwrites
    assert facts_of(aten.normal_.default).random
    assert facts_of(aten.ones_like.default).shape_only
    assert facts_of(aten.empty.memory_format).uninitialised
    a, b = torch.ones(1), torch.ones(1)
    assert facts_of(aten._foreach_add_.List).written(([a, b], [b, b]), {}) == [a, b]
    assert facts_of(aten.add.out).written((a, b), {"out": a}) == [a]
    assert tensors_in([a, (b, {"c": a}), 3]) == [a, b, a]
    assert list(readable([a, torch.ones(1, dtype=torch.int32), torch.ones(0), torch.ones(2).to_sparse()])) == [a]


def test_find_caller() -> None:
    """The frame that asks is the innermost of the user's."""
    line = find_caller(1).line()
    assert line is not None
    assert line.line == test_find_caller.__code__.co_firstlineno + 2
    assert str(line).endswith(f"test_operator_calls.py:{line.line}")
