"""ampkit.optim: torch.optim's results on the CPU, under either scaler; the kernels' path in the interpreter."""

import copy
import math
import os
import pickle

import pytest
import torch

from ampkit.optim import SGD, AdamW
from ampkit.scaler.grad_scaler import GradScaler
from tests.helpers.scaler_tools import count_reads, iterate

PAIRS = {
    "AdamW": (AdamW, torch.optim.AdamW, {"lr": 0.01}),
    "AdamW amsgrad maximize": (AdamW, torch.optim.AdamW, {"lr": 0.01, "amsgrad": True, "maximize": True}),
    "SGD": (SGD, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "SGD dampening": (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.2}),
    "SGD nesterov": (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
}
FORMS = {"default": {}, "fused": {"fused": True}, "foreach": {"foreach": True}}
STEPS = 100
SKIPPED = (0, 7)  # the very first step among them

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs the interpreter")


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((5, 3), (1,), (0,), (4, 6))]


def twins(params: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(p.detach().clone()) for p in params]


def assert_same(ours: list[torch.nn.Parameter], theirs: list[torch.nn.Parameter]) -> None:
    for index, (p, q) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(p, q), f"parameter {index} differs by {(p - q).abs().max()}"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("pair", PAIRS)
def test_scaled_steps_equal_torchs_unscaled_ones(pair: str, dtype: torch.dtype, form: str) -> None:
    if dtype.is_complex and form == "fused":
        pytest.skip("torch's fused optimizers take no complex parameters")
    ours, theirs, options = PAIRS[pair]
    params = parameters(dtype)
    others = twins(params)
    same_form = {} if ours is SGD and form == "fused" else FORMS[form]    # never torch's fused SGD on a CPU
    mine, reference = ours(params, **options, **FORMS[form]), theirs(others, **options, **same_form)
    for i in range(STEPS if dtype is torch.float32 else 20):
        for p, q in zip(params, others, strict=True):
            q.grad = torch.randn_like(q)
            p.grad = q.grad * 1024
        before = [p.grad.clone() for p in params]
        mine.grad_scale, mine.found_inf = torch.tensor(1024.0), torch.tensor(float(i in SKIPPED))
        mine.step()
        assert all(torch.equal(p.grad, g) for p, g in zip(params, before, strict=True))  # only read
        if i not in SKIPPED:
            reference.step()
    assert_same(params, others)


@pytest.mark.parametrize("pair", PAIRS)
def test_under_torchs_scaler(pair: str) -> None:
    """Under ampkit's, clipped or not: scaler/test_scaler_optimizers.py."""
    ours, theirs, options = PAIRS[pair]
    params = parameters()
    others = twins(params)
    runs = [
        (group, cls(group, **options), torch.amp.GradScaler("cpu", init_scale=1024.0))
        for group, cls in ((params, ours), (others, theirs))
    ]
    for i in range(12):
        weights = [torch.randn_like(p) for p in params]
        for group, optimizer, scaler in runs:
            optimizer.zero_grad()
            loss = sum((p * w).sum() for p, w in zip(group, weights, strict=True))
            scaler.scale(loss * (float("inf") if i in SKIPPED else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            assert not hasattr(optimizer, "found_inf")
    assert_same(params, others)
    assert runs[0][2].get_scale() == runs[1][2].get_scale()


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("pair", PAIRS)
def test_kernel_path_over_many_steps(pair: str) -> None:
    ours, theirs, options = PAIRS[pair]
    params = parameters()
    others = twins(params)
    mine, reference = ours(params, impl="triton", **options), theirs(others, **options)
    for i in range(25):
        for p, q in zip(params, others, strict=True):
            q.grad = torch.randn_like(q)
            p.grad = q.grad * 1024
        mine.grad_multiplier, mine.found_inf = torch.tensor(2.0**-10), torch.tensor(float(i in SKIPPED))
        versions = [p._version for p in params]
        mine.step()
        assert all(p._version > v for p, v in zip(params, versions, strict=True))  # autograd is notified
        if i not in SKIPPED:
            reference.step()
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=25 * 2.0**-22)
    if isinstance(mine, AdamW):
        assert {state["step"].item() for state in mine.state.values()} == {23.0}


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("pair", PAIRS)
def test_state_dicts_go_both_ways(pair: str, impl: str) -> None:
    ours, theirs, options = PAIRS[pair]
    params = parameters()
    others = twins(params)
    mine, reference = ours(params, impl=impl, **options), theirs(others, **options)

    def step() -> None:
        for p, q in zip(params, others, strict=True):
            q.grad = torch.randn_like(q)
            p.grad = q.grad.clone()
        mine.step()
        reference.step()

    for _ in range(3):
        step()
    saved, their_saved = copy.deepcopy(mine.state_dict()), copy.deepcopy(reference.state_dict())
    assert saved["param_groups"] == their_saved["param_groups"]
    mine.load_state_dict(their_saved)
    reference.load_state_dict(saved)
    for _ in range(3):
        step()
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0 if impl == "auto" else 1e-6)


