"""`examine` and `ampkit debug train.py`: one run, one ranked list."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ampkit import Policy, Rule, autocast, debugging
from ampkit.__main__ import main
from ampkit.debugging import Examination
from ampkit.debugging.finding import Cause, Finding, Fix, Grade, Place, Report
from tests.debugging.models import mlp

B16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def line_of(text: str) -> int:
    """The number of the line of this file that ends with a comment."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {text}"))


def findings(run: Callable[[], Any], model: nn.Module | None = None) -> list[Finding]:
    """What an examination finds in a run."""
    with Examination(model) as report:
        run()
    return report.ranked()


def only(run: Callable[[], Any], model: nn.Module | None = None) -> Finding:
    found = findings(run, model)
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize("reads", [False, True])
def test_a_true_nan_that_nothing_uses_is_a_note(reads: bool) -> None:
    """As the disparity of rays that hit nothing in NeRF, which is 0/0 in float32 and reaches no loss."""

    def run() -> None:
        model, batch = nn.Linear(4, 4), torch.randn(3, 4)
        weights = torch.zeros(3)
        with torch.autocast("cpu", B16):
            result = model(batch)
        ratio = weights / weights
        loss = result.float().square().mean() + (ratio.sum() if reads else 0.0)
        loss.backward()

    assert only(run).grade == ("error" if reads else "note")


# --- sums


def count(dtype: torch.dtype, times: int = 40) -> Tensor:
    total = torch.zeros((), dtype=dtype)  # made
    for _ in range(times):
        total += 64.0  # added
    return total


def average(dtype: torch.dtype) -> Tensor:
    mean = torch.ones(300, dtype=dtype)  # average made
    for step in range(60):
        mean.mul_(0.999).add_(torch.full((300,), 1.0 + step), alpha=0.001)  # averaged
    return mean


def not_in_place(dtype: torch.dtype) -> Tensor:
    total = torch.zeros((), dtype=dtype)
    for _ in range(3000):
        total = total + 1  # out of place
    return total


@pytest.mark.parametrize(
    ("run", "line", "made"),
    [
        (lambda dtype: count(dtype, 400), "added", "made"),
        (average, "averaged", "average made"),
        (not_in_place, "out of place", None),
    ],
)
def test_a_sum_that_stops(run: Callable[[torch.dtype], Tensor], line: str, made: str | None) -> None:
    """With the line that adds, and the line that makes it in 16 bits; in float32 nothing is lost."""
    found = only(lambda: run(B16))
    assert (found.grade, found.kind, found.place.line) == ("precision loss", "stagnating sum", line_of(line))
    assert found.producer is not None
    assert made is None or found.producer.line == line_of(made)
    assert "float32" in found.fix.code
    assert findings(lambda: run(F32)) == []


def test_a_counter_in_float32_stops_too() -> None:
    def run() -> None:
        tokens = torch.full((), 2.0**24)
        for _ in range(20):
            tokens += 1

    assert only(run).kind == "stagnating sum"


def test_rounding_of_a_sum_that_moves_is_no_finding() -> None:
    assert findings(lambda: count(B16)) == []
    assert (
        findings(lambda: [torch.ones((), dtype=F16).add_(1e-8) for _ in range(20)]) == []
    )  # an eps, each time on another


# --- casts older than their weights


def steps_inside(region: Callable[[], Any], model: nn.Module | None = None, *, step: bool = True) -> Callable[[], None]:
    model = model or nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        with region():  # region
            for _ in range(4):
                loss = model(torch.ones(2, 4)).float().sum()
                with torch.autocast("cpu", enabled=False):
                    torch.autograd.backward(loss)
                if step:
                    optimizer.step()
                    optimizer.zero_grad()

    return run


def test_casts_that_are_older_than_their_weights() -> None:
    found = next(
        each for each in findings(steps_inside(lambda: torch.autocast("cpu", dtype=B16))) if each.check == "stale casts"
    )
    assert (found.grade, found.kind, found.place.line) == ("error", "stale cast", line_of("region"))
    assert "linear" in found.place.op or "addmm" in found.place.op


def test_one_mistake_is_one_finding_for_all_layers() -> None:
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    run = steps_inside(lambda: torch.autocast("cpu", dtype=B16), layers)
    assert sum(each.check == "stale casts" for each in findings(run, layers)) == 1


@pytest.mark.parametrize(
    "run",
    [
        steps_inside(lambda: autocast("cpu", dtype=B16)),
        steps_inside(lambda: torch.autocast("cpu", dtype=B16, cache_enabled=False)),
        steps_inside(lambda: torch.autocast("cpu", dtype=B16), step=False),
    ],
)
def test_casts_that_are_not(run: Callable[[], None]) -> None:
    """Those of ampkit's regions are never stale."""
    assert not any(found.check == "stale casts" for found in findings(run))


