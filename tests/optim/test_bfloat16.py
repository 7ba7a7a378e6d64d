"""Weights of bfloat16 that learn: remainders as float32 masters, unbiased rounding, moments of a chosen dtype."""

import copy
import os
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ampkit.optim import SGD, AdamW
from ampkit_kernels import reference, rounding

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")      # the interpreter's, of overflows
interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs the interpreter")
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "AdamW": (AdamW, torch.optim.AdamW, {"lr": 1e-3}),
    "AdamW amsgrad": (AdamW, torch.optim.AdamW, {"lr": 1e-3, "amsgrad": True, "maximize": True}),
    "SGD": (SGD, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "SGD momentum": (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
}
STOCHASTIC, REMAINDER = {"rounding": "stochastic"}, {"masters": "remainder"}
BOTH = {**STOCHASTIC, **REMAINDER, "state_dtype": torch.bfloat16}


def parameters(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((5, 3), (1,), (0,), (40, 6))
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).bfloat16().to(dtype)) for shape in shapes]


def train(optimizer: Any, params: list[torch.nn.Parameter], steps: range, skipped: tuple[int, ...] = ()) -> None:
    """Steps with gradients of bfloat16 that depend on the step's number alone."""
    for step in steps:
        for param, grad in zip(params, parameters(seed=100 + step), strict=True):
            param.grad = grad.detach().to(param.dtype)
        if skipped:
            optimizer.found_inf = torch.tensor(float(step in skipped))
        optimizer.step()


def everything(optimizer: Any, params: list[torch.nn.Parameter]) -> list[Tensor]:
    """Parameters and state, as values; remainders, of which some are patterns of NaN, as numbers."""
    state = [v.clone() for p in params for v in optimizer.state[p].values()]
    return [*(p.detach().clone() for p in params), *(bits(v) if v.dtype is rounding.REMAINDER else v for v in state)]


def bits(remainder: Tensor) -> Tensor:
    return remainder.view(torch.int16)


