"""Steps by plan: whatever a user changes between two steps is seen, as if nothing had been remembered."""

import copy
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ampkit.optim import SGD, AdamW
from ampkit_kernels import adamw_plan
from ampkit_kernels.triton_ops.steps import Plan

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs the interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
SHAPES = ((4, 4), (1,), (3, 5), (300,), (3, 5))
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "AdamW": lambda params: AdamW(params, lr=0.01, impl="triton"),
    "SGD": lambda params: SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1, impl="triton"),
    "SGD plain": lambda params: SGD(params, lr=0.1, impl="triton"),
}


class Run:
    """Parameters, their optimizer, and gradients that are the same in every run."""

    def __init__(self, kind: str, planned: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        self.params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
        self.optimizer = OPTIMIZERS[kind]([{"params": self.params[:2]}, {"params": self.params[2:]}])
        self.planned = planned
        self.steps = 0
        self.errors: list[str] = []

    def put_gradients(self) -> None:
        generator = torch.Generator().manual_seed(self.steps)
        for param in self.params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)

    def step(self, n: int = 1, *, gradients: bool = True) -> None:
        for _ in range(n):
            if gradients:
                self.put_gradients()
            if not self.planned:
                self.optimizer._forget_plans()
            self.optimizer.step()
            self.steps += 1

    def result(self) -> list[Tensor]:
        """Parameters, and every tensor of their state."""
        found = [param.detach().clone() for param in self.params]
        for param in self.params:
            found += [torch.as_tensor(value).clone() for _, value in sorted(self.optimizer.state[param].items())]
        return found


