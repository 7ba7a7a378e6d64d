"""check_half: the errors of every module, and the modules that it proposes to keep in float32."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampkit import check_half
from ampkit.half_precision.half import half


class Call(nn.Module):
    """Computes a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


SQUARE = Call(lambda x: (x * 1000.0).square())  # goes beyond float16
SHIFT = Call(lambda x: (x + 500.0) - 500.0)  # loses digits beside a large number


class Within(nn.Module):
    """An operator between two modules goes beyond float16; what it returns does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.second((self.first(x) * 1e4).square() / 1e8)


def relative(got: Tensor, expected: Tensor) -> Any:
    """The relative L2 error, to compare with."""
    got, expected = got.double(), expected.double()
    return pytest.approx(((got - expected).norm() / expected.norm()).item(), rel=1e-6)


def test_overflows_are_found_and_the_modules_around_them_proposed() -> None:
    """Two modules that overflow inside; one whose output is too large; one that loses digits."""
    inner = nn.Sequential(nn.Linear(6, 6), SQUARE, nn.LayerNorm(6))
    model, x = nn.Sequential(Within(), inner, Within(), nn.LayerNorm(6), SHIFT, nn.Linear(6, 2)), torch.randn(8, 6)
    report = check_half(model, x)
    assert [row.path for row in report.modules] == [
        "0.first",
        "0.second",
        "0",
        "1.0",
        "1.1",
        "1.2",
        "1",
        "2.first",
        "2.second",
        "2",
        "3",
        "4",
        "5",
        "",
    ]
    assert report.too_large == ["1.1"]
    assert report.keep == ["1", "0"]
    assert report.error == math.inf
    rows = {row.path: row for row in report.modules}
    assert [rows["0"].overflows > 0, rows["0.first"].overflows, rows["1.1"].largest > 65504] == [True, 0, True]
    assert rows["0.first"].input_error == relative(x.half(), x)
    assert rows["0.first"].error == relative(half(model)[0].first(x.half()), model[0].first(x))
    assert rows["0.second"].input_error == math.inf
    text = str(report).splitlines()
    assert text[1].split() == ["module", "largest", "error", "in", "error", "out", "overflows"]
    assert [line.split()[0] for line in text[2:-2]] == [row.path or "(the" for row in report.modules]
    assert text[-2:] == ["outputs too large for float16: 1.1", "to keep in float32: 1, 0"]
    # the first overflow hides the others
    report = check_half(model, x, keep_fp32=report.keep)
    assert report.keep == ["2"]
    report = check_half(model, x, keep_fp32=["0", "1", *report.keep])
    assert (report.keep, report.too_large) == ([], [])
    assert report.error == relative(half(model, report.dtype, keep_fp32=["0", "1", "2"])(x), model(x))
    assert str(report).endswith("to keep in float32: nothing")
    # the digits are lost between what goes into "4" and what comes out
    rows = {row.path: row for row in report.modules}
    assert rows["4"].error > 20 * rows["4"].input_error
    assert max(rows[path].error for path in ("0", "1", "2", "3")) < 0.01


def test_what_is_too_large_with_nothing_around_it_is_named() -> None:
    report = check_half(nn.Sequential(nn.Linear(6, 6), SQUARE), torch.ones(1, 6))
    assert report.too_large == ["1", ""]
    assert (report.keep, report.error) == ([], math.inf)


def test_inputs_that_do_not_fit() -> None:
    model, x = nn.Linear(4, 4), torch.full((1, 4), 1e6)
    report = check_half(model, {"input": x})
    assert (report.largest_input, report.keep) == (1e6, [])
    assert "the largest input is 1e+06, and the float16 maximum is 6.55e+04; inputs are cast before" in str(report)
    for fits in (check_half(model, (x,), torch.bfloat16), check_half(model, [x / 100])):
        assert "the largest input" not in str(fits)


def test_arguments_in_another_order() -> None:
    model, x = nn.Linear(4, 4), torch.randn(30, 4)
    for sample, dtype in ((torch.float16, x), (x, x), (torch.float16, torch.float16)):
        with pytest.raises(TypeError, match=r"expected the sample first: check_half\(model, sample, torch\.float16\)"):
            check_half(model, sample, dtype)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^dtype is tensor[^\n]{,150}; expected torch\.float16"):
        half(model, x)  # type: ignore[arg-type]


def test_parameters_that_do_not_fit() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    with torch.no_grad():
        model[0].weight.fill_(1e-9)
        model[1].weight.fill_(1e5)
    report = check_half(model, torch.ones(1, 4))
    assert report.unfit == ["1.weight"]
    assert report.keep == ["1"]
    assert report.error == 1.0  # float16 has no 1e-9
    assert "parameters that float16 cannot hold: 1.weight" in str(report)
    assert check_half(model, torch.ones(1, 4), torch.bfloat16).unfit == []
    report = check_half(model[1], torch.ones(1, 4))  # the model's own, which nothing keeps
    assert (report.unfit, report.keep, report.error) == (["weight"], [], math.inf)
    assert math.isnan(report.modules[0].error)


def test_dtypes_are_taken_and_refused_as_half_does() -> None:
    model, x = nn.Linear(6, 6), torch.randn(8, 6)
    for name, dtype in (("float16", torch.float16), ("bf16", torch.bfloat16)):
        report = check_half(model, x, name)
        assert report.dtype is dtype
        assert report == check_half(model, x, dtype)
    for wrong in ("half", torch.float64, "float32", torch.int8, None):
        with pytest.raises(ValueError, match=r"expected torch\.float16, torch\.bfloat16 or the name of one"):
            check_half(model, x, wrong)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"has been converted by ampkit\.half"):
        check_half(half(model), x)


class Writing(nn.Module):
    """Writes to a list that it gets, and in place to a tensor in it."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = SHIFT

    def forward(self, batch: dict[str, Tensor], seen: list[Tensor]) -> Tensor:
        seen.append(batch["x"].mul_(2.0))
        assert len(seen) == 1
        return self.shift(self.shift(batch["x"] * 0.0) + batch["x"])