def assert_equal(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert [t.dtype for t in found] == [t.dtype for t in wanted]
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("name", CASES)
def test_remainders_equal_torchs_float32_weights_to_the_bit(name: str) -> None:
    cls, torchs, options = CASES[name]
    params, wide = parameters(), parameters(torch.float32)
    optimizer, other = cls(params, **options, **REMAINDER), torchs(wide, foreach=False, **options)
    train(optimizer, params, range(60), skipped=(0, 7))
    train(other, wide, range(1, 7))
    train(other, wide, range(8, 60))
    masters = optimizer.masters()
    assert_equal([masters[p] for p in params], [p.detach() for p in wide])
    assert_equal([p.detach() for p in params], [rounding.split(p.detach())[0] for p in wide])
    for p, q in zip(params, wide, strict=True):
        for entry in other.state[q].keys() - {"step"}:
            if other.state[q][entry] is not None:
                assert_equal([optimizer.state[p][entry]], [other.state[q][entry]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_updates_that_nearest_loses_are_kept_in_the_mean(dtype: torch.dtype) -> None:
    """20 steps of 1/5000 of a weight, by a gradient and by decay alone; the bound is 4 deviations."""
    n, expected = 100_000, 1 - 20 / 5000
    for options, grad in (({"lr": 1 / 5000}, 1.0), ({"lr": 1.0, "weight_decay": 1 / 5000}, 0.0)):
        found = {}
        for rounding_mode in ("nearest", "stochastic"):
            param = torch.nn.Parameter(torch.ones(n, dtype=dtype))
            param.grad = torch.full_like(param, grad)
            optimizer = SGD([param], rounding=rounding_mode, state_dtype=torch.float32, **options)
            for _ in range(20):
                optimizer.step()
            found[rounding_mode] = param.detach().double().mean().item()
        assert (found["nearest"] == 1.0) is (dtype is torch.bfloat16)
        deviation = (20 / 5000 * 2**-8) ** 0.5 / n**0.5
        assert abs(found["stochastic"] - expected) < 4 * deviation + 2e-5


def test_a_second_moment_of_bfloat16_decays_with_stochastic_rounding() -> None:
    """0.999 of it is the same to nearest: it would stay what the largest gradients made it."""
    found = {}
    for rounding_mode in ("nearest", "stochastic"):
        param = torch.nn.Parameter(torch.ones(10_000))
        optimizer = AdamW([param], rounding=rounding_mode, state_dtype=torch.bfloat16)
        for step in range(300):
            param.grad = torch.full_like(param, float(step == 0))
            optimizer.step()
        found[rounding_mode] = optimizer.state[param]["exp_avg_sq"].double().mean().item()
    assert found["nearest"] == torch.tensor(0.001).bfloat16().item()
    assert found["stochastic"] == pytest.approx(0.001 * 0.999**299, rel=0.01)


@interpreted
@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("given", [STOCHASTIC, REMAINDER, BOTH], ids=str)
@pytest.mark.parametrize("name", ["AdamW", "SGD momentum"])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(name: str, given: dict[str, Any], impl: str) -> None:
    """With a skipped step, whether the model is loaded before the optimizer or after it, or both are copied."""
    cls, _, options = CASES[name]
    params = parameters()
    optimizer = cls(params, impl=impl, **options, **given)
    train(optimizer, params, range(3), skipped=(1,))
    weights, saved = [p.detach().clone() for p in params], copy.deepcopy(optimizer.state_dict())
    copied, copies = pickle.loads(pickle.dumps((optimizer, params)))
    train(optimizer, params, range(3, 5))
    for model_first in (True, False):
        again = parameters(seed=1)
        loaded = cls(again, impl=impl, seed=5, **options, **given)      # streams come with the state
        train(loaded, again, range(1))
        for load_model in (model_first, not model_first):
            if load_model:
                with torch.no_grad():
                    torch._foreach_copy_(again, weights)
            else:
                loaded.load_state_dict(copy.deepcopy(saved))
        train(loaded, again, range(3, 5))
        assert_equal(everything(loaded, again), everything(optimizer, params))
    train(copied, copies, range(3, 5))
    assert_equal(everything(copied, copies), everything(optimizer, params))


@interpreted
@pytest.mark.parametrize("impl", ["auto", "triton", "device"])
@pytest.mark.parametrize("cls", [AdamW, SGD])
def test_a_skipped_step_changes_nothing(cls: Any, impl: str) -> None:
    """Also where only the device knows of it: PyTorch's operations take the decision as one does there."""
    params = parameters()
    optimizer = cls(params, lr=0.1, impl="auto" if impl == "device" else impl, **BOTH)
    train(optimizer, params, range(1))
    before = everything(optimizer, params)
    with mock.patch.object(reference, "is_on_host", return_value=impl != "device"):
        train(optimizer, params, range(1, 2), skipped=(1,))
    assert_equal(everything(optimizer, params), before)


def test_equal_seeds_round_alike_and_parameters_apart() -> None:
    """As replicas of a weight on several ranks do."""
    runs = []
    for seed in (0, 0, 1):
        params = [torch.nn.Parameter(torch.ones(500).bfloat16()) for _ in range(2)]
        optimizer = SGD([{"params": params[:1]}, {"params": params[1:]}], lr=2**-9, seed=seed, **STOCHASTIC)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        runs.append([param.detach() for param in params])
    assert_equal(runs[0], runs[1])
    assert not torch.equal(runs[0][0], runs[0][1])
    assert not torch.equal(runs[0][0], runs[2][0])


@pytest.mark.parametrize("given", [STOCHASTIC, BOTH], ids=str)
def test_masters_before_the_first_step_leave_what_a_first_step_would_have_made(given: dict[str, Any]) -> None:
    """Streams of their own above all."""
    for name in ("AdamW amsgrad", "SGD momentum"):
        cls, _, options = CASES[name]
        params, copies = parameters(), parameters()
        optimizer, other = (cls(one, **options, **{**given, **REMAINDER}) for one in (params, copies))
        optimizer.set_masters({p: p.detach().float() for p in params})
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for one, its in ((optimizer, params), (other, copies)):
            train(one, its, range(3))
        assert_equal(everything(optimizer, params), everything(other, copies))


def by_copy(param: torch.nn.Parameter, value: Tensor) -> None:
    with torch.no_grad():
        param.copy_(value)


def by_assignment(param: torch.nn.Parameter, value: Tensor) -> None:
    param.data = value


def by_another_optimizer(param: torch.nn.Parameter, value: Tensor) -> None:
    param.grad = param.detach() - value
    torch.optim.SGD([param], lr=1.0).step()


@interpreted
@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("write", [by_copy, by_assignment, by_another_optimizer])
def test_a_weight_that_is_written_from_outside_loses_its_remainder(write: Callable[..., None], impl: str) -> None:
    """And only that weight. The first read of masters after it, or the next step, finds out."""
    params = parameters()
    optimizer = AdamW(params, lr=1e-3, impl=impl, **REMAINDER)
    train(optimizer, params, range(2))
    copied, copies = copy.deepcopy((optimizer, params))
    before = [m.clone() for m in optimizer.masters().values()]
    optimizer.write_copies({})      # ends nothing here, and forgets no step
    write(params[0], torch.full((5, 3), 0.5).bfloat16())
    for one, its, read in ((optimizer, params, False), (copied, copies, True)):
        if read:
            one.set_masters({its[0]: params[0].detach().float()})
        train(one, its, range(2, 3))
    assert_equal(everything(optimizer, params), everything(copied, copies))
    write(params[0], torch.full((5, 3), 0.25).bfloat16())
    masters = list(optimizer.masters().values())
    assert torch.equal(masters[0], torch.full((5, 3), 0.25))
    assert not torch.equal(before[3], before[3].bfloat16().float())


def test_every_assignment_of_data_is_noticed() -> None:
    """Also where the storage lies where the old one lay, or is the old one."""
    for n_assignments in range(1, 6):
        params = parameters()
        optimizer = AdamW(params, lr=1e-3, **REMAINDER)
        train(optimizer, params, range(2))
        for _ in range(n_assignments):
            params[3].data = torch.full((40, 6), 0.5).bfloat16()
        assert torch.equal(optimizer.masters()[params[3]], torch.full((40, 6), 0.5))
    flat = torch.ones(20).bfloat16()
    param = torch.nn.Parameter(flat[:10])
    optimizer = AdamW([param], lr=1e-3, **REMAINDER)
    param.grad = torch.ones_like(param)
    optimizer.step()
    param.data = flat[10:]
    assert torch.equal(optimizer.masters()[param], torch.ones(10))


@pytest.mark.parametrize("way", ["state_dict", "pickle", "deepcopy"])
def test_copies_of_an_optimizer_drop_remainders_of_weights_written_to(way: str) -> None:
    params = parameters()
    optimizer = AdamW(params, lr=1e-3, **REMAINDER)
    train(optimizer, params, range(2))
    by_copy(params[0], torch.ones(5, 3).bfloat16())
    if way == "state_dict":
        copied, copies = AdamW(params, **REMAINDER), params
        copied.load_state_dict(optimizer.state_dict())
    else:
        copied, copies = (
            pickle.loads(pickle.dumps((optimizer, params))) if way == "pickle" else copy.deepcopy((optimizer, params))
        )
    assert torch.equal(copied.masters()[copies[0]], torch.ones(5, 3))


def test_what_another_optimizer_has_stepped_leaves_no_remainder_and_streams_begin() -> None:
    for other in (torch.optim.AdamW, AdamW, partial(AdamW, **STOCHASTIC), partial(AdamW, state_dtype=torch.float32)):
        params = parameters()
        optimizer = AdamW(params, **BOTH)
        train(optimizer, params, range(2))
        between = other(params)
        between.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(between, params, range(2, 4))
        optimizer.load_state_dict(copy.deepcopy(between.state_dict()))
        assert torch.equal(optimizer.masters()[params[3]], params[3].float())
        train(optimizer, params, range(4, 5))
        assert optimizer.state[params[0]]["stream"].dtype is torch.int64


def test_hooks_have_the_last_word_on_a_state_that_is_loaded() -> None:
    params = parameters()
    optimizer = AdamW(params, **BOTH)
    train(optimizer, params, range(1))
    saved = copy.deepcopy(optimizer.state_dict())

    def change(_: Any, given: dict[str, Any]) -> dict[str, Any]:
        return {**given, "state": {n: {**one, "exp_avg": one["exp_avg"] + 1} for n, one in given["state"].items()}}

    optimizer.register_load_state_dict_pre_hook(change)
    optimizer.register_load_state_dict_post_hook(lambda loaded: loaded.state[params[0]]["step"].fill_(7))
    optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.state[params[0]]["exp_avg"], saved["state"][0]["exp_avg"] + 1)
    assert optimizer.state[params[0]]["step"] == 7


def test_masters_are_given_and_taken() -> None:
    wide = [p * 1.001 for p in parameters(torch.float32)]
    params = [*parameters(), torch.nn.Parameter(torch.ones(2))]     # one of float32 has no master
    optimizer = AdamW(params, **REMAINDER)
    assert [m.dtype for m in optimizer.masters().values()] == [torch.float32] * 4
    optimizer.set_masters(dict(zip(params, wide, strict=False)))
    assert_equal(list(optimizer.masters().values()), [w.detach() for w in wide])
    optimizer.load_state_dict(AdamW(params, **REMAINDER).state_dict())
    assert_equal(list(optimizer.masters().values()), [p.detach().float() for p in params[:4]])
    with pytest.raises(ValueError, match=r"got a torch.bfloat16 tensor of shape \(1,\) on cpu for a parameter, a "):
        optimizer.set_masters({params[0]: wide[0], params[1]: params[1].detach()})
    assert_equal([params[0].detach()], [parameters()[0].detach()])
    with pytest.raises(ValueError, match=r"set_masters got 1\.0 for a parameter, a torch.bfloat16 tensor"):
        optimizer.set_masters({params[0]: wide[0], params[1]: 1.0})  # type: ignore[dict-item]
    assert_equal([params[0].detach()], [parameters()[0].detach()])
    for key in (wide[0], "weight"):
        with pytest.raises(ValueError, match="set_masters got a key that is not a parameter of this optimizer, "):
            optimizer.set_masters({key: wide[0]})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="expected one with masters='remainder'"):
        SGD(params).set_masters({})
    with pytest.raises(ValueError, match="write_copies got copies, the optimizer masters='remainder'"):
        optimizer.write_copies({params[0]: params[0].detach()})


@pytest.mark.parametrize(("given", "weight", "wanted"), [
    ({}, torch.bfloat16, torch.bfloat16), (STOCHASTIC, torch.bfloat16, torch.bfloat16),
    (REMAINDER, torch.bfloat16, torch.float32), (STOCHASTIC, torch.float32, torch.float32),
    ({"state_dtype": torch.float32}, torch.bfloat16, torch.float32),
    ({"state_dtype": torch.bfloat16}, torch.float32, torch.bfloat16),
    (BOTH, torch.bfloat16, torch.bfloat16),
], ids=str)
@pytest.mark.parametrize("name", ["AdamW amsgrad", "SGD momentum"])
def test_state_has_its_dtype_and_takes_torchs(name: str, given: Any, weight: torch.dtype, wanted: torch.dtype) -> None:
    cls, torchs, options = CASES[name]
    params, theirs = parameters(weight), parameters(torch.float32)
    optimizer, other = cls(params, **options, **given), torchs(theirs, **options)
    train(other, theirs, range(1))
    for _ in range(2):
        train(optimizer, params, range(1))
        kept = [v.dtype for name, v in optimizer.state[params[0]].items() if name in other.state[theirs[0]]]
        assert set(kept) <= {wanted, torch.float32}     # step counts are float32
        assert wanted in kept
        optimizer.load_state_dict(other.state_dict())
    other.load_state_dict(optimizer.state_dict())
    train(other, theirs, range(1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.complex64])
def test_parameters_of_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    """When a group is added, and where they have become so."""
    param = torch.nn.Parameter(torch.ones(2).to(dtype))
    optimizer = AdamW(parameters(), **STOCHASTIC)
    with pytest.raises(TypeError, match=rf"got a {dtype} parameter of shape \(2,\); expected bfloat16 or float32"):
        optimizer.add_param_group({"params": [param]})
    assert len(optimizer.param_groups) == 1
    changed = torch.nn.Parameter(torch.ones(2))
    optimizer = AdamW([changed], **REMAINDER)
    changed.data = param.data
    changed.grad = torch.ones_like(changed)
    with pytest.raises(TypeError, match=f"got a {dtype} parameter"):
        optimizer.step()
    assert not optimizer.state[changed]
