"""Steps taken as the last one was: whatever a user changes between two steps is seen, as if nothing had been kept.

Launches are noted, not run. After every change, a step with what the optimizer keeps has to launch what a step that
knows nothing launches: the same kernels over the same addresses, lengths and cuts, with the same options.
"""

import contextlib
import copy
import gc
import os
import pickle
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor
from torch._dynamo.utils import counters

from ampkit.optim import SGD, AdamW
from ampkit_kernels import StepCache, configs, implementation
from ampkit_kernels.triton_ops import pointer_table
from tests.kernels.launches import Noted, noted_launches

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs the interpreter", allow_module_level=True)

SHAPES = ((4, 4), (1,), (3, 5), (300,), (2, 3, 4, 5))
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "AdamW": lambda params: AdamW(params, lr=0.01, impl="triton"),
    "SGD momentum": lambda params: SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1, impl="triton"),
    "SGD": lambda params: SGD(params, lr=0.1, impl="triton"),
    "AdamW bfloat16": lambda params: AdamW(params, impl="triton", rounding="stochastic", masters="remainder"),
}
HYPERPARAMETERS: dict[str, list[dict[str, Any]]] = {
    "AdamW": [
        {"lr": 0.5},
        {"weight_decay": 0.5},
        {"maximize": True},
        {"amsgrad": True},
        {"amsgrad": False},
        {"betas": (0.3, 0.5)},
        {"eps": 0.1},
    ],
    "SGD": [
        {"lr": 0.5},
        {"weight_decay": 0.0},
        {"maximize": True},
        {"momentum": 0.0},
        {"momentum": 0.5},
        {"momentum": 0.5, "nesterov": True},
    ],
}


def parameters(kind: str) -> list[torch.nn.Parameter]:
    return [
        torch.nn.Parameter(torch.ones(shape, dtype=torch.bfloat16 if "bfloat16" in kind and i != 2 else torch.float32))
        for i, shape in enumerate(SHAPES)
    ]


class Steps(RuleBasedStateMachine):
    """An optimizer with two groups, what users do to it between steps, and its steps."""

    @initialize(kind=st.sampled_from(list(OPTIMIZERS)))
    def start(self, kind: str) -> None:
        self.kind, self.gradients, self.capturing = kind.split()[0], ["new"] * 8, False
        self.params = parameters(kind)
        self.params[-1].data = self.params[-1].data.to(memory_format=torch.channels_last)
        self.optimizer = OPTIMIZERS[kind]([{"params": self.params[:2]}, {"params": self.params[2:]}])

    def noted_step(self, capturing: bool) -> list[Noted]:
        with contextlib.ExitStack() as stack:
            for where in ("", ".step_cache", ".triton_ops.pointer_table"):
                stack.enter_context(mock.patch(f"ampkit_kernels{where}.is_capturing", return_value=capturing))
            stack.enter_context(
                mock.patch.object(pointer_table, "pinned_words", lambda n: torch.zeros(n, dtype=torch.int64))
            )
            found = stack.enter_context(noted_launches())
            self.optimizer.step()
        return found

    @rule(how=st.lists(st.sampled_from(("kept", "kept", "new", "none")), min_size=8, max_size=8))
    def put_gradients(self, how: list[str]) -> None:
        """What the next step finds."""
        self.gradients = how

    @rule()
    def capture(self) -> None:
        """The next step is captured in a CUDA graph."""
        self.capturing = True

    @invariant()
    def a_step_launches_what_one_that_knows_nothing_launches(self) -> None:
        for param, how in zip(self.params, self.gradients, strict=False):
            grad = param.grad
            alike = grad is not None and (grad.shape, grad.dtype) == (param.shape, param.dtype)
            if how != "kept" or not alike:
                param.grad = None
                param.grad = None if how == "none" else torch.zeros_like(param.detach())
        optimizer = self.optimizer
        with mock.patch.object(type(optimizer), "_warned", True):
            found = self.noted_step(self.capturing)
            kept, optimizer._caches = optimizer._caches, {}
            fresh = self.noted_step(self.capturing)
            optimizer._caches = kept
        assert [launch.kernel for launch in found] == [launch.kernel for launch in fresh]
        for ours, other in zip(found, fresh, strict=True):
            assert ours.arguments == other.arguments
            assert ours.options == other.options
        self.gradients, self.capturing = ["kept"] * 8, False

    @rule(data=st.data(), number=st.integers(0, 3))
    def set_hyperparameters(self, data: Any, number: int) -> None:
        groups = self.optimizer.param_groups
        groups[number % len(groups)].update(data.draw(st.sampled_from(HYPERPARAMETERS[self.kind])))

    @rule(number=st.integers(0, 3))
    def set_lr_tensor(self, number: int) -> None:
        groups = self.optimizer.param_groups
        groups[number % len(groups)]["lr"] = torch.tensor(0.5)

    @rule(skipped=st.booleans())
    def set_found_inf(self, skipped: bool) -> None:
        self.optimizer.found_inf = torch.tensor(float(skipped))

    @precondition(lambda self: len(self.params) < 8)
    @rule(in_new_group=st.booleans())
    def add_parameter(self, in_new_group: bool) -> None:
        self.params.append(torch.nn.Parameter(torch.ones(6)))
        if in_new_group:
            self.optimizer.add_param_group({"params": self.params[-1]})
        else:
            self.optimizer.param_groups[-1]["params"].append(self.params[-1])

    @rule(what=st.sampled_from(["parameter", "group", "order"]))
    def take_out(self, what: str) -> None:
        groups = self.optimizer.param_groups
        if what == "group" and len(groups) > 1:
            del groups[0]
        elif what == "parameter" and len(groups[-1]["params"]) > 1:
            del groups[-1]["params"][0]
        else:
            groups[-1]["params"].reverse()

    @rule(number=st.integers(0, 7))
    def move_parameter(self, number: int) -> None:
        param = self.params[number % len(self.params)]
        param.data = param.data.clone()

    @rule(number=st.integers(0, 7), how=st.sampled_from(["cleared", "one gone", "new", "entries new", "step a number"]))
    def change_state(self, number: int, how: str) -> None:
        optimizer, param = self.optimizer, self.params[number % len(self.params)]
        state = optimizer.state.get(param, {})
        if how == "cleared":
            optimizer.state.clear()
        elif how == "one gone":
            optimizer.state.pop(param, None)
        elif how == "new":
            optimizer.state = copy.copy(optimizer.state)
        elif how == "entries new":
            state.update({name: value.clone() for name, value in state.items() if isinstance(value, Tensor)})
        elif "step" in state:
            state["step"] = 7.0

    @rule(how=st.sampled_from(["load", "deepcopy", "pickle"]))
    def replace_all(self, how: str) -> None:
        if how == "load":
            try:
                self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
            except KeyError:  # torch's, of a parameter that was taken out while its state was not
                return
        elif how == "deepcopy":
            self.optimizer, self.params = copy.deepcopy((self.optimizer, self.params))
        else:
            self.optimizer, self.params = pickle.loads(pickle.dumps((self.optimizer, self.params)))