@pytest.mark.parametrize("dampening", [0.0, 0.3])
@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_skipped_first_step_leaves_no_momentum(dampening: float) -> None:
    for impl in ("auto", "triton", "reference"):
        p, q = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
        mine = SGD([p], lr=0.1, momentum=0.9, dampening=dampening, impl=impl)
        fresh = torch.optim.SGD([q], lr=0.1, momentum=0.9, dampening=dampening)
        p.grad = torch.full((3,), float("nan"))
        mine.found_inf = torch.ones(())
        mine.step()
        mine.found_inf = torch.zeros(())
        for _ in range(2):
            p.grad, q.grad = torch.full((3,), 2.0), torch.full((3,), 2.0)
            mine.step()
            fresh.step()
        torch.testing.assert_close(p, q, rtol=1e-6, atol=0)


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_default_dtype_of_float64_changes_no_flag() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = SGD([p], lr=0.5, momentum=0.9, dampening=0.3, impl="triton")
    p.grad = torch.full((3,), 2.0)
    torch.set_default_dtype(torch.float64)
    try:
        optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert p.tolist() == [0.0, 0.0, 0.0]


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("pair", ["AdamW", "SGD nesterov"])
def test_copies_follow_the_parameters(pair: str, impl: str) -> None:
    ours, _, options = PAIRS[pair]
    params = parameters()
    optimizer = ours(params, impl=impl, **options)
    copies = {p: p.detach().half() for p in params[:2]}
    optimizer.write_copies(copies)
    for found_inf in (0.0, 1.0, 0.0):
        before = [p.detach().clone() for p in params]
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.found_inf = torch.tensor(found_inf)
        optimizer.step()
        assert all(torch.equal(c, p.detach().half()) for p, c in copies.items())
        assert torch.equal(before[0], params[0]) is bool(found_inf)
    optimizer.write_copies({})
    params[0].grad = torch.ones_like(params[0])
    optimizer.found_inf = torch.zeros(())
    stale = copies[params[0]].clone()
    optimizer.step()
    assert torch.equal(copies[params[0]], stale)
    with pytest.raises(ValueError, match="not a parameter of this optimizer"):
        optimizer.write_copies({torch.ones(2): torch.ones(2)})
    with pytest.raises(ValueError, match=r"a copy of shape \(2,\) on cpu for a parameter of shape \(5, 3\)"):
        optimizer.write_copies({params[0]: torch.ones(2)})


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("pair", PAIRS)
def test_the_kernel_path_reads_nothing_on_the_host(pair: str) -> None:
    ours, _, options = PAIRS[pair]
    params = parameters()
    optimizer = ours(params, impl="triton", **{**options, "lr": torch.tensor(0.01)})
    optimizer.found_inf, optimizer.grad_scale = torch.zeros(()), torch.tensor(2.0)
    for _ in range(2):
        for p in params:
            p.grad = torch.randn_like(p)
        with count_reads() as reads:
            optimizer.step()
        assert not [read for read in reads if "_local_scalar_dense" in read]