def test_a_cast_of_the_users_own_is_a_note() -> None:
    weight = nn.Parameter(torch.ones(4))

    def run() -> None:
        half = weight.bfloat16()
        with torch.no_grad():
            weight.mul_(2.0)
        (half * 2).sum()

    assert only(run).grade == "note"


# --- data


@pytest.mark.parametrize("workers", [0, 1])
def test_inf_in_the_data(workers: int) -> None:
    """Through a worker's shared memory too, which is no memory that was not written to."""
    x = torch.ones(8, 3)
    x.numpy()[5, 1] = float("inf")  # where the examination does not see it
    model = nn.Linear(3, 1)

    def run() -> None:
        for (batch,) in DataLoader(TensorDataset(x), batch_size=4, num_workers=workers):  # loader
            model(batch).sum()

    found = only(run)
    assert (found.grade, found.check, found.kind) == ("error", "data", "arrived")
    if workers:
        assert f"batch 1 of the loader at tests/debugging/test_examine.py:{line_of('loader')}" in found.cause.text
        assert "inf in 1 of 12 elements, in row 1 of 4, column 1 of 3" in found.cause.text
    else:
        assert found.place.line == line_of("loader")


def test_an_outlier_in_the_data() -> None:
    model = nn.Sequential(nn.Linear(3, 1))
    batch = torch.tensor([[1.0, 2.0, 3.0], [1.0, 1e9, 3.0]])

    def run() -> None:
        with autocast("cpu", dtype=F16):
            model(batch).float().sum().backward()

    found = findings(run)[0]
    assert "no parameter took part in it: it arrived with the data" in found.cause.text
    assert "in row 1 of 2" in found.elements
    assert "rows of the data" in found.fix.code


def test_a_large_number_of_the_code_is_not_the_datas() -> None:
    model = nn.Linear(3, 1)

    def run() -> None:
        target = torch.ones(2, 1, dtype=B16) * 3 * 3e38  # beyond bfloat16
        (model(torch.ones(2, 3)) - target.float()).square().mean().backward()

    found = findings(run)[0]
    assert found.place.line == line_of("beyond bfloat16")
    assert "data" not in found.cause.text


