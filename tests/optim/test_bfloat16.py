"""Weights of bfloat16 that learn: remainders as float32 masters, unbiased rounding, moments of a chosen dtype."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from ampkit import GradGuard, GradScaler
from ampkit.optim import SGD, AdamW, float32_step
from ampkit_kernels import reference, rounding
from ampkit_kernels.reference import is_on_host
from benchmarks.counts import peak_and_copies
from tests.helpers.equal import assert_equal
from tests.optim.steps import PAIRS, copies_of, interpreted, train
from tests.optim.steps import parameters as parameters_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of overflows
STOCHASTIC, REMAINDER = {"rounding": "stochastic"}, {"masters": "remainder"}
BOTH = {**STOCHASTIC, **REMAINDER, "state_dtype": torch.bfloat16}
parameters = partial(parameters_of, torch.bfloat16)


def trained(n: int, **options: Any) -> tuple[Any, list[Parameter]]:
    """AdamW with these options after n steps, and its parameters."""
    params = parameters()
    optimizer = AdamW(params, lr=1e-3, **options)
    train(optimizer, params, range(n))
    return optimizer, params


def everything(optimizer: Any, params: list[Parameter]) -> list[Tensor]:
    """Parameters and state, as values; remainders, of which some are patterns of NaN, as numbers."""
    state = [v.clone() for p in params for v in optimizer.state[p].values()]
    remainder = rounding.REMAINDER
    return [*(p.detach().clone() for p in params), *(v.view(torch.int16) if v.dtype is remainder else v for v in state)]


@pytest.mark.parametrize("pair", PAIRS)
def test_remainders_equal_torchs_float32_weights_to_the_bit(pair: str) -> None:
    cls, torchs, options = PAIRS[pair]
    params = parameters()
    wide = copies_of(params, torch.float32)
    optimizer, other = cls(params, **options, **REMAINDER), torchs(wide, fused=True, **options)
    train(optimizer, params, range(2, 60), skipped=(2, 9))  # torch's fused SGD needs all momenta in its first step
    train(other, wide, (step for step in range(2, 60) if step not in (2, 9)), dtype=torch.bfloat16)
    masters = optimizer.masters()
    assert_equal([masters[p] for p in params], [p.detach() for p in wide])
    assert_equal([p.detach() for p in params], [rounding.split(p.detach())[0] for p in wide])
    for p, q in zip(params, wide, strict=True):
        for entry in other.state[q].keys() - {"step"}:
            if other.state[q][entry] is not None:
                assert_equal([optimizer.state[p][entry]], [other.state[q][entry]])


GRAD_DTYPES = [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize(("dtype", "grad_dtype"), GRAD_DTYPES)
@pytest.mark.parametrize("given", [{}, {"fused": True}, {"foreach": True}, {"max_grad_norm": 1e9}, REMAINDER])
def test_gradients_of_another_dtype_than_their_weights(dtype: Any, grad_dtype: Any, given: dict[str, Any]) -> None:
    """By `Tensor.grad_dtype`: torch's float32 step from the weights and moments, each rounded once."""
    if given is REMAINDER and dtype is torch.float16:
        pytest.skip("remainders are for bfloat16")
    params = parameters_of(dtype)
    for param in params:
        param.grad_dtype = grad_dtype
    optimizer = AdamW(params, lr=0.01, **given)
    wide = copies_of(params, torch.float32)
    torchs = torch.optim.AdamW(wide, lr=0.01, foreach=False)
    for step in range(10):
        for param, grad in zip(params, parameters_of(torch.float32, seed=100 + step), strict=True):
            param.grad = None
            (param.to(grad_dtype) * grad.detach().to(grad_dtype)).sum().backward()
            assert param.grad.dtype is grad_dtype
        for param, other in zip(params, wide, strict=True):
            other.grad = param.grad.float()
            param.grad *= 256.0
        if given is not REMAINDER:
            for each in (*wide, *(torchs.state[p][name] for p in wide if step for name in ("exp_avg", "exp_avg_sq"))):
                each.data = each.data.to(dtype).float()
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(256.0), torch.tensor(0.0)
        optimizer.step()
        torchs.step()
    # The fused function steps float32 weights; it rounds an element by its place in a vector of 16.
    ulp = 2.0**-9 if dtype is torch.float16 else 2.0**-22 if given is REMAINDER and dtype is torch.float32 else 0.0
    torch.testing.assert_close([p.detach() for p in params], [p.detach().to(dtype) for p in wide], rtol=ulp, atol=0)


