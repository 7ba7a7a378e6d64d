"""Tensors that lists may hold, and arguments that are refused; `tests.gpu_checks.operations` has the arithmetic."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

import ampkit_kernels as kernels
from tests.gpu_checks.operations import NONFINITE, ORDERS
from tests.gpu_checks.tools import Guarded, close, same, scalar
from tests.kernels.launches import noted_launches

IMPLS = ("reference", "triton")
INF = float("inf")
ADAMW = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}


def layouts() -> list[Tensor]:
    """Tensors that kernels can address, in any order of dimensions, and tensors that are left to PyTorch."""
    return [
        torch.randn(300),
        torch.randn(33, dtype=torch.complex64),
        torch.randn(7, 9).t(),
        torch.zeros(0),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(8, 8)[::2],
        torch.randn(40).half(),
        torch.randn(6, 1).expand(6, 5),
        torch.randn(5, dtype=torch.complex64).conj(),
    ]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("impl", IMPLS)
def test_every_layout_is_multiplied_once_per_stored_element(impl: str) -> None:
    for operation, flag in ((kernels.unscale_, scalar(0.0)), (kernels.multiply_, None)):
        grads = layouts()
        want = [g.clone() * 0.25 for g in grads]
        sparse = torch.sparse_coo_tensor([[0, 0, 3]], [1.0, 2.0, 4.0], (5,), check_invariants=True)
        operation([*grads, sparse], scalar(0.25), flag, impl=impl)
        same([*(g.resolve_conj() for g in grads), sparse._values()], [*want, torch.tensor([0.25, 0.5, 1.0])])


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("impl", IMPLS)
def test_every_layout_is_read(impl: str) -> None:
    """Every repetition in an expanded tensor counts; a complex number is two elements."""
    grads = layouts()
    flat = torch.cat([torch.view_as_real(g.resolve_conj()).flatten() if g.is_complex() else g.flatten() for g in grads])
    norm = kernels.norm_and_check(grads, scalar(0.5), scalar(0.0), impl=impl)
    close(norm, torch.linalg.vector_norm(flat.double()) * 0.5, 1e-6, "norm")
    into = [torch.full(g.shape, torch.nan, dtype=g.dtype if g.is_complex() else torch.float32) for g in grads]
    kernels.unscale_into_(grads, into, scalar(0.5), scalar(0.0), impl=impl)
    same(into[2:], [g.resolve_conj().to(i.dtype) * 0.5 for g, i in zip(grads, into, strict=True)][2:])
    negated, into = torch._neg_view(torch.full((3,), 2.0)), torch.zeros(3)
    kernels.cast_([negated], [into], impl=impl)
    same([into], [torch.full((3,), -2.0)])


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("impl", ["auto", *IMPLS])
def test_steps_over_complex_transposed_and_empty_parameters_and_other_strides(impl: str) -> None:
    params = [torch.randn(9, dtype=torch.complex64), torch.randn(6, 5).t(), torch.randn(6, 5), torch.zeros(0)]
    grads = [torch.randn(9, dtype=torch.complex64), torch.randn(6, 5).t(), torch.randn(5, 6).t(), torch.zeros(0)]
    tracked = [torch.nn.Parameter(p.clone(memory_format=torch.preserve_format)) for p in params]
    for p, g in zip(tracked, grads, strict=True):
        p.grad = g
    torch.optim.AdamW(tracked, lr=0.01, foreach=False).step()
    moments = [[torch.zeros_like(p) for p in params] for _ in range(2)]
    steps = [torch.zeros(()) for _ in params]
    kernels.adamw_(params, grads, *moments, [], steps, impl=impl, **ADAMW)
    torch.testing.assert_close(params, [p.detach() for p in tracked], rtol=0, atol=2e-7)
    assert [step.item() for step in steps] == [1.0] * 4


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_aligned_and_other_rows_of_equal_sizes(momentum: float) -> None:
    """Their lengths and dtypes are the same, so only alignment distinguishes their tables."""
    results = []
    for impl in IMPLS:
        buffer = torch.zeros(32)
        params = [buffer[i : i + 3] for i in (0, 5, 12, 21)]  # every other one starts at a multiple of 16 bytes
        moments, steps = [[p.clone() for p in params] for _ in range(2)], [torch.full((), float(i)) for i in range(4)]
        for step in range(2):
            grads = [torch.full((3,), 10.0**i + step) for i in range(4)]
            kernels.adamw_(params, grads, *moments, [], steps, impl=impl, **ADAMW)
            kernels.sgd_(params, grads, moments[0], lr=0.1, momentum=momentum, impl=impl)
        results.append([buffer, *moments[0], *moments[1], *steps])
    assert results[1][0].unique().numel() > 3
    torch.testing.assert_close(*results)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, float("inf")])
def test_the_factor_unscales_and_clips(impl: str, order: float) -> None:
    """Numbers and tensors, above and below the norm; gradients in flat memory and others."""
    inv_scale, grads = scalar(0.25), [torch.full((3, 4), 8.0), torch.ones(5).double(), torch.ones(4, 6)[:, ::2]]
    for part, max_norm in itertools.product((grads[:1], grads), (0.5, 1e6, float("inf"), 3, scalar(0.5))):
        flags = scalar(0.0), scalar(0.0)
        norm, factor = kernels.norm_and_clip_factor(part, inv_scale, flags[0], max_norm, order, impl=impl)
        want = kernels.norm_and_check(part, inv_scale, flags[1], order, impl=impl)
        torch.testing.assert_close(norm, want, rtol=0, atol=0)
        torch.testing.assert_close(
            factor.double(), inv_scale * min(1.0, float(max_norm / (want + 1e-6))), rtol=1e-6, atol=0, check_dtype=False
        )
        before = [g.clone() for g in part]
        kernels.multiply_(part, factor, impl=impl)
        torch.testing.assert_close(part, [g * float(factor) for g in before])


def test_a_flat_list_holds_plain_memory() -> None:
    grads = [torch.ones(3), torch.ones(2)]
    assert kernels.FlatList.of(grads) == grads
    others = (torch._neg_view(torch.ones(2)), torch.ones(2).double(), torch.ones(0), torch.ones(4)[::2], grads[0])
    assert [kernels.FlatList.of([grads[0], other]) for other in others] == [None] * 5


@pytest.mark.usefixtures("interpreted")
def test_only_addresses_on_16_byte_boundaries_are_promised_to_be() -> None:
    """An aligned launch has 128-bit accesses, which fault at other addresses; the interpreter allows them."""
    lists = [Guarded([torch.ones(3)] * 4, offsets).views for offsets in ((0,), (0, 0, 1), (0, 1), (0,))]
    steps = [torch.zeros(()) for _ in range(4)]
    with noted_launches() as launches:
        kernels.cast_(*lists[:2], impl="triton")
        kernels.unscale_into_(*lists[1:3], scalar(0.5), scalar(0.0), impl="triton")
        kernels.sgd_(*lists[:3], lr=0.1, momentum=0.9, impl="triton")
        kernels.adamw_(*lists, [], steps, impl="triton", **ADAMW)
    promises = [
        (launch.options["FORM"].aligned if launch.kernel == "step_kernel" else launch.options["ALIGNED"], addresses)
        for launch in launches
        if launch.kernel != "prepare_kernel"
        for addresses in launch.arguments[1:2]
    ]
    assert len(promises) == 8
    for aligned, addresses in promises:
        assert aligned == all(address % 16 == 0 for address in addresses), promises


@pytest.mark.usefixtures("interpreted")
@settings(max_examples=15)
@given(
    sizes=st.lists(st.integers(0, 1500), max_size=6),
    dtypes=st.lists(st.sampled_from((torch.float32, torch.float16, torch.float64)), min_size=6, max_size=6),
    planted=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1499), st.sampled_from(NONFINITE)), max_size=2),
    exponent=st.integers(-20, 2),
    order=st.sampled_from(ORDERS),
)
def test_any_list(sizes: list[int], dtypes: list, planted: list, exponent: int, order: float) -> None:
    """The kernels compute what the reference computes, over one list."""
    grads = [torch.randn(n).to(dtype) for n, dtype in zip(sizes, dtypes, strict=False)]
    for tensor, index, value in planted:
        if tensor < len(grads) and index < grads[tensor].numel():
            grads[tensor][index] = value
    results: list[list[Tensor]] = []
    for impl in IMPLS:
        mine, flags = [g.clone() for g in grads], [scalar(0.0) for _ in range(2)]
        norm = kernels.norm_and_check(mine, scalar(2.0**exponent), flags[0], order, impl=impl)
        kernels.unscale_(mine, scalar(2.0**exponent), flags[1], impl=impl)
        results.append([norm, *flags, *mine])
    torch.testing.assert_close(results[1][0], results[0][0], rtol=4e-6, atol=0, equal_nan=True)
    same(results[1][1:], results[0][1:])


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("impl", IMPLS)
def test_what_is_written_is_stale_for_backward(impl: str) -> None:
    """Its version changes, which autograd compares with the saved tensor's; the versions of tensors only read stay.

    `unscale_` leaves versions alone, as torch's operator does: a scaler recognizes unscaled gradients by them.
    """
    inv_scale, flag = scalar(0.5), scalar(0.0)
    moments, step = [[torch.zeros(3)] for _ in range(2)], scalar(0.0)

    first, second, half = torch.ones(3), torch.ones(3), torch.ones(3).half()
    sparse = torch.sparse_coo_tensor([[0, 3]], [1.0, 2.0], (5,), check_invariants=True)._values()
    strided, complexes = torch.ones(3, 4)[:, ::2], torch.ones(3, dtype=torch.complex64)
    grads = [first, half, sparse, strided, complexes]
    operations: list[tuple[Callable[[], Any], list[Tensor], list[Tensor]]] = [
        (lambda: kernels.unscale_(grads, inv_scale, flag, impl=impl), [], [*grads, inv_scale]),
        (lambda: kernels.multiply_(grads, inv_scale, flag, impl=impl), grads, [inv_scale, flag]),
        (lambda: kernels.norm_and_check(grads, inv_scale, flag, impl=impl), [], [*grads, inv_scale]),
        (lambda: kernels.cast_([first, second], [half, strided[:, 0]], impl=impl), [half, strided], [first, second]),
        (lambda: kernels.unscale_into_([half], [second], inv_scale, flag, impl=impl), [second], [half]),
        (
            lambda: kernels.adamw_([first], [second], *moments, [], [step], impl=impl, **ADAMW),
            [first],
            [second],
        ),
        (lambda: kernels.sgd_([first], [second], [], lr=0.1, impl=impl), [first], [second]),
    ]
    for i, (operation, written, read) in enumerate(operations):
        before = [t._version for t in written], [t._version for t in read]
        operation()
        unchanged = [n for n, (t, version) in enumerate(zip(written, before[0], strict=True)) if t._version <= version]
        assert unchanged == [], f"operation {i}: versions of written tensors that did not change"
        assert [t._version for t in read] == before[1], f"operation {i}: versions of tensors that are only read"


# --- refusals


ONE, HALF, FLAG = [torch.ones(3)], scalar(0.5), scalar(0.0)
LOW, REMAINDER = [torch.ones(3).bfloat16()], [torch.zeros(3).half()]
ROW = kernels.Scaling(rowwise=True, dtype=torch.float8_e4m3fn, power_of_2=True)
REFUSED: list[tuple[Callable[..., Any], tuple, dict[str, Any], str]] = [
    (kernels.unscale_, ([*ONE, torch.ones(2, dtype=torch.int32)], HALF, FLAG), {}, "dtype torch.int32; expected"),
    (kernels.unscale_, ([*ONE, torch.ones(2).to_mkldnn()], HALF, FLAG), {}, "layout torch._mkldnn; expected strided"),
    (kernels.unscale_, ([*ONE, torch.ones(4).as_strided((3, 2), (1, 1))], HALF, FLAG), {}, "share memory.*clone"),
    (kernels.unscale_, ([*ONE, torch.ones(2, device="meta")], HALF, FLAG), {}, "is on meta.*call once per device"),
    (kernels.unscale_, (ONE, HALF.double(), FLAG), {}, r"inv_scale is a torch.float64 tensor of shape \(\)"),
    (kernels.unscale_, (ONE, HALF, torch.zeros(2)), {}, r"found_inf is a torch.float32 tensor of shape \(2,\)"),
    (kernels.unscale_, (ONE, HALF, torch.zeros((), device="meta")), {}, "found_inf is on meta, the tensors on cpu"),
    (kernels.cast_, (ONE, []), {}, "got 0 destinations for 1 sources"),
    (kernels.cast_, (ONE, [torch.ones(2)]), {}, r"destinations\[0\] has shape \(2,\), sources\[0\] has \(3,\)"),
    (kernels.cast_, (ONE, [torch.ones(3, device="meta")]), {}, "call once per device"),
    (kernels.unscale_into_, (ONE, [*ONE, *ONE], HALF, FLAG), {}, "got 2 destinations for 1 sources"),
    (kernels.unscale_into_, (ONE, [torch.ones(3)], HALF.double(), FLAG), {}, "inv_scale is a torch.float64"),
    (kernels.adamw_, (ONE, ONE, [torch.ones(3)], [torch.ones(3)], [], []), ADAMW, "got 0 steps for 1 params"),
    (kernels.adamw_, (ONE, ONE, ONE, LOW, [], [FLAG]), ADAMW, r"exp_avg_sqs\[0\] is torch.bfloat16, exp_avgs\[0\]"),
    (kernels.adamw_, (ONE, ONE, ONE, LOW, [], [FLAG]), {**ADAMW, "impl": "triton"}, r"exp_avg_sqs\[0\] is torch.bf"),
    (kernels.adamw_, (ONE, ONE, ONE, ONE, LOW, [FLAG]), {**ADAMW, "amsgrad": True}, r"max_exp_avg_sqs\[0\] is torch.b"),
    (kernels.sgd_, (ONE, [torch.ones(2)], []), {"lr": 0.1}, r"grads\[0\] has shape \(2,\)"),
    (kernels.sgd_, (ONE, ONE, []), {"lr": 0.1, "momentum": 0.9}, "got 0 momentum_buffers for 1 params"),
    (kernels.sgd_, (ONE, ONE, []), {"lr": 0.1, "nesterov": True}, "nesterov needs momentum > 0, got 0"),
    (kernels.sgd_, ([torch._neg_view(ONE[0])], ONE, []), {"lr": 0.1}, r"params\[0\] is a lazily negated or conjugated"),
    (kernels.cast_, (ONE, [torch._neg_view(ONE[0])]), {}, r"destinations\[0\] is a lazily negated or conjugated"),
    (kernels.cast_, ([torch.ones(1) + 1j], [(torch.zeros(1) * 1j).conj()]), {}, r"destinations\[0\] is a lazily"),
    (kernels.unscale_into_, (ONE, [torch._neg_view(ONE[0])], HALF, FLAG), {}, r"destinations\[0\] is a lazily"),
    (kernels.sgd_, (ONE, ONE, []), {"lr": 0.1, "multiplier": HALF.double()}, "multiplier is a torch.float64"),
    (kernels.sgd_, (LOW, LOW, []), {"lr": 0.1, "remainders": ONE}, r"remainders\[0\] torch.float32; expected bf"),
    (kernels.sgd_, (LOW, LOW, []), {"lr": 0.1, "remainders": []}, "got 0 remainders for 1 params"),
    (kernels.sgd_, (LOW, LOW, []), {"lr": 0.1, "streams": [torch.zeros(2).long()]}, "streams of one int64 element"),
    (kernels.quantize, (torch.ones(4), ROW, None), {}, r"takes a matrix .* got torch.float32 \(4,\)"),
    (kernels.quantize, (torch.ones(2, 0), ROW, None), {}, r"takes a matrix .* got torch.float32 \(2, 0\)"),
    (kernels.quantize, (torch.ones(2, 2).double(), ROW, None), {}, "takes a matrix .* got torch.float64"),
]


@pytest.mark.parametrize(("operation", "arguments", "options", "text"), REFUSED)
def test_refusals_leave_everything_untouched(operation: Any, arguments: tuple, options: dict, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"{operation.__name__}:? .*{text}"):
        operation(*arguments, **options)
    same([*ONE, *LOW, HALF, FLAG], [torch.ones(3), torch.ones(3).bfloat16(), scalar(0.5), scalar(0.0)])


# --- default devices, tensors without values, empty lists


def all_operations(impl: str, empty: bool = False) -> list[Tensor]:
    """Run every operation over lists on the CPU; returns the flag, and norms of two orders."""

    def zeros(*shape: int, **options: Any) -> Tensor:
        return torch.zeros(*shape, device="cpu", **options)

    mixed = [zeros(5), zeros(3, dtype=torch.float16), zeros(4, dtype=torch.bfloat16), zeros(0), zeros(4, 4)[:, ::2]]
    scale, flag, step = (torch.tensor(number, device="cpu") for number in (2.0, 0.0, 0.0))
    lists, halves, steps = [[zeros(3)] for _ in range(4)], [zeros(3, dtype=torch.float16)], [step]
    if empty:
        mixed, lists, halves, steps = [], [[], [], [], []], [], []
    scalars = {"found_inf": flag, "multiplier": scale, "grad_scale": scale}
    kernels.unscale_(mixed, scale, flag, impl=impl)
    kernels.multiply_(mixed, scale, flag, impl=impl)
    kernels.cast_(lists[0], halves, impl=impl)
    for accumulate in (False, True):
        kernels.unscale_into_(halves, lists[0], scale, flag, accumulate=accumulate, impl=impl)
    kernels.adamw_(*lists, [], steps, impl=impl, **ADAMW, **scalars)
    kernels.sgd_(*lists[:3], lr=0.1, momentum=0.9, impl=impl, **scalars)
    return [flag, *(kernels.norm_and_check(mixed, scale, flag, order, impl=impl) for order in (2.0, 3.0))]


META = torch.device("meta")


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize(("impl", "context"), [("auto", META), ("triton", META), ("auto", FakeTensorMode())])
def test_results_are_where_the_tensors_are(impl: str, context: Any, empty: bool) -> None:
    """Whatever the default device, and with tensors without values."""
    with context:
        assert [(result.device.type, result.shape) for result in all_operations(impl, empty)] == [("cpu", ())] * 3


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("impl", ["auto", "triton"])
def test_nothing_has_norm_0_and_is_stepped(impl: str) -> None:
    assert [result.item() for result in all_operations(impl, empty=True)] == [0.0] * 3
    empty, count = [torch.zeros(0)], scalar(0.0)
    assert kernels.norm_and_check(empty, HALF, FLAG, impl=impl).item() == 0.0
    kernels.adamw_(empty, empty, empty, empty, [], [count], impl=impl, **ADAMW)
    assert count.item() == 1.0
