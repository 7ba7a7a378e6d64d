"""ampkit.optim: torch.optim's results on the CPU, under either scaler; the kernels' path in the interpreter."""

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import Parameter
from torch.utils._pytree import tree_map

from ampkit.gradients.step_contract import StepScalars
from ampkit.optim import SGD, AdamW
from ampkit.scaler.grad_scaler import GradScaler
from tests.helpers.scaler_tools import alike, count_reads, iterate, started, with_grads
from tests.optim.steps import PAIRS, SKIPPED, copies_of, interpreted, parameters, train

FORMS = {"default": {}, "fused": {"fused": True}, "foreach": {"foreach": True}, "for-loop": {"fused": False}}
BOTH = pytest.mark.parametrize("cls", [AdamW, SGD])
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of overflows


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("pair", PAIRS)
def test_scaled_steps_equal_torchs_unscaled_ones(pair: str, dtype: torch.dtype, form: str) -> None:
    """Also those that torch's fused SGD gets wrong on a CPU, where momentum begins at different steps among them."""
    if dtype.is_complex and form == "fused":
        pytest.skip("torch's fused optimizers take no complex parameters")
    ours, theirs, options = PAIRS[pair]
    params = parameters(dtype)
    others = copies_of(params)
    # never torch's fused SGD on a CPU, which leaves whole vectors of 16-bit parameters as they were
    same_form = {} if ours is SGD and form == "fused" else FORMS[form]
    if ours is AdamW and form == "default" and not dtype.is_complex:
        same_form = FORMS["fused"]
    mine, reference = ours(params, **options, **FORMS[form]), theirs(others, **options, **same_form)
    mine.grad_scale = torch.tensor(1024.0)
    for step in range(100 if dtype is torch.float32 else 20):
        train(mine, params, [step], SKIPPED, scale=1024.0)
        if step in SKIPPED:
            assert [bool(p.grad.isinf().all()) for p in params if p.grad is not None].count(False) == 0, step
        else:
            train(reference, others, [step])
    torch.testing.assert_close(params, others, rtol=0, atol=0)


@BOTH
def test_fused_on_a_cpu_reads_strides(cls: Any) -> None:
    """As of a channels_last weight with contiguous gradients, whose elements torch's fused AdamW takes for others."""
    wide, gradient = torch.randn(2, 4, 6, 3, 3).unbind()
    weights = [Parameter(wide.to(memory_format=torch.channels_last)), Parameter(wide.clone())]
    for weight in weights:
        weight.grad = gradient.clone()
        cls([weight], lr=0.1, fused=True).step()
    torch.testing.assert_close(*weights, rtol=1e-5, atol=0)


