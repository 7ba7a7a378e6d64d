"""Two recorded runs: the first operator whose magnitudes differ by more than rounding explains, and nothing else."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampkit.debugging import cli, compare_runs, record_run
from tests.debugging.models import Middle, loss_of, make, mlp

F16, B16, F32 = torch.float16, torch.bfloat16, torch.float32


def recorded(path: Path, model: nn.Module, batch: Tensor, dtype: torch.dtype = F32, steps: int = 3) -> Path:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=dtype == F16)
    with record_run(path, model):
        for _ in range(steps):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype, enabled=dtype != F32):
                loss = loss_of(model(batch)).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return path


def twice(
    folder: Path, function: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor], dtype: torch.dtype = F32
) -> tuple[Path, Path]:
    """The records of a model with a function as its middle layer, and with another one in another precision."""

    def run(name: str, middle: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Path:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), Middle(middle), nn.Linear(32, 16))
        return recorded(folder / name, model, torch.randn(32, 16), dtype)

    return run("a", function, F32), run("b", other, dtype)


@pytest.mark.parametrize("name", ["mlp", "attention", "checkpoint", "cnn", "transformer", "shared"])
@pytest.mark.parametrize("dtype", [F16, B16])
def test_another_precision_is_rounding(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    first, second = (recorded(tmp_path / str(each), *make(name), each) for each in (F32, dtype))
    comparison = compare_runs(first, second)
    assert (comparison.status, comparison.steps) == ("clean", 3), comparison
    assert comparison.compared > 50


def larger(x: Tensor) -> Tensor:
    return (x * 1.25).tanh()  # here


def underflowing(x: Tensor) -> Tensor:
    return ((x * 1e-8).half().float() * 1e8).tanh()  # here


def broken(x: Tensor) -> Tensor:
    return (x.half() * 6e4).float().mul(1 / 6e4).tanh()  # here


@pytest.mark.parametrize(
    ("function", "dtype"), [(larger, F32), (larger, B16), (underflowing, F32), (underflowing, B16), (broken, F32)]
)
def test_the_first_operator_that_differs(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype, tmp_path: Path
) -> None:
    [first, *_] = compare_runs(*twice(tmp_path, torch.tanh, function, dtype)).differences
    line = inspect.getsourcelines(function)[1] + 1
    assert (first.step, first.first["op"], first.first["module"], first.first["phase"]) == (
        0,
        "aten::tanh",
        "1",
        "forward",
    )
    assert first.second["line"] == line
    assert first.alone is not None
    assert (first.alone[0], first.alone[1]["op"], first.alone[1]["line"]) == ("B", "aten::mul.Tensor", line)


def test_a_difference_in_backward(tmp_path: Path) -> None:
    def hooked(x: Tensor) -> Tensor:
        y = x.tanh()
        y.register_hook(lambda gradient: gradient * 1.5)
        return y

    [first, *_] = compare_runs(*twice(tmp_path, torch.tanh, hooked)).differences
    assert (first.first["op"], first.first["phase"], first.first["module"]) == ("aten::tanh_backward", "backward", "1")


@pytest.mark.parametrize("swapped", [False, True])
def test_a_negligible_gradient_is_passed_over_whichever_run_is_scaled(swapped: bool, tmp_path: Path) -> None:
    def branch(factor: float) -> Callable[[Tensor], Tensor]:
        def function(x: Tensor) -> Tensor:
            small = x * 1.0
            small.register_hook(lambda gradient: gradient * factor)
            return x.tanh() + small * 1e-4

        return function

    runs = twice(tmp_path, branch(1.0), branch(1.5), F16)
    assert compare_runs(*(reversed(runs) if swapped else runs)).differences == []


def test_other_parameters_and_other_data_are_named(tmp_path: Path) -> None:
    runs = []
    for weight, value in ((1.0, 1.0), (1.0, 2.0), (2.0, 1.0)):
        torch.manual_seed(0)
        model = mlp(16, 32, 16)
        model.get_parameter("0.weight").data.mul_(weight)
        runs.append(recorded(tmp_path / f"{weight}{value}", model, torch.full((32, 16), value), steps=1))
    assert "the data differs from the start" in str(compare_runs(runs[0], runs[1]))
    assert "the parameter 0.weight differs from the start" in str(compare_runs(runs[0], runs[2]))
    other = compare_runs(runs[0], runs[1], other_data=True)
    assert all(each.first["phase"] == "optimizer" for each in other.differences)


def test_other_random_numbers_are_noted(tmp_path: Path) -> None:
    runs = []
    for seed in (0, 1):
        model = mlp(64, 64, 64)
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.1)
        torch.manual_seed(seed)
        sequential = nn.Sequential(model, Middle(lambda x: F.dropout(x, 0.5)))
        runs.append(recorded(tmp_path / str(seed), sequential, torch.ones(64, 64), steps=1))
    comparison = compare_runs(*runs)
    assert not comparison
    assert "the runs draw other random numbers" in str(comparison)


def test_a_step_that_the_scaler_skips_ends_the_comparison(tmp_path: Path) -> None:
    runs = []
    for dtype in (F32, F16):
        model, batch = make("mlp")
        runs.append(recorded(tmp_path / str(dtype), model.requires_grad_(True), batch * 1e3, dtype))
    comparison = compare_runs(*runs)
    assert comparison.steps == 1
    assert "the scaler skipped step 0 in B" in str(comparison)


def test_a_record_is_small_and_the_run_stays_the_same(tmp_path: Path) -> None:
    models = []
    for records in (False, True):
        model, batch = make("dropout")
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with record_run(tmp_path / "run-{rank}.jsonl", model) if records else torch.enable_grad():
            for _ in range(9):
                optimizer.zero_grad()
                loss_of(model(batch)).square().mean().backward()
                optimizer.step()
        models.append([*model.parameters(), torch.rand(1)])
    assert all(map(torch.equal, *models))
    head, *steps = map(json.loads, (tmp_path / "run-0.jsonl").read_text().splitlines())
    assert (head["kind"], head["version"]) == ("ampkit.debugging.run", 1)
    assert [step["step"] for step in steps] == [0, 1, 2, 3, 4, 8]
    assert all(
        isinstance(value, (str, int, float, bool))
        for step in steps
        for call in step["calls"]
        for value in call.values()
    )


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit codes: 0 the same, 1 a difference, 2 bad input, 3 too little in common."""
    same, other = (str(each) for each in twice(tmp_path, torch.tanh, larger))
    (tmp_path / "model").mkdir()
    third = recorded(tmp_path / "model" / "c", *make("cnn"), steps=1)
    (tmp_path / "text").write_text("no record")
    newer = Path(same).read_text().replace('"version": 1', '"version": 2', 1)
    (tmp_path / "newer").write_text(newer)
    codes: list[tuple[int, Any]] = [
        (0, same),
        (1, other),
        (2, tmp_path / "text"),
        (2, tmp_path / "newer"),
        (2, tmp_path / "none"),
        (3, third),
    ]
    for code, path in codes:
        assert cli.main(["compare", same, str(path), "--json", str(tmp_path / "out.json")]) == code, path
    assert "expected 'ampkit.debugging.run' in version 1" in capsys.readouterr().err
    data = json.loads((tmp_path / "out.json").read_text())
    assert (data["kind"], data["status"]) == ("ampkit.debugging.comparison", "inconclusive")