@pytest.fixture
def plans_run(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each plan that was asked to step its lists did."""
    outcomes = []
    run = Plan.run

    def noted(self: Plan, *args: Any) -> bool:
        outcomes.append(run(self, *args))
        return outcomes[-1]

    monkeypatch.setattr(Plan, "run", noted)
    return outcomes


def set_group(**values: Any) -> Callable[[Run], None]:
    return lambda run: run.optimizer.param_groups[1].update(values)


def add_group(run: Run) -> None:
    run.params.append(torch.nn.Parameter(torch.ones(6)))
    run.optimizer.add_param_group({"params": run.params[-1], "lr": 0.5})


def take_out(run: Run) -> None:
    del run.optimizer.param_groups[1]["params"][0]


def put_in(run: Run) -> None:
    run.params.append(torch.nn.Parameter(torch.ones(6)))
    run.optimizer.param_groups[1]["params"].append(run.params[-1])


def exchange(run: Run) -> None:
    run.optimizer.param_groups[1]["params"].reverse()


def drop_group(run: Run) -> None:
    del run.optimizer.param_groups[0]


def replace_data(run: Run) -> None:
    run.params[2].data = run.params[2].data.clone() + 1


def narrow_data(run: Run) -> None:
    for param in (run.params[3],):
        param.data = param.data[:10]
        for name, value in run.optimizer.state[param].items():
            if name != "step":
                run.optimizer.state[param][name] = value[:10]


def transpose_data(run: Run) -> None:
    run.params[0].data = run.params[0].data.t()


def widen_data(run: Run) -> None:
    run.params[2].data = run.params[2].data.double()


def each_entry(change: Callable[[dict[str, Any], str], None]) -> Callable[[Run], None]:
    def apply(run: Run) -> None:
        state = run.optimizer.state[run.params[2]]
        for name in list(state):
            change(state, name)

    return apply


def replace_entry(state: dict[str, Any], name: str) -> None:
    state[name] = state[name].clone() * 2


def replace_entrys_data(state: dict[str, Any], name: str) -> None:
    state[name].data = state[name].data.clone() * 2


def halve_entrys_data(state: dict[str, Any], name: str) -> None:
    if name != "step":
        state[name].data = state[name].data.half()


def count_on_host(state: dict[str, Any], name: str) -> None:
    if name == "step":
        state[name] = 7.0


def clear_state(run: Run) -> None:
    run.optimizer.state.clear()


def forget_one(run: Run) -> None:
    run.optimizer.state.pop(run.params[3], None)


def exchange_states(run: Run) -> None:
    state = run.optimizer.state
    first, second = (run.params[i] for i in (2, 3))
    for name in state[first]:
        if name != "step":
            state[first][name], state[second][name] = torch.ones(3, 5), torch.ones(300)


def exchange_keys(run: Run) -> None:
    state, (first, _, second) = run.optimizer.state, run.params[2:]
    other = {first: second, second: first}
    found = [(other.get(param, param), entries) for param, entries in state.items()]
    state.clear()
    state.update(found)


def load(run: Run) -> None:
    saved = copy.deepcopy(run.optimizer.state_dict())
    run.step()
    run.optimizer.load_state_dict(saved)


def become_copy(run: Run) -> None:
    run.optimizer, run.params = copy.deepcopy((run.optimizer, run.params))


def become_pickle(run: Run) -> None:
    run.optimizer, run.params = pickle.loads(pickle.dumps((run.optimizer, run.params)))


def write_copies(run: Run) -> None:
    run.optimizer.write_copies({param: param.detach().half() for param in run.params})


CHANGES: dict[str, Callable[[Run], None]] = {
    "nothing": lambda run: None,
    "lr": set_group(lr=0.5),
    "lr as a tensor": set_group(lr=torch.tensor(0.5)),
    "weight_decay": set_group(weight_decay=0.5),
    "maximize": set_group(maximize=True),
    "amsgrad": set_group(amsgrad=True),
    "betas": set_group(betas=(0.3, 0.5)),
    "eps": set_group(eps=0.1),
    "no momentum": set_group(momentum=0.0),
    "momentum": set_group(momentum=0.5),
    "nesterov": set_group(momentum=0.5, nesterov=True),
    "dampening": set_group(momentum=0.5, dampening=0.5),
    "a group more": add_group,
    "a parameter less": take_out,
    "a parameter more": put_in,
    "another order": exchange,
    "a group less": drop_group,
    "data replaced": replace_data,
    "data narrowed in place": narrow_data,
    "data transposed in place": transpose_data,
    "data widened": widen_data,
    "entries replaced": each_entry(replace_entry),
    "entries' data replaced": each_entry(replace_entrys_data),
    "entries' data halved": each_entry(halve_entrys_data),
    "step as a number": each_entry(count_on_host),
    "state cleared": clear_state,
    "one state gone": forget_one,
    "states exchanged": exchange_states,
    "states exchanged whole": exchange_keys,
    "state loaded": load,
    "deepcopy": become_copy,
    "pickle": become_pickle,
    "copies written": write_copies,
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_steps_is_seen(change: str, kind: str, plans_run: list[bool]) -> None:
    results, errors = [], []
    for planned in (True, False):
        plans_run.clear()
        run = Run(kind, planned)
        run.step(2)
        assert plans_run == [True] * 4      # two groups, each by a plan that it made, and again
        CHANGES[change](run)
        run.step(2)
        results.append(run.result())
        errors.append(run.errors)
    assert errors[0] == errors[1]
    assert len(results[0]) == len(results[1])
    for ours, fresh in zip(*results, strict=True):
        assert torch.equal(ours, fresh)


def no_gradients(run: Run) -> None:
    run.params[2].grad = None


def none_at_all(run: Run) -> None:
    run.optimizer.zero_grad()


def move_gradients(run: Run) -> None:
    for param in run.params:
        param.grad = param.grad.clone()


def unaligned(run: Run) -> None:
    param = run.params[3]
    memory = torch.zeros(301)
    memory[1:] = param.grad
    param.grad = memory[1:]


def strided(run: Run) -> None:
    param = run.params[2]
    memory = torch.zeros(3, 10)
    memory[:, ::2] = param.grad
    param.grad = memory[:, ::2]


def negated(run: Run) -> None:
    param = run.params[1]
    param.grad = torch.view_as_complex(torch.ones(1, 2)).conj().imag
    assert param.grad.is_neg()
    assert param.grad.is_contiguous()


def other_data(run: Run) -> None:
    run.params[2].grad.data = torch.full((3, 5), 2.0)


GRADIENTS = {
    "one is None": no_gradients, "all are None": none_at_all, "elsewhere": move_gradients, "unaligned": unaligned,
    "strided": strided, "lazily negated": negated, "data replaced": other_data,
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("change", GRADIENTS)
def test_what_becomes_of_gradients_is_seen(change: str, kind: str) -> None:
    results, errors = [], []
    for planned in (True, False):
        run = Run(kind, planned)
        run.step(2)
        run.put_gradients()
        GRADIENTS[change](run)
        run.step(gradients=False)
        run.step(2)
        results.append(run.result())
        errors.append(run.errors)
    assert errors[0] == errors[1]
    for ours, fresh in zip(*results, strict=True):
        assert torch.equal(ours, fresh)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_second_plan_of_a_group_does_not_hold(kind: str, plans_run: list[bool]) -> None:
    """Weights with a copy to write have a plan of their own; those of the first are not stepped twice."""
    results = []
    for planned in (True, False):
        plans_run.clear()
        run = Run(kind, planned)
        copies = {run.params[3]: run.params[3].detach().half()}
        run.optimizer.write_copies(copies)
        run.step(2)
        assert plans_run == [True] * 6
        run.put_gradients()
        unaligned(run)
        run.step(gradients=False)
        if planned:
            assert plans_run[6:9] == [True, True, False]
        run.step(2)
        assert not run.errors
        assert torch.equal(copies[run.params[3]], run.params[3].detach().half())
        results.append(run.result())
    for ours, fresh in zip(*results, strict=True):
        assert torch.equal(ours, fresh)


def test_a_sparse_gradient_is_refused_after_dense_ones() -> None:
    run = Run("AdamW", True)
    run.step(2)
    run.params[0].grad = torch.ones(4, 4).to_sparse()
    with pytest.raises(RuntimeError, match=r"got a torch.sparse_coo gradient for a parameter of shape \(4, 4\)"):
        run.optimizer.step()


def test_an_order_for_another_implementation_is_followed(plans_run: list[bool]) -> None:
    run = Run("AdamW", True)
    run.step(2)
    run.optimizer.impl = "reference"
    plans_run.clear()
    run.step()
    assert plans_run == []


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_gradients_at_new_addresses_need_no_new_plan(kind: str, plans_run: list[bool]) -> None:
    run = Run(kind, True)
    run.step(5)
    assert plans_run == [True] * 10
    assert len(run.optimizer._planned) == 2


def test_channels_last_is_planned(plans_run: list[bool]) -> None:
    results = []
    for planned in (True, False):
        param = torch.nn.Parameter(torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0)))
        param.data = param.data.to(memory_format=torch.channels_last)
        optimizer = AdamW([param], impl="triton")
        for i in range(3):
            if not planned:
                optimizer._forget_plans()
            param.grad = torch.full_like(param, 0.5 + i)
            optimizer.step()
        results.append(param.detach())
        if planned:
            assert plans_run == [True] * 3
        param.grad = torch.ones(4, 3, 5, 5)     # in another order than the parameter
        optimizer.step()
    assert torch.equal(*results)


OPTIONS = {
    "lr": 0.1, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.0, "maximize": False, "multiplier": None,
    "grad_scale": None, "found_inf": None,
}
# What becomes of a list of one float16 matrix, at the same address: (column, new tensor).
IN_PLACE: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "parameter of another dtype": (0, lambda t: t.view(torch.bfloat16)),
    "gradient of another dtype": (1, lambda t: t.view(torch.bfloat16)),
    "shorter parameter": (0, lambda t: t[:2]),
    "shorter gradient": (1, lambda t: t[:2]),
    "transposed parameter": (0, Tensor.t),
    "transposed gradient": (1, Tensor.t),
    "another moment": (2, torch.clone),
    "an equal moment": (3, lambda t: t[:]),
    "unaligned gradient": (1, lambda t: torch.zeros(17, dtype=torch.float16)[1:].view(4, 4)),
}


@pytest.mark.parametrize("change", IN_PLACE)
def test_a_plan_takes_no_list_for_another(change: str) -> None:
    lists = [[torch.zeros(4, 4, dtype=torch.float16)] for _ in range(4)]
    plan = adamw_plan(*lists, [], counts := [torch.zeros(())], impl="triton")
    assert plan.run([*lists, counts], OPTIONS)
    column, become = IN_PLACE[change]
    others = [list(tensors) for tensors in lists]
    others[column][0] = become(others[column][0])
    assert not plan.run([*others, counts], OPTIONS)
    assert not plan.run([*[tensors * 2 for tensors in lists], counts * 2], OPTIONS)
    assert counts[0].item() == 1.0
    assert plan.run([*lists, counts], OPTIONS)


@pytest.mark.parametrize(("column", "data"), [
    (2, torch.zeros(4, 4, dtype=torch.bfloat16)), (2, torch.zeros(2, 4)), (2, torch.zeros(4, 8)[:, ::2]),
    (4, torch.zeros((), dtype=torch.int32)),
], ids=["dtype", "same bytes", "strides", "step"])
def test_a_plan_looks_closely_at_what_has_moved(column: int, data: Tensor) -> None:
    lists = [[torch.zeros(4, 4, dtype=torch.float16)] for _ in range(4)]
    plan = adamw_plan(*lists, [], counts := [torch.zeros(())], impl="triton")
    everything = [*lists, counts]
    assert plan.run(everything, OPTIONS)
    everything[column][0].data = data
    assert not plan.run(everything, OPTIONS)


def test_a_plan_sees_a_lazy_negation_and_another_order_of_dimensions() -> None:
    single = [[torch.zeros(1)] for _ in range(4)]
    plan = adamw_plan(*single, [], counts := [torch.zeros(())], impl="triton")
    assert not plan.run([single[0], [torch._neg_view(torch.ones(1))], *single[2:], counts], OPTIONS)
    permuted = [[torch.zeros(2, 3, 4).permute(2, 0, 1)] for _ in range(4)]
    plan = adamw_plan(*permuted, [], counts, impl="triton")
    other = torch.zeros(3, 4, 2).permute(1, 2, 0)
    assert other.shape == permuted[1][0].shape
    assert not plan.run([permuted[0], [other], *permuted[2:], counts], OPTIONS)
    assert plan.run([*permuted, counts], OPTIONS)


def test_a_plan_serves_one_device_and_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    from ampkit_kernels.triton_ops import steps

    lists = [[torch.zeros(4)] for _ in range(4)]
    counts = [torch.zeros(())]
    plan = adamw_plan(*lists, [], counts, impl="triton")
    elsewhere = [lists[0], [torch.zeros(4, device="meta")], *lists[2:], counts]
    assert not plan.run(elsewhere, OPTIONS)
    assert plan.run([*lists, counts], OPTIONS)
    assert not plan.run([*lists], OPTIONS)
    monkeypatch.setattr(steps, "is_capturing", lambda device: True)
    assert not plan.run([*lists, counts], OPTIONS)
    monkeypatch.undo()
    monkeypatch.setattr(steps, "place", lambda device: (device, 1, 2))
    assert not plan.run([*lists, counts], OPTIONS)
    assert counts[0].item() == 1.0


def test_a_learning_rate_that_a_graph_freezes_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from ampkit.optim import _planned

    monkeypatch.setattr(_planned, "is_capturing", lambda device: True)
    run = Run("AdamW", True)
    with pytest.warns(UserWarning, match=r"AdamW.step\(\) is captured .* every replay will use this one"):
        run.step()
    run.optimizer._forget_plans()
    run.step()      # once: a second warning would be an error here
    for group in run.optimizer.param_groups:
        group["lr"] = torch.tensor(0.1)
    tensor = AdamW([torch.nn.Parameter(torch.ones(2))], lr=torch.tensor(0.1), impl="triton")
    tensor.param_groups[0]["params"][0].grad = torch.ones(2)
    tensor.step()


def test_a_learning_rate_on_the_host_is_frozen_though_it_is_a_tensor() -> None:
    from ampkit.optim._planned import is_on_host

    device = torch.device("meta")
    rates = (0.1, torch.tensor(0.1), torch.tensor(0.1, device=device))
    assert [is_on_host(lr, device) for lr in rates] == [True, True, False]
    assert [is_on_host(lr, torch.device("cpu")) for lr in rates[:2]] == [True, False]


def test_lists_that_no_kernel_serves_whole_have_no_plan() -> None:
    lists = [[torch.zeros(4), torch.zeros(0)] for _ in range(4)]
    assert adamw_plan(*lists, [], [torch.zeros(()), torch.zeros(())], impl="triton") is None
    assert adamw_plan([], [], [], [], [], [], impl="triton") is None
    with pytest.raises(ValueError, match="got 1 steps for 2 params"):
        adamw_plan(*[[torch.zeros(4)] * 2 for _ in range(4)], [], [torch.zeros(())], impl="triton")
    assert adamw_plan(*[[torch.zeros(4)] for _ in range(4)], [], [torch.zeros(())], impl="reference") is None