def test_an_outlier_of_a_batch_that_overflows_in_a_layer() -> None:
    """A parameter takes part in it, but no precision bears 1e38 squared."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    batch = torch.randn(4, 3)
    batch[2, 0] = 1e38

    def run() -> None:
        with torch.autocast("cpu", B16):
            model(batch).float().square().mean().backward()

    found = findings(run)[0]
    assert "the input has 1e+38" in found.cause.text
    assert "in row 2 of 4: it arrived with the data" in found.cause.text


# --- inf that belongs there, and inf that does not


def softmax_by_hand(scores: Tensor) -> Tensor:
    weights = (scores * 20).exp()  # overflows
    return weights / weights.sum(1, keepdim=True)


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (softmax_by_hand, "overflows"),
        (lambda scores: scores - scores.detach(), "the difference of two masks"),  # the difference of two masks
    ],
    ids=["exp", "difference"],
)
def test_a_mask_is_not_what_goes_wrong(function: Callable[[Tensor], Tensor], line: str) -> None:
    """-9e15 is -inf in float16, on purpose or not; the operator that makes +inf or NaN beside it is the place."""
    model = nn.Linear(4, 4)

    def run() -> None:
        with torch.autocast("cpu", F16):
            scores = model(torch.full((4, 4), 2.0))
            mask = -9e15 * torch.ones_like(scores)
            masked = torch.where(torch.eye(4) > 0, scores, mask)
            function(masked).float().sum().backward()

    found = findings(run)[0]
    assert found.grade == "error"
    assert found.place.line == line_of(line)


def test_an_inf_that_is_masked_is_a_note() -> None:
    model = nn.Linear(4, 1)

    def run() -> None:
        with torch.autocast("cpu", F16):
            result = model(torch.full((4, 4), 100.0)) * 0 + 1
            loss = (result * 60000 * 60000).sigmoid().float().sum()  # absorbed
        loss.backward()

    found = only(run)
    assert (found.grade, found.place.line) == ("note", line_of("absorbed"))
    assert "a result is inf, which a later operator masks" in found.what
    assert "float32" in found.fix.code


def test_an_epsilon_that_rounding_removes_before_what_is_absorbed() -> None:
    """As in the log-mel features of speech, whose floor of 1e-10 is 0 in float16."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def run() -> None:
        for _ in range(3):
            decibels = torch.zeros(4, 4, dtype=F16).clamp(min=1e-10).log10()  # a floor
            model(torch.maximum(decibels, torch.tensor(-8.0)).float()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    found = only(run)
    assert (found.grade, found.place.line) == ("note", line_of("a floor"))
    assert found.cause.text.startswith("1e-10 is 0 in float16")
    assert "write a number that the dtype can represent" in found.fix.code
    assert (found.step, found.last, found.times) == (0, 2, 3)


def test_alignments_of_a_ctc_loss_that_are_impossible_are_no_note() -> None:
    model = nn.Linear(4, 5)

    def run() -> None:
        log_probs = model(torch.randn(6, 2, 4)).log_softmax(-1)
        targets = torch.tensor([[1, 2], [3, 3]])
        nn.functional.ctc_loss(log_probs, targets, torch.tensor([6, 6]), torch.tensor([2, 2])).backward()

    assert findings(run) == []


def test_a_gradient_that_is_nan_and_clipped_is_no_note() -> None:
    """Clipping multiplies all gradients by NaN, and the scaler skips each step."""
    model = nn.Linear(4, 4)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")

    def run() -> None:
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", F16):
                result = model(torch.randn(3, 4))
                loss = (result + (result - result.detach()).square().sqrt()).float().sum()  # root of 0
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()

    found = findings(run)[0]
    assert (found.grade, found.place.line) == ("error", line_of("root of 0"))
    assert found.what.startswith("the gradient of")


def test_a_loss_in_16_bits_outside_of_the_region() -> None:
    model = nn.Linear(4, 3)

    def run(inside: bool) -> Callable[[], None]:
        def step() -> None:
            with torch.autocast("cpu", B16):
                output = model(torch.randn(5, 4)).log_softmax(1)
                loss = nn.functional.nll_loss(output, torch.arange(5) % 3)
            if not inside:
                loss = nn.functional.nll_loss(output, torch.arange(5) % 3)  # outside
            loss.backward()

        return step

    assert findings(run(inside=True)) == []
    found = only(run(inside=False))
    assert (found.grade, found.place.line) == ("note", line_of("outside"))
    assert found.what == "the loss is computed in bfloat16, outside of the region"


# --- gradients, updates, rounding


def trained(model: nn.Module, loss: Callable[[], Tensor], steps: int = 4) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def run() -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()

    return run


def test_a_gradient_that_rounding_makes_zero() -> None:
    """With the cast that does it; a gradient that is 0 in exact arithmetic, or missing, is no finding."""
    model, batch = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]), torch.randn(8, 4)

    def loss(scale: float) -> Tensor:
        y = model[0](batch)
        z = (y * scale).half()  # small
        return model[1](z.float() / scale).square().mean() + (y.detach() * 0 * model[2].bias).sum()

    found = findings(trained(model, lambda: loss(1.0)), model)
    assert [(each.grade, each.kind, each.what) for each in found] == [
        ("note", "zero gradient", "the gradient of 2.bias is exactly 0"),
        ("note", "no gradient", "the gradient of 2.weight is missing"),
    ]
    found = findings(trained(model, lambda: loss(1e-9)), model)
    assert ("zeros", "underflow", line_of("small")) in [(each.check, each.kind, each.place.line) for each in found]


def test_updates_that_are_rounded_away() -> None:
    model, batch = mlp(8, 16, 1).bfloat16(), torch.randn(8, 8).bfloat16()
    found = next(
        p for p in findings(trained(model, lambda: model(batch).square().mean()), model) if p.check == "updates"
    )
    assert (found.grade, found.kind, found.place.op) == ("precision loss", "update rounded away", "aten::add_.Tensor")
    assert "masters" in found.fix.code


def test_state_that_is_rounded_in_place() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters())

    def run() -> None:
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            for state in optimizer.state.values():
                state["exp_avg_sq"].copy_(state["exp_avg_sq"].bfloat16())  # rounded

    found = only(run, model)
    assert (found.grade, found.kind, found.place.line) == ("error", "rounded", line_of("rounded"))
    assert found.what == "the optimizer's state is rounded to bfloat16 in place"
    assert found.cause.text.startswith("exp_avg_sq of weight is float32")


def test_positions_in_16_bits() -> None:
    found = only(lambda: torch.arange(600, dtype=B16) / 600)  # positions
    assert (found.grade, found.place.line) == ("precision loss", line_of("positions"))
    assert findings(lambda: torch.arange(256, dtype=B16)) == []


