"""adamw_ and sgd_: the reference against torch.optim bit for bit, the kernels against the reference and float64."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ampkit_kernels import adamw_, sgd_
from ampkit_kernels.configs import Config
from tests.kernels.helpers import Guarded, assert_same, assert_within_ulps, clones, gradients

SIZES = (0, 1, 17, 255, 257, 1030)
ADAMW = {
    "plain": {},
    "no decay": {"weight_decay": 0.0},
    "amsgrad": {"amsgrad": True},
    "maximize": {"maximize": True},
    "slow first moment": {"beta1": 0.3},
}
SGD = {
    "plain": {},
    "decay": {"weight_decay": 0.1},
    "momentum": {"momentum": 0.9},
    "dampening": {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    "nesterov": {"momentum": 0.9, "nesterov": True, "maximize": True},
}
ADAMW_DEFAULTS = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
OVERFLOWS = (0, 3)  # steps that are skipped, the first among them


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


class AdamWState:
    def __init__(self, params, amsgrad: bool = False, copies: torch.dtype | None = None) -> None:
        self.params = clones(params)
        self.exp_avgs = [torch.zeros_like(p) for p in params]
        self.exp_avg_sqs = [torch.zeros_like(p) for p in params]
        self.maxima = [torch.zeros_like(p) for p in params] if amsgrad else []
        self.steps = [torch.zeros(()) for _ in params]
        self.copies = None if copies is None else [p.to(copies) for p in params]

    def lists(self):
        return self.params, self.exp_avgs, self.exp_avg_sqs, self.maxima, self.steps, self.copies or []

    def step(self, grads, **options) -> None:
        adamw_(
            self.params, grads, self.exp_avgs, self.exp_avg_sqs, self.maxima, self.steps, copies=self.copies,
            **{**ADAMW_DEFAULTS, **options},
        )


class SGDState:
    def __init__(self, params) -> None:
        self.params = clones(params)
        # What a buffer holds before its first step must not matter.
        self.buffers = [torch.full_like(p, float("nan")) for p in params]
        self.started = torch.zeros(len(params))

    def lists(self):
        return self.params, self.buffers, [self.started]

    def step(self, grads, **options) -> None:
        started = list(self.started.unbind()) if options.get("momentum") else None
        sgd_(self.params, grads, self.buffers, lr=0.1, started=started, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", ADAMW)
def test_reference_adamw_has_torchs_bits(case: str, dtype: torch.dtype) -> None:
    options = {**ADAMW_DEFAULTS, **ADAMW[case]}
    state = AdamWState(gradients(dtype, SIZES), options.get("amsgrad", False))
    params = [torch.nn.Parameter(p.clone()) for p in state.params]
    torch_options = {k: v for k, v in options.items() if not k.startswith("beta")}
    optimizer = torch.optim.AdamW(
        params, betas=(options["beta1"], options["beta2"]), foreach=False, **torch_options
    )
    for _ in range(100):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
        state.step([p.grad for p in params], impl="reference", **ADAMW[case])
    assert_same(state.params, [p.detach() for p in params])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", SGD)
def test_reference_sgd_has_torchs_bits(case: str, dtype: torch.dtype) -> None:
    state = SGDState(gradients(dtype, SIZES))
    params = [torch.nn.Parameter(p.clone()) for p in state.params]
    optimizer = torch.optim.SGD(params, lr=0.1, foreach=False, **SGD[case])
    for _ in range(100):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
        state.step([p.grad for p in params], impl="reference", **SGD[case])
    assert_same(state.params, [p.detach() for p in params])


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("case", ADAMW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adamw_kernel_within_an_ulp_per_step(dtype: torch.dtype, case: str) -> None:
    params = gradients(dtype, SIZES)
    amsgrad = ADAMW[case].get("amsgrad", False)
    ours, theirs = (AdamWState(params, amsgrad, torch.float16) for _ in range(2))
    for i in range(6):
        grads = gradients(dtype, SIZES, scale=1024.0)
        before = clones(grads)
        flags = {
            "multiplier": scalar(2.0**-11),
            "grad_scale": scalar(0.5),
            "found_inf": scalar(float(i in OVERFLOWS)),
        }
        untouched = [clones(part) for part in ours.lists()]
        ours.step(grads, impl="triton", **flags, **ADAMW[case])
        assert_same(grads, before)
        if i in OVERFLOWS:
            for now, then in zip(ours.lists(), untouched, strict=True):
                assert_same(now, then)
        theirs.step(grads, impl="reference", **flags, **ADAMW[case])
        assert_same(ours.steps, theirs.steps)
        # Against what goes into a sum, not what is left of it: m and p may cancel to almost nothing.
        m_size = [torch.maximum(m.abs(), g.abs() / 1024) for m, g in zip(theirs.exp_avgs, grads, strict=True)]
        assert_within_ulps(ours.exp_avgs, theirs.exp_avgs, m_size, 1.0)
        assert_within_ulps(ours.exp_avg_sqs, theirs.exp_avg_sqs, theirs.exp_avg_sqs, 1.0)
        p_size = [p.abs() + 0.02 for p in theirs.params]
        # In float64 the bias corrections themselves carry a few roundings.
        assert_within_ulps(ours.params, theirs.params, p_size, 4.0 if dtype is torch.float64 else 1.0)
        assert_same(ours.copies, [p.half() for p in ours.params])
        # One step at a time: start the next from the same state.
        for a, b in zip(ours.lists()[:4], theirs.lists()[:4], strict=True):
            torch._foreach_copy_(a, b) if a else None
    assert theirs.steps[1] == 4


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("case", SGD)
def test_sgd_kernel_within_an_ulp_per_step(case: str) -> None:
    params = gradients(torch.float32, SIZES)
    ours, theirs = SGDState(params), SGDState(params)
    for i in range(5):
        grads = gradients(torch.float32, SIZES, scale=1024.0)
        flags = {"multiplier": scalar(2.0**-10), "found_inf": scalar(float(i in OVERFLOWS))}
        untouched = [clones(part) for part in ours.lists()]
        ours.step(grads, impl="triton", **flags, **SGD[case])
        if i in OVERFLOWS:
            for now, then in zip(ours.lists(), untouched, strict=True):
                assert_same(now, then)
        theirs.step(grads, impl="reference", **flags, **SGD[case])
        assert torch.equal(ours.started, theirs.started)
        size = [p.abs() + g.abs() / 1024 + 4 for p, g in zip(theirs.params, grads, strict=True)]
        assert_within_ulps(ours.params, theirs.params, size, 1.0)
        for a, b in zip(ours.lists()[:2], theirs.lists()[:2], strict=True):
            torch._foreach_copy_(a, b)
    assert bool((ours.started == (1.0 if SGD[case].get("momentum") else 0.0)).all())


@pytest.mark.usefixtures("interpreted")
def test_rows_apart_are_not_picked_by_lists_of_the_host() -> None:
    """On a device `started[[0, 2]]` copies the list there and waits, and cannot be captured."""

    class Indexing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert func.overloadpacket not in (torch.ops.aten.index, torch.ops.aten.index_put_)
            return func(*args, **(kwargs or {}))

    for sizes in ((0, 5, 0, 7), (0,)):
        state = SGDState(gradients(torch.float32, sizes))
        with Indexing():
            state.step(gradients(torch.float32, sizes), impl="triton", **SGD["dampening"])
        assert bool((state.started == 1.0).all())


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.float16])
def test_adamw_with_bucket_views_for_gradients(grad_dtype: torch.dtype, offset: int) -> None:
    params = gradients(torch.float32, SIZES)
    values = gradients(grad_dtype, SIZES)
    grads = Guarded(values, offset)
    # Every other gradient is an ordinary tensor: aligned and unaligned rows in one list.
    mixed = [g if i % 2 else v for i, (g, v) in enumerate(zip(grads.views, values, strict=True))]
    ours, theirs = AdamWState(params), AdamWState(params)
    ours.step(mixed, impl="triton")
    theirs.step(mixed, impl="reference")
    assert_within_ulps(ours.params, theirs.params, [p.abs() + 0.02 for p in params], 1.0)
    assert_same(ours.steps, [torch.ones(())] * len(SIZES))
    assert grads.guards_intact()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_low_precision_parameters_are_updated_in_float32(impl: str) -> None:
    params = [torch.randn(300).half()]
    state = AdamWState(params)
    state.exp_avgs, state.exp_avg_sqs = [torch.zeros(300)], [torch.zeros(300)]
    wide = AdamWState([params[0].float()])
    grads = [torch.randn(300).half()]
    state.step(grads, impl=impl)
    wide.step([grads[0].float()], impl="reference")
    assert_same(state.params, [wide.params[0].half()])


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_learning_rate_on_the_device(impl: str) -> None:
    params, grads = gradients(torch.float32, (40,)), gradients(torch.float32, (40,))
    number, tensor = AdamWState(params), AdamWState(params)
    number.step(grads, impl=impl, lr=0.25)
    tensor.step(grads, impl=impl, lr=torch.tensor(0.25))
    assert_same(number.params, tensor.params)
    ours, theirs = clones(params), clones(params)
    sgd_(ours, grads, [], lr=torch.tensor(0.25), impl=impl)
    sgd_(theirs, grads, [], lr=0.25, impl=impl)
    # torch's CPU addition fuses a number's product, not a tensor's.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-7)


@pytest.mark.usefixtures("interpreted")
def test_bias_corrections_late_in_a_run() -> None:
    for late in (9_999.0, 1_000_000.0):
        ours, theirs = (AdamWState([torch.ones(20)]) for _ in range(2))
        for state, impl in ((ours, "triton"), (theirs, "reference")):
            state.steps[0].fill_(late)
            state.step([torch.full((20,), 0.1)], impl=impl)
            assert state.steps[0] == late + 1
        assert_within_ulps(ours.params, theirs.params, theirs.params, 1.0)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("impl", ["auto", "reference", "triton"])
def test_complex_and_transposed_parameters(impl: str) -> None:
    params = [torch.randn(9, dtype=torch.complex64), torch.randn(6, 5).t()]
    grads = [torch.randn(9, dtype=torch.complex64), torch.randn(6, 5).t()]
    state = AdamWState(params)
    state.params = [params[0].clone(), params[1].clone(memory_format=torch.preserve_format)]
    tracked = [torch.nn.Parameter(p.clone(memory_format=torch.preserve_format)) for p in params]
    optimizer = torch.optim.AdamW(tracked, lr=0.01, foreach=False)
    for p, g in zip(tracked, grads, strict=True):
        p.grad = g
    optimizer.step()
    state.step(grads, impl=impl)
    torch.testing.assert_close(state.params, [p.detach() for p in tracked], rtol=0, atol=2e-7)


@pytest.mark.parametrize("impl", ["auto", "triton"])
def test_mismatched_strides_and_empty_parameters_go_to_pytorch(interpreted, impl: str) -> None:
    interpreted(Config(block=256, chunk=512))
    params = [torch.randn(6, 5), torch.zeros(0), torch.randn(70)]
    state, alone = AdamWState(clones(params)), AdamWState(clones(params))
    grads = [torch.randn(5, 6).t(), torch.zeros(0), torch.randn(70)]
    state.step(grads, impl=impl)
    alone.step(grads, impl="reference")
    assert [step.item() for step in state.steps] == [1.0] * 3
    for ours, theirs in zip(state.params, alone.params, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2**-22)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_aligned_and_other_rows_of_equal_sizes(interpreted, kind: str) -> None:
    """Both kinds of rows have the same lengths and dtypes, so nothing but alignment tells their tables apart."""
    results = []
    for impl in ("triton", "reference"):
        buffer = torch.zeros(32)
        params = [buffer[i : i + 3] for i in (0, 5, 12, 21)]    # every other one starts at a multiple of 16 bytes
        state = AdamWState([]) if kind == "adamw" else SGDState([])
        state.params = params
        if kind == "adamw":
            state.exp_avgs, state.exp_avg_sqs = clones(params), clones(params)
            state.steps = [torch.full((), float(i)) for i in range(4)]
        else:
            state.buffers, state.started = clones(params), torch.tensor([0.0, 1.0, 0.0, 1.0])
        for step in range(2):
            grads = [torch.full((3,), 10.0**i + step) for i in range(4)]
            state.step(grads, impl=impl, **({} if kind == "adamw" else SGD["dampening"]))
        results.append([buffer, *(t for tensors in state.lists()[1:] for t in tensors)])
    assert results[1][0].unique().numel() > 3
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


def test_refusals() -> None:
    p, g = [torch.ones(2)], [torch.ones(2)]
    with pytest.raises(ValueError, match="got 0 steps for 1 params"):
        adamw_(p, g, [torch.zeros(2)], [torch.zeros(2)], [], [], **ADAMW_DEFAULTS)
    with pytest.raises(ValueError, match=r"grads\[0\] has shape \(3,\)"):
        sgd_(p, [torch.ones(3)], [], lr=0.1)
    with pytest.raises(ValueError, match="got 0 momentum_buffers for 1 params"):
        sgd_(p, g, [], lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match="nesterov needs momentum > 0, got 0"):
        sgd_(p, g, [], lr=0.1, nesterov=True)
    with pytest.raises(ValueError, match=r"sgd_: params\[0\] is a lazily negated or conjugated view"):
        sgd_([torch._neg_view(p[0])], g, [], lr=0.1)
    with pytest.raises(
        ValueError, match=r"an element of started is a torch.float64 tensor of shape \(\); expected one float32"
    ):
        sgd_(p, g, [torch.ones(2)], lr=0.1, momentum=0.9, started=[torch.zeros(()).double()])
    with pytest.raises(ValueError, match=r"multiplier is a torch.float64"):
        sgd_(p, g, [], lr=0.1, multiplier=torch.ones(()).double())
    assert torch.equal(p[0], torch.ones(2))
    adamw_([], [], [], [], [], [], **ADAMW_DEFAULTS)
    sgd_([], [], [], lr=0.1)