def test_groups_and_schedulers() -> None:
    params = parameters()
    others = twins(params)
    optimizers = (AdamW(params[:1], lr=0.1), torch.optim.AdamW(others[:1], lr=0.1))
    schedulers = []
    for optimizer, group in zip(optimizers, (params, others), strict=True):
        optimizer.add_param_group({"params": group[1:], "lr": 0.01, "weight_decay": 0.5})
        schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer, 2))
    for _ in range(6):
        for p, q in zip(params, others, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
    assert_same(params, others)


def test_closures_and_missing_gradients() -> None:
    params = parameters()
    optimizer = SGD(params, lr=0.1)
    assert optimizer.step(lambda: torch.tensor(3.0)) == 3.0
    before = [p.detach().clone() for p in params]
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    assert not torch.equal(params[0], before[0])
    assert torch.equal(params[3], before[3])


def test_pickle_and_deepcopy() -> None:
    params = parameters()
    optimizer = AdamW(params, impl="reference")
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.write_copies({params[0]: params[0].detach().half()})
    for twin in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        assert twin.impl == "reference"
        (param, written), = twin._copies.items()
        assert param is twin.param_groups[0]["params"][0]
        param.grad = torch.ones_like(param)
        twin.step()
        assert torch.equal(written, param.half())
        assert not torch.equal(written, optimizer._copies[params[0]])


@pytest.mark.parametrize("cls", [AdamW, SGD])
def test_loading_a_state_dict_changes_no_more_than_torch_does(cls: type) -> None:
    param = torch.nn.Parameter(torch.ones(3))
    written = torch.zeros(3, dtype=torch.bfloat16)
    optimizer = cls([param], lr=0.5, impl="reference")
    optimizer.write_copies({param: written})
    optimizer.load_state_dict(cls([torch.nn.Parameter(torch.ones(3))], lr=0.25).state_dict())
    assert (optimizer.impl, optimizer.param_groups[0]["lr"]) == ("reference", 0.25)
    param.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(written, param.bfloat16())


@pytest.mark.filterwarnings("ignore:.*Dynamo:UserWarning")     # torch 2.11 says what it does not trace
@pytest.mark.parametrize("cls", [AdamW, SGD])
def test_a_scalers_step_skips_inside_compiled_code_too(cls: type) -> None:
    """Dynamo drops what is set on an optimizer while it traces: the flag would not reach the step."""
    param = torch.nn.Parameter(torch.ones(3))
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


@pytest.mark.parametrize("cls", [AdamW, SGD])
def test_refusals(cls: type) -> None:
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = cls(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(
        RuntimeError, match=r"got a torch.sparse_coo gradient for a parameter of shape \(4, 2\)|consider SparseAdam"
    ):
        optimizer.step()
    with pytest.raises(ValueError, match="unknown impl 'cuda'; expected 'auto', 'triton' or 'reference'"):
        cls(parameters(), impl="cuda")
    with pytest.raises(ValueError, match=r"differentiable=True; .*torch.optim"):
        cls(parameters(), differentiable=True)
    with pytest.raises(ValueError, match="Invalid learning rate"):
        cls(parameters(), lr=-1.0)
    tensor = (
        {"betas": (torch.tensor(0.9), torch.tensor(0.99))}
        if cls is AdamW
        else {"weight_decay": torch.ones(())}
    )
    with pytest.raises(TypeError, match=r"got a tensor for (betas|weight_decay); expected a float"):
        cls(parameters(), **tensor)


def test_orders_for_triton_need_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    params = parameters()
    optimizer = AdamW(params, impl="triton")
    params[0].grad = torch.ones_like(params[0])
    with pytest.raises(RuntimeError, match="impl='triton' cannot run here: the tensors are on the CPU"):
        optimizer.step()
    assert not optimizer.state