@pytest.mark.parametrize(("start", "grade"), [(65536, "precision loss"), (200, "note")])
def test_positions_that_a_region_casts(start: int, grade: str) -> None:
    """As in a rotary embedding under a region: of a grid far from 0 all positions become the same."""
    frequencies, positions = torch.tensor([[1.0], [0.1]]), torch.arange(start, start + 64).float()[None]

    def run() -> None:
        with torch.autocast("cpu", B16):
            frequencies @ positions  # positions of a grid

    found = only(run)
    assert (found.grade, found.place.line) == (grade, line_of("positions of a grid"))
    assert "of 64 integers become equal" in found.what


@pytest.mark.parametrize("factor", [1e-6, 1.0])
def test_a_cast_in_a_hook(factor: float) -> None:
    """It loses what float16 cannot hold; what it only rounds is no finding."""
    torch.manual_seed(0)
    model = mlp(8, 8, 1)
    for weight in model.parameters():
        weight.register_hook(lambda gradient: (gradient * factor).half().float() / factor)  # hook
    found = findings(trained(model, lambda: model(torch.ones(2, 8)).square().mean()))
    if factor == 1:
        assert not found
    else:
        assert (found[0].grade, found[0].kind, found[0].place.line) == ("precision loss", "underflow", line_of("hook"))


def finding(grade: Grade, check: str, what: str, step: int = 0, fix: Fix | None = None) -> Finding:
    return Finding(grade=grade, check=check, cause=Cause(what), what=what, step=step, fix=fix or Fix())


def test_the_rank_of_findings() -> None:
    """Errors of the loop, then verified fixes, then by grade and step."""
    report = debugging.examine(lambda: None, nn.Linear(1, 1), steps=0)
    verified = Fix("x.float()", verified=True)
    report.findings = [
        finding("note", "loop order", "loop note"),
        finding("error", "nonfinite", "late", 5),
        finding("precision loss", "sums", "verified", 6, verified),
        finding("error", "nonfinite", "early", 2),
        finding("error", "loop order", "loop", 9),
    ]
    assert [each.what for each in report.ranked()] == ["loop", "verified", "early", "late", "loop note"]


def test_findings_of_one_place_are_one_whatever_their_numbers() -> None:
    """With the worse grade, and the words that belong to it."""
    report = Report()
    first, worse = finding("note", "zeros", "underflow"), finding("precision loss", "zeros", "underflow", 7)
    first.place = worse.place = Place("train.py", 3, "aten::mul.Tensor")
    worse.what = "all of a result becomes 0"
    assert report.add(first)
    assert not report.add(worse)
    (found,) = report.findings
    assert (found.grade, found.what, found.step, found.last, found.times) == (worse.grade, worse.what, 0, 7, 2)


# --- in code


@pytest.mark.parametrize(
    ("policy", "start"),
    [(None, 'Policy.default("cpu")'), (Policy.default("cpu").with_rules({"aten::gelu": Rule.FLOAT32}), "policy")],
)
def test_examine_tries_a_change_and_restores_everything(policy: Policy | None, start: str) -> None:
    """The change keeps a policy of the user's own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    nn.init.constant_(model.get_parameter("0.weight"), 1e4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
    before = [p.detach().clone() for p in model.parameters()]

    def step() -> None:
        optimizer.zero_grad()
        with autocast("cpu", dtype=F16, policy=policy):
            loss = model(torch.full((2, 4), 100.0)).float().mean()
        loss.backward()
        optimizer.step()

    report = debugging.examine(step, model, steps=2)
    first = report.ranked()[0]
    assert report.status == "found"
    assert (first.grade, first.place.module, first.kind) == ("error", "0", "overflow")
    assert first.fix.verified
    assert first.fix.code.startswith(f'policy = {start}.for_modules(model, {{"0": torch.float32')
    assert all(map(torch.equal, before, model.parameters()))


def test_losses_before_and_after_a_change_are_of_one_line_and_step() -> None:
    """Of two optimizers, each with a loss of its own, of which one overflows in float16."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])
    nn.init.constant_(model.get_parameter("1.weight"), 1e4)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=1e-6) for layer in model]
    values: dict[str, list[float]] = {"small": [], "large": []}

    def step() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        small = model[0](torch.ones(2, 4)).square().mean()
        small.backward()  # small loss
        with autocast("cpu", dtype=F16):
            large = model[1](torch.full((2, 4), 100.0)).float().mean()
        large.backward()  # large loss
        for optimizer in optimizers:
            optimizer.step()
        values["small"].append(small.item())
        values["large"].append(large.item())

    first = debugging.examine(step, model, steps=2).ranked()[0]
    assert (first.kind, first.fix.verified) == ("overflow", True)
    found = re.fullmatch(r"loss of .*test_examine.py:(\d+) in step (\d): (\S+) -> (\S+)", first.fix.result)
    assert found is not None
    line, number, before, after = found.groups()
    assert (int(line), before) == (line_of("large loss"), f"{values['large'][2 + int(number)]:.4g}")
    assert math.isfinite(float(after))