@pytest.mark.parametrize("given", [STOCHASTIC, REMAINDER, BOTH, {"state_dtype": torch.float32}])
@pytest.mark.parametrize("make", [partial(AdamW, lr=0.01), partial(SGD, lr=0.1, momentum=0.9)])
@pytest.mark.parametrize("scaler", [lambda: GradGuard("cpu"), lambda: GradScaler("cpu", 2.0**12)])
def test_float32_gradients_of_bfloat16_weights_under_a_scaler(given: dict[str, Any], make: Any, scaler: Any) -> None:
    """Gradients that bfloat16 can hold are stepped as in bfloat16; a larger one is skipped."""
    runs = []
    for grad_dtype in (torch.float32, torch.bfloat16):
        params = parameters()
        optimizer, scale = make(params, **given), scaler()
        for step in range(6):
            grads = parameters(seed=100 + step)
            for param, grad in zip(params, grads, strict=True):
                param.grad_dtype, param.grad = grad_dtype, None
                value = torch.inf if step == 3 else 1.0
                scale.scale((param.float() * grad.detach().float() * value).sum()).backward()
                assert param.grad.dtype is grad_dtype
            scale.clip_grad_norm_(optimizer, 1e9)
            scale.step(optimizer)
            scale.update()
        assert scale.stats().skips == 1
        runs.append([p.detach().float() for p in params])
    assert_equal(*runs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_updates_that_nearest_loses_are_kept_in_the_mean(dtype: torch.dtype) -> None:
    """20 steps of 1/5000 of a weight, by a gradient and by decay alone; the bound is 4 deviations."""
    n, expected = 100_000, 1 - 20 / 5000
    for options, grad in (({"lr": 1 / 5000}, 1.0), ({"lr": 1.0, "weight_decay": 1 / 5000}, 0.0)):
        found = {}
        for rounding_mode in ("nearest", "stochastic"):
            param = Parameter(torch.ones(n, dtype=dtype))
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
        param = Parameter(torch.ones(10_000))
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
@pytest.mark.parametrize("pair", ["AdamW", "SGD nesterov"])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(pair: str, given: dict[str, Any], impl: str) -> None:
    """With a skipped step, whether the model is loaded before the optimizer or after it, or both are copied."""
    cls, _, options = PAIRS[pair]
    params = parameters()
    optimizer = cls(params, impl=impl, **options, **given)
    train(optimizer, params, range(3), skipped=(1,))
    weights, saved = [p.detach().clone() for p in params], copy.deepcopy(optimizer.state_dict())
    copied, copies = pickle.loads(pickle.dumps((optimizer, params)))
    train(optimizer, params, range(3, 5))
    for model_first in (True, False):
        again = parameters(seed=1)
        loaded = cls(again, impl=impl, seed=5, **options, **given)  # streams come with the state
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
    train(optimizer, params, range(3))
    before = everything(optimizer, params)
    with mock.patch.object(reference, "is_on_host", return_value=impl != "device"):
        train(optimizer, params, [3], skipped=(3,))
    assert_equal(everything(optimizer, params), before)


@pytest.mark.parametrize("given", [{**STOCHASTIC, **REMAINDER}, BOTH], ids=str)
@pytest.mark.parametrize("pair", ["AdamW amsgrad maximize", "SGD nesterov"])
def test_masters_before_the_first_step_leave_what_a_first_step_would_have_made(pair: str, given: Any) -> None:
    """Streams above all: equal ones for equal seeds, as replicas on several ranks need them, and one per parameter."""
    cls, _, options = PAIRS[pair]
    runs = []
    for seed, has_masters in ((0, True), (0, False), (1, False)):
        params = parameters()
        optimizer = cls([{"params": params[:2]}, {"params": params[2:]}], seed=seed, **options, **given)
        if has_masters:
            optimizer.set_masters({p: p.detach().float() for p in params})
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(optimizer, params, range(3))
        runs.append((everything(optimizer, params), {int(optimizer.state[p]["stream"]) for p in params}))
    assert_equal(runs[0][0], runs[1][0])
    assert len(runs[1][1] | runs[2][1]) == 8


def by_another_optimizer(param: Parameter, value: Tensor) -> None:
    param.grad = param.detach() - value
    torch.optim.SGD([param], lr=1.0).step()


@interpreted
@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize(
    "write",
    [
        lambda param, value: param.detach().copy_(value),
        lambda param, value: setattr(param, "data", value),
        by_another_optimizer,
    ],
    ids=["copy", "assignment", "optimizer"],
)
def test_a_weight_that_is_written_from_outside_loses_its_remainder(write: Callable[..., None], impl: str) -> None:
    """And only that weight. The first read of masters after it, or the next step, finds out."""
    optimizer, params = trained(2, impl=impl, **REMAINDER)
    copied, copies = copy.deepcopy((optimizer, params))
    before = [m.clone() for m in optimizer.masters().values()]
    write(params[0], torch.full((5, 3), 0.5).bfloat16())
    copied.set_masters({copies[0]: params[0].detach().float()})
    train(optimizer, params, [2])
    train(copied, copies, [2])
    assert_equal(everything(optimizer, params), everything(copied, copies))
    write(params[0], torch.full((5, 3), 0.25).bfloat16())
    assert torch.equal(optimizer.masters()[params[0]], torch.full((5, 3), 0.25))
    assert not torch.equal(before[3], before[3].bfloat16().float())


@pytest.mark.parametrize("given", [STOCHASTIC, REMAINDER, BOTH, {"state_dtype": torch.float32}], ids=str)
@pytest.mark.parametrize("pair", ["AdamW amsgrad maximize", "SGD nesterov"])
def test_large_parameters_are_stepped_in_pieces_with_the_same_bits(
    pair: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever their strides, on a CPU and where only the device knows of a skipped step; and in little memory.

    Sizes are multiples of a vector: torch's fused functions round the other elements of a list differently.
    """
    cls, _, options = PAIRS[pair]
    for module, on_host, pieces in ((float32_step, True, (16, 64)), (reference, False, (7, 64))):
        monkeypatch.setattr(reference, "is_on_host", lambda _, on_host=on_host: on_host)
        ends = []
        for piece in (1 << 20, *pieces):
            monkeypatch.setattr(module, "PIECE", piece)
            generator = torch.Generator().manual_seed(0)
            shapes = ((40, 6), (32, 5), (4, 4, 5, 2), (16, 8), (0,))
            values, grads = ([torch.randn(s, generator=generator).bfloat16() for s in shapes] for _ in range(2))
            values[1] = values[1].t()
            grads[1] = grads[1].view(5, 32)
            values[2] = values[2].to(memory_format=torch.channels_last)
            values[3], grads[3] = values[3][:, ::2], grads[3][:, :1].expand(16, 4)
            params = list(map(Parameter, values))
            optimizer = cls(params, **options, **given)
            for step in range(3):
                for param, grad in zip(params, grads, strict=True):
                    param.grad = grad
                optimizer.found_inf = torch.tensor(float(step == 1))
                optimizer.step()
            ends.append(everything(optimizer, params))
        for end in ends[1:]:
            for found, wanted in zip(end, ends[0], strict=True):
                assert torch.equal(found, wanted)
    param = Parameter(torch.ones(1 << 16).bfloat16())
    param.grad, optimizer = torch.ones_like(param), cls([param], **options, **given)
    monkeypatch.setattr(float32_step, "PIECE", 1 << 12)
    monkeypatch.setattr(reference, "is_on_host", is_on_host)
    optimizer.step()
    assert peak_and_copies(optimizer.step, torch.device("cpu"))["peak_bytes"] < 8 * (1 << 16)


@pytest.mark.parametrize("given", [STOCHASTIC, REMAINDER, BOTH, {"state_dtype": torch.bfloat16}], ids=str)
@pytest.mark.parametrize("pair", PAIRS)
def test_a_step_on_a_cpu_is_near_the_reference(pair: str, given: dict[str, Any]) -> None:
    """With scaled gradients, float32 parameters, a tensor for `lr`, and other defaults of torch; to a last bit."""
    cls, _, options = PAIRS[pair]
    ends = []
    for on_host in (True, False):
        params = [*parameters(), *parameters_of(torch.float32)]
        optimizer = cls(params, **{**options, "lr": torch.tensor(options["lr"])}, **given)
        optimizer.grad_scale = torch.tensor(4.0)
        with mock.patch.object(reference, "is_on_host", return_value=on_host):
            for step in range(3):
                train(optimizer, params[:4], [step], scale=4.0)
                train(optimizer, params[4:], [step], scale=4.0)
            torch.set_default_dtype(torch.bfloat16)
            try:
                with torch.device("meta"):
                    optimizer.step()
            finally:
                torch.set_default_dtype(torch.float32)
        masters = optimizer.masters() if "masters" in given else {}
        ends.append([masters.get(p, p.detach()).float() for p in params])
        ends.append([v.float() for p in params for k, v in optimizer.state[p].items() if "remainder" not in k])
    for found, wanted in zip(ends[0] + ends[1], ends[2] + ends[3], strict=True):
        differs = found != wanted
        spacing = 2**-7 if differs.float().mean() < 0.02 else 2**-21  # few bfloat16 numbers may be rounded apart
        torch.testing.assert_close(found, wanted, rtol=spacing, atol=1e-6)


def test_a_compiled_step_keeps_masters() -> None:
    """With nothing that Dynamo made of their marks left to fail when it is deleted."""
    ends = []
    for compile in (lambda step, **_: step, torch.compile):
        param = Parameter(torch.ones(3).bfloat16())
        optimizer = SGD([param], lr=1e-3, **REMAINDER)
        step, param.grad = compile(optimizer.step, backend="eager"), torch.ones_like(param)
        for _ in range(3):
            step()
        ends.append([*optimizer.masters().values()])
    assert_equal(*ends)


def test_every_assignment_of_data_is_noticed() -> None:
    """Also where the storage lies where the old one lay, or is the old one."""
    for n_assignments in range(1, 6):
        optimizer, params = trained(2, **REMAINDER)
        for _ in range(n_assignments):
            params[3].data = torch.full((40, 6), 0.5).bfloat16()
        assert torch.equal(optimizer.masters()[params[3]], torch.full((40, 6), 0.5))
    flat = torch.ones(20).bfloat16()
    param = Parameter(flat[:10])
    optimizer = AdamW([param], lr=1e-3, **REMAINDER)
    param.grad = torch.ones_like(param)
    optimizer.step()
    param.data = flat[10:]
    assert torch.equal(optimizer.masters()[param], torch.ones(10))


@pytest.mark.parametrize("way", ["state_dict", "pickle", "deepcopy"])
def test_copies_of_an_optimizer_drop_remainders_of_weights_written_to(way: str) -> None:
    optimizer, params = trained(2, **REMAINDER)
    params[0].detach().fill_(1.0)
    if way == "state_dict":
        copied, copies = AdamW(params, **REMAINDER), params
        copied.load_state_dict(optimizer.state_dict())
    else:
        copied, copies = (
            pickle.loads(pickle.dumps((optimizer, params))) if way == "pickle" else copy.deepcopy((optimizer, params))
        )
    assert torch.equal(copied.masters()[copies[0]], torch.ones(5, 3))


@pytest.mark.parametrize(
    "other",
    [
        torch.optim.AdamW,
        AdamW,
        partial(AdamW, **STOCHASTIC),
        partial(AdamW, state_dtype=torch.float32),
    ],
)
def test_what_another_optimizer_has_stepped_leaves_no_remainder_and_streams_begin(other: Callable[..., Any]) -> None:
    optimizer, params = trained(2, **BOTH)
    between = other(params)
    between.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(between, params, range(2, 4))
    state = copy.deepcopy(between.state_dict())
    if other is torch.optim.AdamW:  # which has converted what it does not know
        before = everything(optimizer, params)
        for name, dtype in (("remainder", "torch.float16"), ("stream", "torch.int64")):
            with pytest.raises(ValueError, match=f"saved '{name}' of parameter 0 is torch.bfloat16; expected {dtype}"):
                optimizer.load_state_dict(state)
            assert_equal(everything(optimizer, params), before)
            state["state"] = {n: {k: v for k, v in one.items() if k != name} for n, one in state["state"].items()}
    optimizer.load_state_dict(state)
    assert torch.equal(optimizer.masters()[params[3]], params[3].float())
    train(optimizer, params, [4])
    assert optimizer.state[params[0]]["stream"].dtype is torch.int64


def test_hooks_have_the_last_word_on_a_state_that_is_loaded() -> None:
    optimizer, params = trained(1, **BOTH)
    saved = copy.deepcopy(optimizer.state_dict())

    def change(_: Any, given: dict[str, Any]) -> dict[str, Any]:
        changed = {n: {**entries, "exp_avg": entries["exp_avg"] + 1} for n, entries in given["state"].items()}
        return {**given, "state": changed}

    optimizer.register_load_state_dict_pre_hook(change)
    optimizer.register_load_state_dict_post_hook(lambda loaded: loaded.state[params[0]]["step"].fill_(7))
    optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.state[params[0]]["exp_avg"], saved["state"][0]["exp_avg"] + 1)
    assert optimizer.state[params[0]]["step"] == 7


def test_masters_are_given_and_taken() -> None:
    params = [*parameters(), Parameter(torch.ones(2))]  # one of float32 has no master
    wide = [p.detach().float() * 1.001 for p in params[:4]]
    before = [p.detach().clone() for p in params]
    optimizer = AdamW(params, **REMAINDER)
    for masters, message in (
        ({params[0]: wide[0], params[1]: params[1].detach()}, r"got a torch.bfloat16 tensor of shape \(1,\) on cpu"),
        ({params[0]: wide[0], params[1]: 1.0}, r"set_masters got 1\.0 for a torch.bfloat16 tensor"),
        ({wide[0]: wide[0]}, "set_masters got a key that is not a parameter of this optimizer, a torch.float32"),
        ({"weight": wide[0]}, "set_masters got a key that is not a parameter of this optimizer, 'weight'"),
        (None, "set_masters got None; expected a dict of tensors by parameter"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            optimizer.set_masters(masters)
        assert_equal([p.detach() for p in params], before)
    assert [m.dtype for m in optimizer.masters().values()] == [torch.float32] * 4
    optimizer.set_masters(dict(zip(params, wide, strict=False)))
    assert_equal(list(optimizer.masters().values()), wide)
    optimizer.load_state_dict(AdamW(params, **REMAINDER).state_dict())
    assert_equal(list(optimizer.masters().values()), [p.detach().float() for p in params[:4]])
    with pytest.raises(ValueError, match="expected an optimizer with masters='remainder'"):
        SGD(params).set_masters({})


@pytest.mark.parametrize(
    ("given", "weight", "wanted"),
    [
        ({}, torch.bfloat16, torch.bfloat16),
        (STOCHASTIC, torch.bfloat16, torch.bfloat16),
        (REMAINDER, torch.bfloat16, torch.float32),
        (STOCHASTIC, torch.float32, torch.float32),
        ({"state_dtype": torch.float32}, torch.bfloat16, torch.float32),
        ({"state_dtype": torch.bfloat16}, torch.float32, torch.bfloat16),
        (BOTH, torch.bfloat16, torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("pair", ["AdamW amsgrad maximize", "SGD nesterov"])
def test_state_has_its_dtype_and_takes_torchs(pair: str, given: Any, weight: torch.dtype, wanted: torch.dtype) -> None:
    cls, torchs, options = PAIRS[pair]
    params, theirs = parameters_of(weight), parameters_of(torch.float32)
    optimizer, other = cls(params, **options, **given), torchs(theirs, **options)
    train(other, theirs, range(1))
    for _ in range(2):
        train(optimizer, params, range(1))
        kept = [v.dtype for name, v in optimizer.state[params[0]].items() if name in other.state[theirs[0]]]
        assert set(kept) <= {wanted, torch.float32}  # step counts are float32
        assert wanted in kept
        optimizer.load_state_dict(other.state_dict())
    other.load_state_dict(optimizer.state_dict())
    train(other, theirs, range(1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.complex64])
def test_parameters_of_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    """When a group is added, and where they have become so."""
    param, changed = Parameter(torch.ones(2).to(dtype)), Parameter(torch.ones(2))
    optimizer = AdamW([changed], **REMAINDER)
    with pytest.raises(TypeError, match=rf"got a {dtype} parameter of shape \(2,\); expected bfloat16 or float32"):
        optimizer.add_param_group({"params": [param]})
    assert len(optimizer.param_groups) == 1
    changed.data = param.data
    changed.grad = torch.ones_like(changed)
    with pytest.raises(TypeError, match=f"got a {dtype} parameter"):
        optimizer.step()
    assert not optimizer.state[changed]
