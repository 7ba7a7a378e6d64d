"""The shadow run: its reference is a true float32 step, its errors are what arithmetic says, and nobody notices it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampkit import GradScaler, WeightCache, autocast
from ampkit.debugging import compare_precision
from ampkit.debugging.precision import PrecisionComparison
from ampkit.debugging.report import PrecisionReport
from tests.debugging.models import MODELS, loss_of, make
from tests.helpers.regions import needs_16_bit_lstm

LOW = [torch.float16, torch.bfloat16]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def one_step(model: nn.Module, batch: Tensor, dtype: torch.dtype | None, region: Any = autocast) -> None:
    with autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        loss = loss_of(model(batch))
    loss.backward()


def shadow_gradients(model: nn.Module, step: Callable[[], Any]) -> tuple[dict[str, Tensor], PrecisionReport]:
    comparison = PrecisionComparison(model)
    with comparison as report:
        step()
    memory = comparison.memory
    return {n: memory.read(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}, report


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", MODELS)
def test_reference_gradients_are_those_of_a_float32_step(name: str, dtype: torch.dtype) -> None:
    model, batch = make(name)
    one_step(model, batch, None)
    true = gradients(model)
    model, batch = make(name)
    reference, report = shadow_gradients(model, lambda: one_step(model, batch, dtype))
    assert not report.opaque
    assert reference.keys() == true.keys()
    assert all(torch.equal(reference[key], true[key]) for key in true)
    assert 0 < report.gradient_error < 0.2      # gates may open differently


def test_casts_that_a_cache_has_kept_are_made_again() -> None:
    """Else the reference would begin with 16-bit weights."""
    model, batch, cache = nn.Linear(8, 1), torch.randn(4, 8), WeightCache()

    def step() -> None:
        with autocast("cpu", torch.bfloat16, cache=cache):
            loss = model(batch).sum()
        loss.backward()

    step()
    assert not compare_precision(step, model).given


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", MODELS)
def test_the_users_step_is_the_same_to_the_bit(name: str, dtype: torch.dtype) -> None:

    def train(compare: bool) -> tuple[dict[str, Tensor], Tensor]:
        model, batch = make(name)
        model = nn.Sequential(model, nn.Identity() if name.startswith("gpt") else nn.Dropout(0.2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def step() -> None:
            one_step(model, batch, dtype, autocast)
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(2):
            compare_precision(step, model) if compare else step()
        return {**model.state_dict()}, torch.get_rng_state()

    plain, random = train(False)
    compared, random_after = train(True)
    assert torch.equal(random, random_after)
    assert all(torch.equal(plain[key], compared[key]) for key in plain)


def test_a_float64_reference_is_a_float64_step() -> None:
    model, batch = make("mlp")
    one_step(model.double(), batch.double(), None)
    true = gradients(model)
    model, batch = make("mlp")
    comparison = PrecisionComparison(model, torch.float64)
    with comparison as report:
        one_step(model, batch, None)
    assert all(torch.equal(comparison.memory.read(p.grad), true[n]) for n, p in model.named_parameters())
    assert 1e-9 < report.gradient_error < 1e-5


# --- errors, by hand


def errors_of(step: Callable[[], Any]) -> dict[str, Any]:
    return {one.op: one for one in compare_precision(step).operators}


def test_local_propagated_and_amplified_errors_are_what_arithmetic_says() -> None:
    x = torch.tensor([1000.4, -3.1])
    h = x.half()
    rounding = float((h.float() - x).norm() / x.norm())

    def step() -> None:
        y = x.half() - torch.tensor([1000.0, -3.0])     # exact in float32
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


def test_minus_infinity_in_the_reference_is_no_overflow() -> None:
    def step() -> Tensor:
        scores = torch.randn(4, 4).half().masked_fill(torch.ones(4, 4).triu(1).bool(), -math.inf)
        return scores.softmax(-1)

    report = compare_precision(step)
    assert all(one.total < 1e-2 for one in report.operators)
    assert any(one.op == "aten::_softmax" for one in report.operators)


def test_a_gradient_that_is_zero_in_exact_arithmetic_does_not_count() -> None:
    model, batch = make("cnn")
    report = compare_precision(lambda: one_step(model, batch, torch.bfloat16), model)
    bias = report.gradients["conv1.bias"]     # batch norm takes it out again
    assert bias.error > 1
    assert bias.share < 1e-3
    assert report.gradient_error < 0.2
    assert not any("amplified" in line and "conv1" in line for line in str(report).splitlines())


# --- pitfalls


def test_a_cast_that_casts_nothing_leaves_the_users_own_alone() -> None:
    x = torch.tensor([1.0, 2.0])
    results: list[Tensor] = []

    def step() -> None:
        y = x.half().float()
        z = y.to(torch.float32)     # the same tensor
        z.add_(0.1)
        z.mul_(x)
        results.append(z)

    compare_precision(step)
    observed = results.pop()
    step()
    assert torch.equal(observed, results.pop())
    assert torch.equal(x, torch.tensor([1.0, 2.0]))


def test_integers_in_place_run_once() -> None:
    model, batch = make("cnn")
    counter = torch.zeros(3, dtype=torch.int64)

    def step() -> None:
        one_step(model, batch, torch.bfloat16)
        counter[batch[:3, 0, 0, 0].half() > -100] += 1

    compare_precision(step, model)
    assert int(model.norm.num_batches_tracked) == 1     # type: ignore[union-attr, arg-type]
    assert counter.tolist() == [1, 1, 1]


@needs_16_bit_lstm
def test_memory_in_a_form_of_its_own_is_left_alone_and_named() -> None:
    torch.manual_seed(0)
    model, x = nn.LSTM(8, 8), torch.randn(3, 2, 8)
    report = compare_precision(lambda: one_step(model, x, torch.bfloat16), model)
    assert set(report.opaque) == {"aten::mkldnn_rnn_layer", "aten::mkldnn_rnn_layer_backward"}
    assert report.gradient_error < 0.1
    assert "unseen    aten::mkldnn_rnn_layer: it hands on memory in a form of its own" in str(report)


def test_parts_of_a_result_that_are_written_in_place() -> None:
    """An LSTM cell splits its gates by an operator that does not say that they share memory."""
    torch.manual_seed(0)
    model, x = nn.LSTM(8, 8), torch.randn(3, 2, 8)
    report = compare_precision(lambda: one_step(model, x, torch.float16), model)
    assert not report.opaque
    assert report.loss == pytest.approx(report.reference_loss, rel=1e-2)
    assert report.gradient_error < 1e-2


@pytest.mark.parametrize("inplace", [True, False])
def test_random_operators_draw_once_and_the_reference_has_their_numbers(inplace: bool) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5, inplace=inplace), nn.Linear(8, 8))

    model = build()
    one_step(model, torch.ones(4, 8), None)
    true = gradients(model)
    model = build()
    reference, report = shadow_gradients(model, lambda: one_step(model, torch.ones(4, 8), torch.float16))
    assert all(torch.equal(reference[key], true[key]) for key in true)
    assert not report.opaque


def test_native_dropout_drops_the_same_elements_of_the_reference() -> None:
    x = torch.linspace(1, 2, 64) + 1e-4
    comparison = PrecisionComparison(None)
    with comparison:
        y, mask = torch.ops.aten.native_dropout(x.half(), 0.5, True)
    assert torch.equal(comparison.memory.read(y), x * mask / 0.5)


def test_an_operator_without_a_wider_kernel_is_named() -> None:
    @torch.library.custom_op("ampkit_tests::only_half", mutates_args=())
    def only_half(x: Tensor) -> Tensor:
        if x.dtype is not torch.float16:
            raise RuntimeError("only float16 is written down\nand more")
        return x * 2

    report = compare_precision(lambda: only_half(torch.rand(4).half()) + 1)
    assert report.opaque == {"ampkit_tests::only_half": "only float16 is written down"}


def test_a_result_whose_shape_depends_on_values() -> None:
    x = torch.tensor([1.0, 1.0 + 2**-12, 1.0 + 2**-13])     # all the same in float16
    results = []
    report = compare_precision(lambda: results.append(torch.where(x.half() > 1.0)[0]))
    assert results[0].numel() == 0
    assert report.opaque == {"aten::nonzero": "the reference has another shape: it depends on values"}


def test_complex_numbers_and_inference_mode() -> None:
    def step() -> None:
        with torch.inference_mode(), autocast("cpu", dtype=torch.bfloat16):
            y = nn.functional.linear(x, x)
            torch.view_as_real(torch.fft.fft(y.float()).conj().resolve_conj()).sum()

    x = torch.linspace(0, 1, 64).view(8, 8)
    comparison = PrecisionComparison(None)
    with comparison as report:
        step()
    total = next(one for one in report.operators if one.op == "aten::sum")
    exact = torch.view_as_real(torch.fft.fft(nn.functional.linear(x, x)).conj().resolve_conj()).sum()
    assert 0 < total.total < 0.05
    assert total.largest == pytest.approx(float(exact))


def test_copies_of_memory_that_is_gone_are_given_back() -> None:
    comparison = PrecisionComparison(None)
    most = 0
    with comparison:
        x = torch.ones(1 << 18, dtype=torch.float16)
        for _ in range(60):
            x = x * 1.0001
            live = sum(one.flat.untyped_storage().nbytes() for one in comparison.memory._copies.values())
            most = max(most, live)
    assert most <= 6 << 20      # one MiB each, sixty of them


# --- scalers, scales, steps


@pytest.mark.parametrize("name", ["mlp", "gpt", "cnn", "shared"])
def test_the_recommended_scale_is_within_a_power_of_two_of_brute_force(name: str) -> None:
    model, batch = make(name)

    def finite(scale: float) -> bool:
        model.zero_grad()
        with autocast("cpu", dtype=torch.float16):
            loss = loss_of(model(batch))
        (loss * scale).backward()
        return all(bool(g.isfinite().all()) for g in gradients(model).values())

    best = max(k for k in range(40) if finite(2.0**k))
    found = compare_precision(lambda: finite(1.0), model).recommended_scale
    assert found is not None
    assert abs(math.log2(found) - best) <= 1


@pytest.mark.parametrize("scale", [2.0**4, 2.0**40])
@pytest.mark.parametrize("cls", [GradScaler, torch.amp.GradScaler])
def test_gradients_are_taken_before_the_loop_clears_them(cls: Any, scale: float) -> None:
    model, batch = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = cls("cpu", init_scale=scale)

    def step() -> None:
        with autocast("cpu", dtype=torch.float16):
            loss = loss_of(model(batch))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    report = compare_precision(step, model)
    assert set(report.gradients) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert report.scale == scale
    assert report.loss is not None
    assert report.loss == pytest.approx(report.reference_loss, rel=1e-2)
    if scale == 2.0**4:
        one_step(model := make("mlp")[0], batch, None)
        norms = {name: float(g.norm()) for name, g in gradients(model).items()}
        assert {name: one.norm for name, one in report.gradients.items()} == pytest.approx(norms, rel=1e-6)
        assert report.gradient_error < 1e-2
    else:       # the scaler skips the step
        assert report.gradient_error == math.inf


def test_results_are_compared_without_any_gradient() -> None:
    x = torch.linspace(0.1, 1, 8)
    assert 0 < compare_precision(lambda: [x.half() * 3]).error < 1e-3
    assert compare_precision(lambda: (x * 1e6).half()).error == math.inf
    assert 0 < compare_precision(x.exp, reference=torch.float64).error < 1e-6
    assert "results are 0.0" in str(compare_precision(lambda: [x.bfloat16() * 3]))


@pytest.mark.parametrize("make", [
    lambda: torch.linspace(0, 511, 512), lambda: torch.arange(0.0, 512.0), lambda: torch.full((512,), 300.7),
])
def test_numbers_of_a_16_bit_default_dtype_are_compared(make: Callable[[], Tensor]) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        model, batch = nn.Linear(8, 1), torch.randn(512, 8)
        random = torch.get_rng_state()

        def step() -> None:
            (model(batch) * make()[:, None].cos()).float().square().mean().backward()

        report = compare_precision(step, model)
        assert torch.equal(random, torch.get_rng_state())
    finally:
        torch.set_default_dtype(torch.float32)
    assert report.gradient_error > 0.02
    assert "a tensor [512, 1]" not in report.given


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"reference is torch.float16; expected torch.float32 or torch.float64"):
        compare_precision(lambda: None, None, torch.float16)