TestSteps = Steps.TestCase
TestSteps.settings = settings(
    max_examples=40, stateful_step_count=10, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate)
)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_what_is_kept_is_used_and_gradients_are_not_kept(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first step one look at each group suffices, also where gradients have moved. Their memory is free."""
    params = parameters(kind)
    optimizer = OPTIMIZERS[kind]([{"params": params[:2]}, {"params": params[2:4]}, {"params": params[4:]}])
    fits, found = StepCache.fits, []

    def noted(self: StepCache, lists: Any) -> bool:
        found.append(fits(self, lists))
        return found[-1]

    def step() -> None:
        for param in params:
            param.grad = torch.ones_like(param)
        gradients = [weakref.ref(param.grad) for param in params]
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        assert [ref for ref in gradients if ref() is not None] == []

    monkeypatch.setattr(StepCache, "fits", noted)
    with noted_launches():
        for _ in range(3):
            step()
    looks = found.copy()
    assert looks == [True] * len(looks) != []
    optimizer.impl = "reference"
    step()
    assert found == looks


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_tables_are_kept_for_gradients_that_come_and_go(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of experts: made once for each of the last few choices of parameters. A new one costs an old one."""
    made, real = [], pointer_table.made_table
    monkeypatch.setattr(pointer_table, "made_table", lambda *given: (made.append(1), real(*given))[1])
    params = [torch.nn.Parameter(torch.ones(8, dtype=parameters(kind)[0].dtype)) for _ in range(12)]
    optimizer = OPTIMIZERS[kind](params)

    def tables_of_step(*without: int) -> int:
        for i, param in enumerate(params):
            param.grad = None if i in without else torch.ones_like(param)
        made.clear()
        optimizer.step()
        return len(made)

    with noted_launches():
        for kept in (0, 1, 1):
            assert [tables_of_step(), tables_of_step(5), tables_of_step(4), tables_of_step(0, 7)] == [1 - kept] * 4
        assert [tables_of_step(i) for i in range(12)] == [1, 1, 1, 1, 0, 0, *[1] * 6]
        assert len(optimizer._caches) <= 8


def test_a_group_on_two_devices_has_tables_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the CPU stands a device without memory, whose index is another's."""
    made, real = [], pointer_table.made_table
    monkeypatch.setattr(pointer_table, "made_table", lambda *given: (made.append(1), real(*given))[1])
    monkeypatch.setattr(pointer_table, "pinned_words", lambda n: torch.zeros(n, dtype=torch.int64))
    monkeypatch.setattr(implementation, "why_not_triton", lambda device: None)
    monkeypatch.setattr(configs, "multiprocessors", lambda device: 2)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: 0 if tensor.is_meta else -1)
    params = [torch.nn.Parameter(torch.ones(8, device=device)) for device in ("cpu", "meta", "cpu")]
    optimizer = AdamW(params, impl="triton")
    with noted_launches() as found:
        for step in range(4):
            found.clear()
            made.clear()
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.step()
            assert len(made) == (0 if step else 2)
            assert [launch.kernel for launch in found] == ["prepare_kernel", "step_kernel"] * 2