def test_the_sample_and_the_model_are_left_alone() -> None:
    x, seen = torch.randn(16), []
    model, before = Writing().train(), x.clone()
    report = check_half(model, {"batch": {"x": x}, "seen": seen}, in_region=True)
    assert {row.path: row.error > 0.01 for row in report.modules} == {"shift": True, "": True}
    assert torch.equal(x, before)
    assert seen == []
    assert model.training
    assert not [m for m in model.modules() if m._forward_hooks]
    assert not torch.nn.modules.module._has_any_global_hook()


def test_operators_between_modules_raise_the_error_from_one_to_the_next() -> None:
    """Attention with scores far from zero, where half precision has few digits for their differences."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            return self.out((q @ k.mT + 3000.0).softmax(-1) @ v)

    report = check_half(nn.Sequential(Attention()), torch.randn(4, 12, 16))
    rows = {row.path: row for row in report.modules}
    assert rows["0.out"].input_error > 10 * rows["0.qkv"].error
    assert report.keep == []


def test_buffers_that_are_rounded_are_named() -> None:
    """By default none is but the statistics of a norm, which follow its weights."""

    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("third", torch.ones(4) / 3)
            self.register_buffer("mask", torch.tensor([0.0, -1e9, 0.0, 0.0]))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.third.to(x.dtype) + self.mask

    model, x = nn.Sequential(Scaled(), nn.BatchNorm1d(4)), torch.randn(3, 4)
    model[1].running_mean.fill_(0.3)
    for keep, buffers, expected in (
        ("1", "exact", []),
        ("1", "all", ["0.third"]),
        ((), "exact", ["1.running_mean"]),
        ((), "all", ["0.third", "1.running_mean"]),
    ):
        report = check_half(model, x, torch.bfloat16, keep, buffers=buffers)
        assert report.rounded == expected
        assert not expected or f"buffers that bfloat16 rounds: {', '.join(expected)}\n" in str(report)