@pytest.mark.parametrize("chosen", [{}, {"fused": True}])
def test_the_default_on_a_cpu_is_torchs_fused_step(chosen: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """But not with the state of a smaller parameter, which torch's load_state_dict lets pass, or of another dtype.

    The fused step would write past its end.
    """
    fused, sizes = torch._fused_adamw_, []
    monkeypatch.setattr(
        torch, "_fused_adamw_", lambda *args, **given: sizes.append(len(args[0])) or fused(*args, **given)
    )
    params = parameters()
    optimizer = AdamW(params, **chosen)
    train(optimizer, params, range(3))
    assert sizes == [3, 3, 4]
    if not chosen:
        for others in ({"fused": False}, {"foreach": False}, {"foreach": True}):
            train(AdamW(params, **others), params, [0])
        assert len(sizes) == 3
    moment = optimizer.state[params[0]]["exp_avg"]
    for wrong in (moment.new_zeros(2), moment.half()):
        optimizer.state[params[0]]["exp_avg"] = wrong
        with pytest.raises(RuntimeError, match=r"size|dtype"):
            train(optimizer, params, [3])
    assert len(sizes) == 3


@interpreted
@pytest.mark.parametrize("pair", PAIRS)
def test_kernel_path_over_many_steps(pair: str) -> None:
    """It reads nothing on the host."""
    ours, theirs, options = PAIRS[pair]
    params = parameters()
    others = copies_of(params)
    mine = ours(params, impl="triton", **{**options, "lr": torch.tensor(options["lr"])})
    reference = theirs(others, **options)
    mine.grad_multiplier = torch.tensor(2.0**-10)
    for step in range(25):
        versions = [p._version for p in params]
        with count_reads() as reads:
            train(mine, params, [step], SKIPPED, scale=1024.0)
        assert not [read for read in reads if "_local_scalar_dense" in read]
        # autograd is notified
        unchanged = [i for i, p in enumerate(params) if p.grad is not None and p._version <= versions[i]]
        assert unchanged == [], "versions of these parameters"
        if step not in SKIPPED:
            train(reference, others, [step])
    torch.testing.assert_close(params, others, rtol=0, atol=25 * 2.0**-22)
    if isinstance(mine, AdamW):
        assert [mine.state[param]["step"].item() for param in params] == [23.0, 22.0, 23.0, 23.0]


@interpreted
@pytest.mark.parametrize("impl", ["auto", "triton", "reference"])
@pytest.mark.parametrize("options", [{}, {"masters": "remainder", "rounding": "stochastic"}], ids=["torch", "bfloat16"])
@pytest.mark.parametrize("pair", PAIRS)
def test_a_backward_through_a_weight_that_a_step_has_changed_raises(pair: str, options: Any, impl: str) -> None:
    """Also in steps taken as the last one was. A skipped step counts too."""
    ours, _, given = PAIRS[pair]
    weight = Parameter(torch.ones(3, 3, dtype=torch.bfloat16 if options else torch.float32))
    optimizer = ours([weight], impl=impl, **given, **options)
    for _ in range(4):
        x = torch.ones(3, 3, dtype=weight.dtype, requires_grad=True)
        loss = (x @ weight).sum()
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            loss.backward()
    if options:
        loss = (x @ weight).sum()
        optimizer.set_masters(optimizer.masters())
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            loss.backward()


@interpreted
@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("pair", PAIRS)
def test_state_dicts_go_both_ways(pair: str, impl: str) -> None:
    ours, theirs, options = PAIRS[pair]
    params = parameters()
    others = copies_of(params)
    options = {**options, "fused": False}
    mine, reference = ours(params, impl=impl, **options), theirs(others, **options)
    train(mine, params, range(3))
    train(reference, others, range(3))
    saved, their_saved = copy.deepcopy(mine.state_dict()), copy.deepcopy(reference.state_dict())
    assert saved["param_groups"] == their_saved["param_groups"]
    mine.load_state_dict(their_saved)
    reference.load_state_dict(saved)
    train(mine, params, range(3, 6))
    train(reference, others, range(3, 6))
    torch.testing.assert_close(params, others, rtol=0, atol=0 if impl == "auto" else 1e-6)


@pytest.mark.parametrize("impl", ["auto", "reference"])
@BOTH
def test_closures_and_missing_gradients(cls: type, impl: str) -> None:
    """A whole group without them too, with scalars to multiply by."""
    params = parameters()
    optimizer = cls([{"params": params[:2]}, {"params": params[2:]}], lr=0.1, impl=impl)
    assert optimizer.step(lambda: torch.tensor(3.0)) == 3.0
    before = [p.detach().clone() for p in params]
    params[0].grad = torch.ones_like(params[0])
    optimizer.grad_multiplier, optimizer.grad_scale = torch.tensor(0.5), torch.tensor(4.0)
    optimizer.step()
    assert not torch.equal(params[0], before[0])
    assert [param.tolist() for param in params[1:]] == [value.tolist() for value in before[1:]]


def test_copies_pickles_and_loaded_states_keep_the_arguments() -> None:
    params = parameters()
    optimizer = AdamW(params, impl="reference", lr=0.5, max_grad_norm=0.1)
    train(optimizer, params, [0])
    copies = [pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)]
    optimizer.load_state_dict(AdamW(parameters(), lr=0.25).state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.25
    for one in (*copies, optimizer):
        assert (one.impl, one.max_grad_norm) == ("reference", 0.1)
        assert torch.equal(one.grad_norm, optimizer.grad_norm)
        one.param_groups[0]["params"][0].grad = torch.ones(5, 3)
        one.step()


def clipped_by_torch(optimizer: Any, params: list[Parameter], steps: Any, max_norm: float) -> list[Tensor]:
    """Steps of torch's clipping and optimizer; returns the norms."""
    norms = []
    step = optimizer.step
    optimizer.step = lambda: (norms.append(torch.nn.utils.clip_grad_norm_(params, max_norm)), step())
    train(optimizer, params, steps)
    return norms


@interpreted
@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("scaler", [None, GradScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("before", ["nothing", "unscale_"])
@pytest.mark.parametrize("pair", ["AdamW", "SGD nesterov"])
def test_a_step_clips_by_the_norm_of_all_groups(pair: str, before: str, scaler: Any, impl: str) -> None:
    """As torch's clipping before torch's step, without writing a gradient; also in steps taken as the last one was."""
    ours, theirs, options = PAIRS[pair]
    params = parameters()
    others = copies_of(params)
    groups = [{"params": params[:2]}, {"params": params[2:]}]
    mine = ours(groups, impl=impl, **options, max_grad_norm=2.0)
    fused = {"fused": True} if ours is AdamW and impl == "auto" else {}
    norms = clipped_by_torch(theirs(others, **options, **fused), others, range(4), 2.0)
    scaling = None if scaler is None else started(scaler, 8.0)
    step, scale = mine.step, 1.0 if scaler is None else 8.0
    seen: list[Tensor] = []

    def scaled_step() -> None:
        if scaling is not None and before == "unscale_":
            scaling.unscale_(mine)
        gradients = [None if p.grad is None else p.grad.clone() for p in params]
        step() if scaling is None else iterate_with(scaling, step)
        seen.append(mine.grad_norm)
        if impl == "triton" or scaler is not torch.amp.GradScaler:
            assert alike(gradients, [p.grad for p in params])

    def iterate_with(scaling: Any, step: Any) -> None:
        mine.step = step
        scaling.step(mine)
        scaling.update()
        mine.step = scaled_step

    mine.step = scaled_step
    train(mine, params, range(4), scale=scale)
    torch.testing.assert_close(seen, norms, rtol=1e-6, atol=0)
    torch.testing.assert_close(params, others, rtol=1e-5, atol=1e-6)
    if scaler is GradScaler:
        torch.testing.assert_close([row["grad_norm"] for row in scaling.history], [n.item() for n in norms])


@interpreted
@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("limit", [None, 100.0])
def test_a_clipping_step_skips_as_any_other(impl: str, limit: float | None) -> None:
    """For inf and NaN, and for a norm above `skip_above`, which is the norm that the step has taken."""
    params = parameters()
    optimizer = AdamW(params, impl=impl, max_grad_norm=1.0)
    scaler = started(GradScaler, 4.0, skip_above=limit)
    for factor, taken in ((1.0, True), (math.inf, False), (math.nan, False), (1e4, limit is None), (1.0, True)):
        before = [p.detach().clone() for p in params]
        for param in params:
            param.grad = torch.full_like(param, factor * scaler.get_scale())
        iterate(scaler, optimizer)
        assert alike(before, [p.detach() for p in params]) is not taken
        assert scaler.stepped(optimizer) is taken
        assert optimizer.grad_norm.isfinite() == math.isfinite(factor)
    assert (scaler.stats().skips, scaler.stats().outliers) == (2, int(limit is not None))


@pytest.mark.filterwarnings("ignore:.*Dynamo:UserWarning")  # torch 2.11 says what it does not trace
@BOTH
def test_a_scalers_step_skips_inside_compiled_code_too(cls: type) -> None:
    """Dynamo drops what is set on an optimizer while it traces: the flag would not reach the step."""
    param = Parameter(torch.ones(3))
    optimizer, scaler = cls([param], lr=0.5), GradScaler("cpu", init_scale=4.0)

    @torch.compile(backend="eager")
    def step() -> None:
        iterate(scaler, optimizer)

    for gradient in (math.inf, 2.0):
        scaler.scale(torch.ones((), requires_grad=True))
        param.grad = torch.full((3,), gradient)
        step()
        assert bool(scaler.found_inf(optimizer)) is (gradient == math.inf)
        assert torch.equal(param, torch.ones(3)) is (gradient == math.inf)
    assert scaler.get_scale() == 2.0


@BOTH
def test_arguments_that_are_refused(cls: Any) -> None:
    one = torch.tensor(0.9)
    for given, text in (
        ({"impl": "cuda"}, "unknown impl 'cuda'; expected 'auto', 'triton' or 'reference'"),
        ({"differentiable": True}, r"differentiable=True; .*torch.optim"),
        ({"lr": -1.0}, "Invalid learning rate"),
        ({"rounding": "up"}, r"unknown rounding 'up'; expected one of \('nearest', 'stochastic'\)"),
        ({"masters": True}, r"unknown masters True; expected one of \(None, 'remainder'\)"),
        ({"state_dtype": torch.float16}, "unknown state_dtype torch.float16; expected one of"),
        ({"seed": 0.5}, "got seed 0.5; expected an int"),
        ({"max_grad_norm": 0.0}, "max_grad_norm is 0.0; expected a positive finite number"),
        ({"max_grad_norm": one}, "max_grad_norm is .*; expected a number, or None for no clipping"),
        ({"betas": (one, one)} if cls is AdamW else {"weight_decay": one}, "got a tensor for .*; expected a float"),
    ):
        with pytest.raises((TypeError, ValueError), match=text):
            cls(parameters(), **given)


@BOTH
def test_steps_that_are_refused(cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(
        RuntimeError, match=r"got a torch.sparse_coo gradient for a parameter of shape \(4, 2\)|consider SparseAdam"
    ):
        cls(embedding.parameters()).step()
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match="impl='triton' cannot run here: the tensors are on the CPU"):
        cls(with_grads([torch.ones(1)]), impl="triton").step()


@pytest.mark.parametrize("impl", ["auto", "triton", "reference"])
@pytest.mark.parametrize("pair", PAIRS)
def test_a_default_device_changes_no_state(pair: str, impl: str) -> None:
    """Every tensor that an optimizer makes is where its parameter is."""
    ours, _, options = PAIRS[pair]
    if impl != "triton" and ours is AdamW and torch.__version__.startswith(("2.11.", "2.12.")):
        pytest.skip("up to torch 2.12 its own step makes its counts on the default device")
    param = Parameter(torch.ones(3))
    optimizer = ours([param], impl=impl, **options)
    optimizer.found_inf, optimizer.grad_scale = torch.zeros(()), torch.tensor(2.0)
    param.grad = torch.ones(3)
    with torch.device("meta"):
        optimizer.step()
        optimizer.step()
    assert {value.device.type for value in optimizer.state[param].values()} <= {"cpu"}
    assert not torch.equal(param, torch.ones(3))


@pytest.mark.parametrize("given", [{"fused": True}, {"masters": "remainder", "rounding": "stochastic"}])
@pytest.mark.parametrize("pair", PAIRS)
def test_steps_of_tensors_without_values(pair: str, given: dict[str, Any]) -> None:
    """FakeTensorMode, which sizes a training step without memory: nothing reads a value, as in torch's fused steps."""
    ours, theirs, options = PAIRS[pair]
    states = []
    with FakeTensorMode():
        for cls, arguments in ((ours, given), (theirs, {"fused": True})):
            param = Parameter(torch.ones(20, dtype=torch.bfloat16))
            optimizer = cls([param], **{**options, **arguments, "lr": torch.tensor(0.1)})
            if cls is ours:
                optimizer.found_inf, optimizer.grad_scale = torch.zeros(()), torch.tensor(2.0)
            for _ in range(2):
                param.grad = torch.ones_like(param)
                optimizer.step()
            states.append({name: value.shape for name, value in optimizer.state[param].items() if value is not None})
    assert states[1].items() <= states[0].items()
    assert states[0].keys() - states[1].keys() == ({"remainder", "stream"} if "masters" in given else set())


def test_the_form_of_torchs_step_is_not_written_to_the_users_groups() -> None:
    """On CUDA without Triton: `fused=True` is for that step alone, not for a checkpoint that a CPU loads."""
    with FakeTensorMode():
        params = with_grads([torch.ones(3, device="cuda")])
        optimizer = AdamW(params, impl="reference")
        before = optimizer.state_dict()["param_groups"]
        optimizer.step()
        assert optimizer._step_torch(optimizer.param_groups[0], params[0].device, StepScalars.of(optimizer))
    assert optimizer.state[params[0]]["step"].is_cuda
    assert optimizer.state_dict()["param_groups"] == before


@pytest.mark.parametrize("pair", [(AdamW, torch.optim.AdamW), (SGD, torch.optim.SGD)], ids=["AdamW", "SGD"])
@pytest.mark.parametrize("fused", [None, True])
def test_float16_gradients_are_not_rounded_away_by_a_factor(pair: Any, fused: bool | None) -> None:
    """2**-10 under a scale of 2**16 is 0 in float16; torch's fused steps unscale in float32."""
    results = []
    for cls, options in zip(pair, ({"fused": fused}, {"fused": True}), strict=True):
        param = Parameter(torch.zeros(3, dtype=torch.float16))
        optimizer = cls([param], lr=0.5, **options)
        param.grad = torch.full_like(param, 2.0**-10)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0**12), torch.zeros(())
        optimizer.step()
        results.append(param.detach())
    assert results[0].all()
    assert torch.equal(*results)


@BOTH
def test_groups_that_ask_for_what_no_step_does_are_refused(cls: Any) -> None:
    """Or for what is an argument of the optimizer. Dampening also where it is set later."""
    param = Parameter(torch.ones(2))
    optimizer = cls([param])
    for name, value in (
        ("differentiable", True),
        ("decoupled_weight_decay", False),
        ("dampening", 0.2),
        ("impl", "auto"),
        ("max_grad_norm", 1.0),
        ("rounding", "nearest"),
        ("masters", None),
        ("state_dtype", None),
        ("seed", 0),
    ):
        with pytest.raises(ValueError, match=f"a parameter group has {name}={value!r}"):
            optimizer.add_param_group({"params": [Parameter(torch.ones(2))], name: value})
    assert len(optimizer.param_groups) == 1
    if cls is SGD:
        with pytest.raises(ValueError, match="a parameter group has dampening"):
            SGD([param], momentum=0.9, dampening=0.2)
        optimizer.param_groups[0]["dampening"] = 0.2
        param.grad = torch.ones(2)
        with pytest.raises(ValueError, match="a parameter group has dampening"):
            optimizer.step()
        assert torch.equal(param, torch.ones(2))


@interpreted
@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"])
def test_moments_of_several_dtypes_are_refused(name: str, impl: str) -> None:
    """Kernels take one dtype for all of them: they would write past the end of the narrow one."""
    params = parameters(torch.bfloat16)
    options = {"lr": 0.01, "impl": impl, "amsgrad": name.startswith("max")}
    optimizer = AdamW(params, **options)
    if impl == "reference":  # where its functions step: torch's own take moments of several dtypes
        optimizer._step_torch = lambda *_: False  # type: ignore[method-assign]
    train(optimizer, params, range(3))
    optimizer.state[params[3]][name] = optimizer.state[params[3]][name].float()
    before = copy.deepcopy((params, optimizer.state_dict()["state"]))
    with pytest.raises(TypeError, match=rf"parameter 3 of shape \(40, 6\), .*{name} of torch.float32.*; expected one"):
        train(optimizer, params, [3])
    torch.testing.assert_close((params, optimizer.state_dict()["state"]), before, rtol=0, atol=0)
    converted = AdamW(params, state_dtype=torch.float32, **options)
    converted.state.update(optimizer.state)
    train(converted, params, [3])
    assert {optimizer.state[p][name].dtype for p in params} == {torch.float32}


class _Wrapped(torch.Tensor):
    """A parameter that knows the operators of torch's default step, as quantized ones do, and not the fused one."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, requires_grad=True)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "fused" in func.name():
            raise NotImplementedError(func.name())
        inner = tree_map(lambda each: each.inner if isinstance(each, cls) else each, (args, kwargs or {}))
        out = func(*inner[0], **inner[1])
        return args[0] if func._schema.is_mutable else out


def test_a_subclass_of_tensors_is_stepped_by_torchs_default() -> None:
    """torch.optim.AdamW, too, takes its fused step for tensors and parameters alone unless asked for it."""
    params = [_Wrapped(torch.ones(3)) for _ in range(2)]
    for param, cls in zip(params, (torch.optim.AdamW, AdamW), strict=True):
        param.grad = torch.ones(3)
        cls([param], lr=0.1).step()
    assert torch.equal(params[0].inner, params[1].inner)
    assert not torch.equal(params[0].inner, torch.ones(3))