@pytest.mark.filterwarnings("ignore:.*Dynamo:UserWarning")
def test_a_compiled_step_is_compiled_once() -> None:
    """Addresses, which differ from step to step, are no part of what Dynamo compiles."""
    param = torch.nn.Parameter(torch.ones(4))
    step, compiled, grads = torch.compile(AdamW([param], impl="triton").step, backend="eager"), [], []
    with noted_launches() as found:
        for _ in range(12):
            grads.append(torch.ones(4))
            param.grad = grads[-1]
            found.clear()
            step()
            compiled.append(counters["frames"]["total"])
            assert [launch.kernel for launch in found] == ["prepare_kernel", "step_kernel"]
            assert found[1].arguments[1][1] == param.grad.data_ptr()
    assert len(set(compiled[2:])) == 1, compiled


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_nothing_keeps_state_or_parameters_alive_that_a_program_replaces_or_drops(kind: str) -> None:
    """As one that offloads state between phases, or thaws layers in turn."""
    params = parameters(kind)
    optimizer = OPTIMIZERS[kind](params)

    def step() -> None:
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()

    def tensors() -> list[Any]:
        return [weakref.ref(value) for state in optimizer.state.values() for value in state.values()]

    with noted_launches():
        step()
        step()
        old = tensors()
        _ = [state.update({name: value.clone() for name, value in state.items()}) for state in optimizer.state.values()]
        gc.collect()
        assert [value for value in old if value() is not None] == []
        step()
        old = [*tensors(), weakref.ref(params.pop())]
        del optimizer.param_groups[0]["params"][-1]
        optimizer.state.clear()
        gc.collect()
        assert [value for value in old if value() is not None] == []
        step()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_groups_of_equal_shapes_have_tables_of_their_own_that_end_with_the_optimizer(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second step on nothing is sent where gradients are where they were."""
    monkeypatch.setattr(pointer_table, "_per_thread", pointer_table._PerThread())
    dtype = torch.bfloat16 if "bfloat16" in kind else torch.float32
    params = [torch.nn.Parameter(torch.ones(8, 4, dtype=dtype)) for _ in range(4)]
    optimizer = OPTIMIZERS[kind]([{"params": [param]} for param in params])
    sent, send = [], pointer_table.send
    monkeypatch.setattr(pointer_table, "send", lambda values, memory: (sent.append(len(values)), send(values, memory)))
    grads = [torch.ones_like(param) for param in params]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    with noted_launches() as found:
        for step in range(3):
            found.clear()
            optimizer.step()
            assert len(sent) == 4, step
            steps = [launch.arguments[1][:2] for launch in found if launch.kernel == "step_kernel"]
            assert steps == [[p.data_ptr(), g.data_ptr()] for p, g in zip(params, grads, strict=True)]
    assert not pointer_table._per_thread.tables
    ended = [weakref.ref(launch.table) for cache in optimizer._caches.values() for launch in cache._launches]
    assert len(ended) == 4
    found.clear()
    del optimizer
    gc.collect()
    assert [table() for table in ended] == [None] * 4


def test_a_captured_step_warns_once_of_a_learning_rate_that_the_host_holds() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    optimizer = AdamW([param], impl="triton")
    with noted_launches(), mock.patch("ampkit_kernels.is_capturing", return_value=True):
        with pytest.warns(UserWarning, match=r"AdamW.step\(\) is captured in a CUDA graph with") as found:
            optimizer.step()
        optimizer.step()
    assert [warning.filename for warning in found] == [__file__]