# --- the command

SCRIPT = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
factor = float(sys.argv[1])
for step in range(6):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = (model(torch.ones(2, 4)) * factor).float().square().mean()
    optimizer.zero_grad()
    (loss / factor).backward()
    optimizer.step()
print("the end")
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_process: None) -> Path:
    """A script, whose processes are calls in this one."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    return file


def test_the_command(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The place comes first; progress goes to stderr; the JSON has a version."""
    assert main(["debug", "--no-verify", "--json", "r.json", "train.py", "1e6"]) == 1
    out, err = capsys.readouterr()
    assert err == "ampkit debug: the script starts\n"
    assert out.startswith("the end\nerror: train.py:9 (aten::mul.Tensor): the loss is inf in steps 0-5")
    report = json.loads(Path("r.json").read_text())
    first = report["findings"][0]
    assert (report["kind"], report["version"], report["status"]) == ("ampkit.debugging.report", 3, "found")
    assert (first["rank"], first["grade"], first["file"], first["line"]) == (1, "error", "train.py", 9)
    assert first["kind"] == "overflow"
    assert main(["debug", "--no-verify", "train.py", "1"]) == 0
    out = capsys.readouterr().out
    assert " operators in 6 steps: no findings\nnot compared with float32: --no-verify\n" in out


@pytest.mark.parametrize(
    ("options", "steps"), [(["--steps", "2"], 2), (["--seconds", "0.0001"], 1)], ids=["steps", "seconds"]
)
def test_the_command_ends_early(
    script: Path, capsys: pytest.CaptureFixture[str], options: list[str], steps: int
) -> None:
    assert main(["debug", *options, "train.py", "1"]) == 0
    out = capsys.readouterr().out
    assert "the end" not in out
    assert f" operators in {steps} step" in out


def test_an_interrupt_prints_what_is_known(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text(SCRIPT.replace('print("the end")', "raise KeyboardInterrupt"))
    assert main(["debug", "train.py", "1"]) == 130
    assert main(["debug", "train.py", "1e6"]) == 1
    out = capsys.readouterr().out
    assert "the run did not reach its end: the script was interrupted" in out
    assert "train.py:9" in out


def test_a_command_wins_over_a_script_with_its_name(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.rename(script.with_name("rehearse"))
    assert main(["debug", "./rehearse", "1"]) == 0
    assert "checked" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["debug", "rehearse"])  # the command, without a script


HELPER = """
def clip(parameters):
    import torch
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
"""
CLIPS = """
import torch
from helper import clip
model = torch.nn.Linear(4, 1)
optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
for _ in range(3):
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    clip(model.parameters())
    scaler.step(optimizer)
    scaler.update()
"""


def test_a_call_in_a_helper_names_the_line_of_the_script(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.with_name("helper.py").write_text(HELPER)
    script.write_text(CLIPS)
    assert main(["debug", "--no-verify", "--json", "r.json", "train.py"]) == 1
    first = json.loads(Path("r.json").read_text())["findings"][0]
    assert (first["file"], first["line"], first["called_from"]) == ("helper.py", 4, ["train.py", 9])
    assert "error: helper.py:4 (called from train.py:9): gradients are clipped" in capsys.readouterr().out


def test_a_change_that_could_not_run_is_not_refuted(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.chdir(script.parent)
    monkeypatch.setattr("ampkit.debugging.trials.sys.executable", "/nonexistent/python")
    assert main(["debug", "--json", "r.json", "train.py", "1e6"]) == 1
    report = json.loads(Path("r.json").read_text())
    first = report["findings"][0]
    assert (first["verified"], first["tried"]) == (False, [])
    assert "around train.py:9" in first["fix"]
    assert report["not_checked"][-1].startswith("whether a change helps: the script did not start")


def test_a_change_is_verified_in_a_fresh_process(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.chdir(script.parent)
    assert main(["debug", "--json", "r.json", "train.py", "1e6"]) == 1
    first = json.loads(Path("r.json").read_text())["findings"][0]
    assert first["verified"]
    assert 'torch.autocast("cpu", enabled=False): around train.py:9' in first["fix"]
    assert re.fullmatch(r"loss in step 5: (inf|nan) -> [\d.e+]+", first["result"])
