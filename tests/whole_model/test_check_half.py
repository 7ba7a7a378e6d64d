"""check_half: whose error it is, in which order, and what keeping a module in float32 is worth."""

import math

import pytest
import torch
from torch import Tensor, nn

from ampkit import check_half
from ampkit.whole_model.check_half import HalfError, HalfReport
from ampkit.whole_model.half import half


class Square(nn.Module):
    """Goes beyond float16."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 1000.0).square()


class Shift(nn.Module):
    """Loses what half precision cannot hold beside a large number."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + 500.0) - 500.0


def network() -> nn.Module:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(6, 6), Square(), nn.LayerNorm(6))
    return nn.Sequential(nn.Linear(6, 6), inner, Shift(), nn.Linear(6, 2))


def rows_of(report: HalfReport) -> dict[str, HalfError]:
    return {row.path: row for row in report.modules}


def test_the_report_names_what_overflows_and_what_loses_digits() -> None:
    model, x = network(), torch.randn(8, 6)
    report = check_half(model, x)
    rows = rows_of(report)
    assert list(rows) == ["0", "1.0", "1.1", "1.2", "1", "2", "3", ""]
    assert report.too_large == ["1.1"]
    assert report.keep == ["1", "2"]
    assert report.output.overflows
    assert math.isnan(report.output.error)
    assert rows["1.1"].error == math.inf
    assert rows["1.1"].overflows > 0
    assert rows["1.1"].largest > 65504
    assert rows["1"].error == rows["1.2"].error == rows[""].error == 0.0    # nothing that 1.2 gets is finite in half
    text = str(report).splitlines()
    assert [line.split()[0] for line in text[2:-2]] == ["0", "1.0", "1.1", "1.2", "1", "2", "3", "(the"]
    assert text[-2] == "outputs that float16 cannot carry: 1.1"
    assert text[-1].startswith("worth keeping in float32: 1, 2 (output error nan -> ")
    best = check_half(model, x, keep_fp32=report.keep)
    assert best.output.error == report.kept_error < 2e-3
    assert best.keep == []


def test_errors_are_what_they_are_said_to_be() -> None:
    model, x = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2)), torch.randn(8, 6)
    model.requires_grad_(False)
    report = check_half(model, (x,), torch.bfloat16)
    low = half(model, torch.bfloat16)

    def relative(got: Tensor, wanted: Tensor) -> float:
        return float((got.double() - wanted.double()).norm() / wanted.double().norm())

    between = model[0](x)
    for row, inputs in zip(report.modules, (x, between), strict=False):
        rounded = inputs.bfloat16()
        expected = relative(low[int(row.path)](rounded), model[int(row.path)](rounded.float()))
        assert row.error == pytest.approx(expected, rel=1e-6)
    assert report.output.error == pytest.approx(relative(low(x), model(x)), rel=1e-6)
    assert report.modules[-1].error == 0.0
    assert report.modules[-1].largest == pytest.approx(float(model(x).abs().max()))


def test_parameters_that_do_not_fit() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    with torch.no_grad():
        model[0].weight.fill_(1e-9)
        model[1].weight.fill_(1e5)
    report = check_half(model, torch.ones(1, 4))
    assert report.unfit == ["1.weight"]
    assert "1" in report.keep
    assert "parameters that float16 cannot hold: 1.weight" in str(report)
    assert check_half(model, torch.ones(1, 4), torch.bfloat16).unfit == []


class Writing(nn.Module):
    """Called twice with a list that it writes to, and in place on what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = Shift()

    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        seen.append(x.mul_(1.0))
        assert len(seen) == 1
        return self.shift(self.shift(x * 0.0) + x)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Writing()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.block(batch["x"] * 1.0, [])


def test_calls_are_repeated_on_what_they_got_and_the_worst_is_reported() -> None:
    """The model is left alone."""
    model = Outer().train()
    report = check_half(model, {"batch": {"x": torch.randn(16)}}, in_region=True)
    rows = rows_of(report)
    assert rows["block.shift"].error > 0.01
    assert rows["block"].error is not None
    assert report.keep == ["block.shift"]
    assert report.output.overflows == 0
    assert model.training
    assert not any(m._forward_hooks for m in model.modules())


class Attention(nn.Module):
    """Whose scores are far from zero, where half precision has few digits for what tells them apart."""

    def __init__(self, width: int, shift: float) -> None:
        super().__init__()
        self.qkv, self.out, self.shift = nn.Linear(width, 3 * width), nn.Linear(width, width), shift

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out((q @ k.mT + self.shift).softmax(-1) @ v)


def attentions(*shifts: float) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Attention(16, shift) for shift in shifts), nn.Linear(16, 4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("where", range(3))
def test_an_attention_that_helps_is_proposed_and_its_operators_are_charged_to_it(where: int, dtype) -> None:
    shifts = [0.0, 0.0, 0.0]
    shifts[where] = 300.0 if dtype is torch.bfloat16 else 3000.0
    model, x = attentions(*shifts), torch.randn(4, 12, 16)
    report = check_half(model, x, dtype)
    assert max(report.modules, key=lambda module: module.error).path == str(where)
    assert report.keep == [str(where)]
    assert report.kept_error < report.output.error * 2 / 3
    kept = check_half(model, x, dtype, keep_fp32=report.keep)
    assert kept.output.error == pytest.approx(report.kept_error, rel=1e-6)     # the proposal is what half makes of it
    assert check_half(model, x, dtype, trials=0).keep == []
    assert all(0.0 < row.error < 1e-2 for row in check_half(model, x, dtype, in_region=True).modules if row.path == "3")
    with pytest.raises(ValueError, match=r"trials is -1; expected how many forwards"):
        check_half(model, x, trials=-1)


def test_where_all_round_alike_nothing_is_proposed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU()) for _ in range(12)))
    report = check_half(model, torch.randn(64, 16), torch.bfloat16)
    assert report.output.error > torch.finfo(torch.bfloat16).eps
    assert (report.keep, report.kept_error) == ([], None)
    assert str(report).endswith("worth keeping in float32: nothing")


class Wide(nn.Module):
    """An operator between two modules goes beyond float16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second((self.first(x) * 1e4).square() / 1e8)


def test_an_overflow_between_modules_is_charged_to_the_one_that_calls_them() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Wide(), nn.LayerNorm(4))
    report = check_half(model, torch.randn(3, 4))
    assert [row.path for row in report.modules if row.overflows] == ["1"]
    assert report.too_large == []       # what it returns fits
    assert report.keep == ["1"]
    assert report.kept_error < 1e-2
