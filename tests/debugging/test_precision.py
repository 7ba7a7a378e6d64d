"""`compare_precision`: its reference is a true float32 step, its errors are exact, and its memory is bounded."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampkit import autocast
from ampkit.debugging import compare_precision
from ampkit.debugging.precision import PrecisionComparison
from benchmarks.counts import peak_and_copies
from benchmarks.workloads import DecoderBlock
from tests.debugging.models import MODELS, loss_of, make
from tests.helpers.regions import needs_16_bit_lstm

F16, B16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
X = torch.linspace(1, 2, 64) + 1e-4


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def one_step(model: nn.Module, batch: Tensor, dtype: torch.dtype | None, scale: float = 1.0) -> None:
    with autocast("cpu", dtype=dtype or B16, enabled=dtype is not None):
        loss = loss_of(model(batch))
    (loss * scale).backward()


def reference_of(step: Callable[[], Tensor]) -> Tensor:
    """The reference copy of a step's result when it has run."""
    comparison = PrecisionComparison(None)
    with comparison:
        result = step()
    return comparison.copies.read(result).clone()


@pytest.mark.parametrize(
    ("name", "dtype", "reference", "most"),
    [
        *((name, dtype, F32, 0.2) for name in MODELS for dtype in (F16, B16)),  # gates may open differently
        ("mlp", None, F64, 1e-5),
    ],
)
def test_reference_gradients_are_those_of_a_wider_step(
    name: str, dtype: torch.dtype | None, reference: torch.dtype, most: float
) -> None:
    model, batch = make(name)
    one_step(model.to(reference), batch.to(reference) if batch.is_floating_point() else batch, None)
    true = gradients(model)
    model, batch = make(name)
    comparison = PrecisionComparison(model, reference)
    with comparison as report:
        one_step(model, batch, dtype)
    found = {name: comparison.copies.read(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    assert not report.opaque
    assert found.keys() == true.keys()
    assert [name for name in true if not torch.equal(found[name], true[name])] == []
    assert 1e-9 < report.gradient_error < most


# --- errors, by hand


def errors_of(step: Callable[[], Any]) -> dict[str, Any]:
    return {call.op: call for call in compare_precision(step).operators}


def test_local_propagated_and_amplified_errors_are_what_arithmetic_says() -> None:
    x = torch.tensor([1000.4, -3.1])
    h = x.half()
    rounding = float((h.float() - x).norm() / x.norm())

    def step() -> None:
        y = x.half() - torch.tensor([1000.0, -3.0])  # exact in float32
        y.half()

    found = errors_of(step)
    cast = compare_precision(lambda: x.half()).operators[0]
    assert (cast.total, cast.local, cast.propagated) == (pytest.approx(rounding), pytest.approx(rounding), 0.0)
    exact = x - torch.tensor([1000.0, -3.0])
    after = float(((h.float() - torch.tensor([1000.0, -3.0])) - exact).norm() / exact.norm())
    assert found["aten::sub.Tensor"].local == 0.0
    assert found["aten::sub.Tensor"].propagated == pytest.approx(after, rel=1e-6)
    assert found["aten::sub.Tensor"].amplification == pytest.approx(after / rounding, rel=1e-6)
    assert found["aten::sub.Tensor"].amplification > 100
    assert f"amplified {after / rounding:.3g} times" in str(compare_precision(step))


def test_what_is_lost_to_zero_is_counted_and_an_overflow_is_infinitely_wrong() -> None:
    assert errors_of(lambda: torch.tensor([1.0, 1e-9, 0.0, 2.0]).half())["aten::_to_copy"].lost == 0.25
    report = compare_precision(lambda: torch.tensor([1e5, 1.0, 1.0, 1.0]).half())
    cast = report.operators[0]
    assert (cast.total, cast.local, cast.largest) == (math.inf, math.inf, 1e5)
    assert json.loads(report.to_json())["operators"][0]["local"] == "inf"


def test_a_gradient_that_is_zero_in_exact_arithmetic_does_not_count() -> None:
    model, batch = make("cnn")
    report = compare_precision(lambda: one_step(model, batch, B16), model)
    bias = report.gradients["0.bias"]  # batch norm takes it out again
    assert bias.error > 1
    assert bias.share < 1e-3
    assert report.gradient_error < 0.2
    assert [line for line in str(report).splitlines() if "amplified" in line and ", 0, " in line] == []


# --- pitfalls


def test_a_cast_that_casts_nothing_leaves_the_users_own_alone() -> None:
    x = torch.tensor([1.0, 2.0])
    results: list[Tensor] = []

    def step() -> None:
        y = x.half().float()
        z = y.to(torch.float32)  # the same tensor
        z.add_(0.1)
        z.mul_(x)
        results.append(z)

    compare_precision(step)
    observed = results.pop()
    step()
    assert torch.equal(observed, results.pop())
    assert torch.equal(x, torch.tensor([1.0, 2.0]))


def test_a_result_that_is_transposed_in_place() -> None:
    """As torch's recurrent layers do in float16 with `batch_first`."""
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    report = compare_precision(lambda: (model.half()(x.half()) * 2).transpose_(0, 1).float().sum().backward(), model)
    assert "aten::transpose_" in {call.op for call in report.operators}
    assert report.lost_updates == []


def test_integers_in_place_run_once() -> None:
    counter = torch.zeros(3, dtype=torch.int64)
    compare_precision(lambda: counter.index_put_((torch.ones(3).half() > 0,), torch.tensor(1), accumulate=True))
    assert counter.tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", [pytest.param(B16, marks=needs_16_bit_lstm), F16])
def test_memory_in_a_form_of_its_own_is_left_alone_and_named(dtype: torch.dtype) -> None:
    """In float16 torch has no fused LSTM: gates are split by an operator that does not say that they share memory."""
    model, x = nn.LSTM(8, 8), torch.randn(3, 2, 8)
    report = compare_precision(lambda: one_step(model, x, dtype), model)
    fused = {"aten::mkldnn_rnn_layer", "aten::mkldnn_rnn_layer_backward"} if dtype is B16 else set()
    assert set(report.opaque) == fused
    unseen = "unseen    aten::mkldnn_rnn_layer: its kernels use memory in a private format"
    assert (unseen in str(report)) is bool(fused)
    assert report.gradient_error < (0.1 if fused else 1e-2)
    assert fused or report.loss == pytest.approx(report.reference_loss, rel=1e-2)


def test_native_dropout_drops_the_same_elements_of_the_reference() -> None:
    random = torch.get_rng_state()
    found = reference_of(lambda: torch.ops.aten.native_dropout(X.half(), 0.5, True)[0])
    torch.set_rng_state(random)
    assert torch.equal(found, X * torch.ops.aten.native_dropout(X.half(), 0.5, True)[1] / 0.5)


def test_an_operator_without_a_wider_kernel_is_named() -> None:
    @torch.library.custom_op("ampkit_tests::only_half", mutates_args=())
    def only_half(x: Tensor) -> Tensor:
        if x.dtype is not torch.float16:
            raise RuntimeError("only float16 is written down\nand more")
        return x * 2

    report = compare_precision(lambda: only_half(torch.rand(4).half()) + 1)
    assert report.opaque == {"ampkit_tests::only_half": "only float16 is written down"}


def test_a_result_whose_shape_depends_on_values() -> None:
    x = torch.tensor([1.0, 1.0 + 2**-12, 1.0 + 2**-13])  # all the same in float16
    results = []
    report = compare_precision(lambda: results.append(torch.where(x.half() > 1.0)[0]))
    assert results[0].numel() == 0
    assert report.opaque == {"aten::nonzero": "the reference has another shape: it depends on values"}


def test_complex_numbers_and_inference_mode() -> None:
    x = torch.linspace(0, 1, 64).view(8, 8)

    def step() -> Tensor:
        with torch.inference_mode(), autocast("cpu", dtype=B16):
            return torch.view_as_real(torch.fft.fft(F.linear(x, x).float()).conj().resolve_conj()).sum()

    total = errors_of(step)["aten::sum"]
    exact = torch.view_as_real(torch.fft.fft(F.linear(x, x)).conj().resolve_conj()).sum()
    assert 0 < total.total < 0.05
    assert total.largest == pytest.approx(float(exact))


# --- memory


def write_a_view(x: Tensor) -> Tensor:
    y = x.half()
    x[:32].zero_()
    return y


def write_two_casts_deep(x: Tensor) -> Tensor:
    y = x.half().float().bfloat16()
    x.mul_(3)
    return y


def write_source_then_cast(x: Tensor) -> Tensor:
    y = x.half()
    torch.add(x, 1, out=x)
    y.mul_(2)
    return y / 2


@pytest.mark.parametrize("step", [write_a_view, write_two_casts_deep, write_source_then_cast])
def test_a_cast_keeps_the_values_that_it_was_made_of(step: Callable[[Tensor], Tensor]) -> None:
    assert torch.equal(reference_of(lambda: step(X.clone())), X)


@pytest.mark.parametrize(
    "source",
    [
        X.double(),
        X.view(8, 8).t(),
        X[8:],
        X[::2],
        torch.complex(X, X),
        X[:1].expand(8),
        torch.arange(8),
        X.half(),
    ],
)
def test_a_cast_of_whatever_lies_in_memory(source: Tensor) -> None:
    """Another dtype than float32, a part of some memory, another order."""
    low = torch.complex32 if source.is_complex() else F16
    expected = source.to(torch.complex64 if source.is_complex() else F32)
    with pytest.warns(UserWarning, match="ComplexHalf") if source.is_complex() else contextlib.nullcontext():
        assert torch.equal(reference_of(lambda: source.to(low, memory_format=torch.contiguous_format)), expected)


def test_copies_of_memory_that_is_gone_are_given_back() -> None:
    comparison = PrecisionComparison(None)
    most = 0
    with comparison:
        x = torch.ones(1 << 18, dtype=F16)
        for _ in range(60):
            x = x * 1.0001
            live = sum(copy.flat.untyped_storage().nbytes() for copy in comparison.copies._copies.values())
            most = max(most, live)
    assert most <= 6 << 20  # one MiB each, sixty of them


def test_a_step_needs_little_more_than_three_times_the_memory() -> None:
    def peak(around: Callable[[nn.Module], Any]) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(*(DecoderBlock(64, 4) for _ in range(4)))
        batch = torch.randn(8, 64, 64)
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> None:
            with around(model):
                one_step(model, batch, B16)
                optimizer.step()
                optimizer.zero_grad()

        step()
        return peak_and_copies(step, torch.device("cpu"))["peak_bytes"]

    plain = peak(lambda model: contextlib.nullcontext())
    assert plain > 1 << 20
    assert peak(PrecisionComparison) <= 3.2 * plain


# --- scalers, scales, steps


@pytest.mark.parametrize("name", ["mlp", "gpt", "cnn", "shared"])
def test_the_recommended_scale_is_within_a_power_of_two_of_brute_force(name: str) -> None:
    model, batch = make(name)

    def finite(scale: float) -> bool:
        model.zero_grad()
        one_step(model, batch, F16, scale)
        return all(bool(g.isfinite().all()) for g in gradients(model).values())

    best = max(k for k in range(40) if finite(2.0**k))
    found = compare_precision(lambda: finite(1.0), model).recommended_scale
    assert found is not None
    assert abs(math.log2(found) - best) <= 1


def test_results_are_compared_without_any_gradient() -> None:
    x = torch.linspace(0.1, 1, 8)
    assert 0 < compare_precision(lambda: [x.half() * 3]).error < 1e-3
    assert compare_precision(lambda: (x * 1e6).half()).error == math.inf
    assert 0 < compare_precision(x.exp, reference=F64).error < 1e-6
    assert "results are 0.0" in str(compare_precision(lambda: [x.bfloat16() * 3]))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.linspace(0, 511, 512),
        lambda: torch.arange(0.0, 512.0),
        lambda: torch.full((512,), 300.7),
    ],
)
def test_numbers_of_a_16_bit_default_dtype_are_compared(make: Callable[[], Tensor]) -> None:
    torch.set_default_dtype(B16)
    try:
        model, batch = nn.Linear(8, 1), torch.randn(512, 8)
        random = torch.get_rng_state()

        def step() -> None:
            (model(batch) * make()[:, None].cos()).float().square().mean().backward()

        report = compare_precision(step, model)
        assert torch.equal(random, torch.get_rng_state())
    finally:
        torch.set_default_dtype(F32)
    assert report.gradient_error > 0.02
    assert "a tensor [512, 1]" not in report.given
