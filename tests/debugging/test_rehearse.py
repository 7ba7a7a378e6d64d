"""`rehearse`: verdicts on tiny models, the state afterwards, and the command. `benchmarks.rehearse` has larger ones."""

from __future__ import annotations

import contextlib
import json
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ampkit import GradScaler, Policy, Rule, autocast, record_casts
from ampkit.debugging import cli, rehearse, trials
from ampkit.debugging.changes import replaced_regions
from ampkit.debugging.rehearsal import compare
from benchmarks.fragile_models import DifferenceNorm
from tests.helpers.float8 import policy as float8_policy

B16, F16 = torch.bfloat16, torch.float16
Steps = Callable[[], Iterator[float]]


def fragile() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), DifferenceNorm(), nn.Linear(32, 16))
    nn.init.constant_(model[0].bias, 100.0)  # type: ignore[arg-type]
    return model


def harmless() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


def training(model: nn.Module, dtype: torch.dtype = B16, policy: Policy | None = None, n: int = 6) -> Steps:
    def steps() -> Iterator[float]:
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        for _ in range(n):
            x = torch.randn(32, 16)
            optimizer.zero_grad()
            with autocast("cpu", dtype, policy=policy):
                loss = (model(x).float() - x).square().mean()
            loss.backward()
            optimizer.step()
            yield loss.item()

    return steps


def judged(steps: Steps, model: nn.Module, policy: Policy | None = None, **options: Any) -> Any:
    return rehearse(steps, model, policy, **{"n_steps": 4, "warm_up": 2, **options})


def test_a_fragile_module_is_found_and_the_policy_closes_the_gap() -> None:
    model = fragile()
    report = judged(training(model), model)
    assert report.gap > report.threshold > 0.01
    assert report.error > 0
    assert report.gap > 1
    assert report.modules == ["1"]
    assert report.remaining < 0.05
    assert report.status == "found"
    assert report.fix == 'policy = Policy.default("cpu").for_modules(model, {"1": torch.float32})'
    assert report.policy == Policy.default("cpu").for_modules(model, {"1": torch.float32})
    assert f"verified  with the fix the loss changes by {100 * report.remaining:+.1f}%" in str(report)
    assert 3 <= report.pairs <= 6
    assert report.steps >= 2 + 2 * 4 * report.pairs
    assert json.loads(report.to_json())["modules"] == ["1"]


@pytest.mark.parametrize("policy", [None, float8_policy(Rule.FLOAT8_ROWWISE)])
def test_a_harmless_policy_has_nothing_to_keep(policy: Policy | None) -> None:
    model = harmless()
    report = judged(training(model, policy=None if policy is None else Policy.torch("cpu")), model, policy, n_steps=6)
    assert abs(report.gap) < 0.01
    assert (report.modules, report.policy, report.status) == ([], None, "clean")
    assert str(report).startswith("no precision loss: low precision changes the loss by ")


def test_a_layer_that_fp8_breaks_is_kept_in_the_policy_without_fp8() -> None:
    """An outlier in each row leaves the other inputs of a layer no bits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
    model[1].register_forward_pre_hook(lambda _, args: (torch.cat([args[0][:, 1:], args[0][:, :1] * 0 + 2e5], 1),))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(32, 16))  # type: ignore[operator]
        model[1].weight.copy_(torch.eye(16, 32))  # type: ignore[operator]
    policy = float8_policy(Rule.FLOAT8_ROWWISE)
    model[1].weight.register_hook(lambda gradient: gradient * 0)  # type: ignore[operator,union-attr]
    model[1].weight.data[:, -1] = 0  # type: ignore[index,operator,union-attr]
    report = judged(training(model), model, policy)
    assert (report.gap > 0.03, report.modules) == (True, ["1"]), str(report)
    assert report.fix == 'policy = policy.for_modules(model, {"1": Policy.default("cpu")})'
    assert report.policy == policy.for_modules(model, {"1": Policy.default("cpu")})


@pytest.mark.parametrize("nested", [False, True])
def test_each_training_has_the_regions_that_it_should(nested: bool) -> None:
    """A region inside another inherits its policy: in FP8's reference it stays in bfloat16."""
    model, seen = harmless(), list[str]()

    def steps() -> Iterator[float]:
        with record_casts() as record, autocast("cpu", B16, policy=policy):
            with autocast("cpu") if nested else contextlib.nullcontext():
                loss = model(torch.ones(4, 16)).float().square().mean()
        seen.append(
            " ".join(call.float8 or str(call.computed_in[0])[6:] for call in record.calls if "linear" in call.op)
        )
        yield loss.item()

    policy = float8_policy(Rule.FLOAT8_ROWWISE)
    judged(steps, model, n_steps=1, warm_up=0)
    assert set(seen) == {"bfloat16 bfloat16", "FLOAT8_ROWWISE FLOAT8_ROWWISE"}
    policy = None
    seen.clear()
    judged(steps, model, n_steps=1, warm_up=0)
    assert set(seen) == {"", "bfloat16 bfloat16"}  # a disabled region records nothing


def test_everything_is_left_as_it_was() -> None:
    """Parameters, buffers, an optimizer and a scaler from outside, generators; an optimizer from inside is freed."""
    model = nn.Sequential(fragile(), nn.BatchNorm1d(16))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=1)

    def steps() -> Iterator[float]:
        for _ in range(4):
            x = torch.randn(32, 16)
            optimizer.zero_grad()
            with autocast("cpu", F16):
                loss = (model(x).float() - x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            yield loss.item()

    def state() -> list[Tensor]:
        moments = [value for state in optimizer.state.values() for value in state.values()]
        return [*model.state_dict().values(), *moments, torch.tensor(scaler.get_scale()), torch.get_rng_state()]

    for _ in steps():
        pass
    before = [tensor.clone() for tensor in state()]
    assert judged(steps, model).gap is not None
    assert all(map(torch.equal, before, state()))
    assert autocast("cpu", F16).__enter__.__func__ is autocast.__enter__
    assert autocast.__enter__.__qualname__ == "autocast.__enter__"


def test_an_interrupt_ends_it_with_what_is_known_and_restores() -> None:
    model = harmless()
    before = [p.detach().clone() for p in model.parameters()]
    left = iter(range(1 + 1 + 2 + 4 * 3))  # in the fourth training

    def steps() -> Iterator[float]:
        for loss in training(model)():
            if next(left, None) is None:
                raise KeyboardInterrupt
            yield loss

    report = judged(steps, model)
    assert report.status == "inconclusive"
    assert (report.pairs, report.gap is not None) == (1, True)
    assert str(report).startswith("inconclusive: interrupted; the results until then follow\n")
    assert all(map(torch.equal, before, model.parameters()))


def test_a_loss_that_is_not_finite_is_an_infinite_gap() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    nn.init.constant_(model[0].bias, 2e4)  # type: ignore[arg-type]
    nn.init.constant_(model[1].weight, 1.0)  # type: ignore[arg-type]
    report = judged(training(model, F16), model)
    assert report.gap == float("inf")
    assert "it is not finite" in str(report)
    assert report.status == "found"
    assert json.loads(report.to_json())["gap"] == "inf"


@pytest.mark.parametrize(
    ("gaps", "pairs", "text"),
    [
        ([0.05, 0.06, 0.05], 3, "precision loss: low precision changes the loss by +5.3%"),
        ([0.001, 0.0, 0.001], 3, "no precision loss: low precision changes the loss by +0.1%"),
        ([0.02, 0.0, -0.01, 0.02, 0.0, -0.01], 6, "undecided: low precision changes the loss by +0.3%"),
        ([0.02, 0.02, 0.05, 0.05, 0.05, 0.05], 6, "precision loss: low precision changes the loss by +4.0%"),
        ([0.02, 0.0, -0.01, 0.0, 0.0, -0.01], 6, "no precision loss: low precision changes the loss by -0.0%"),
    ],
)
def test_three_more_pairs_follow_if_three_do_not_decide(gaps: list[float], pairs: int, text: str) -> None:
    remaining = iter(gaps)

    def train(kept: Any, seed: int) -> list[float]:
        return [1.0] * 4 if kept is None else [1.0 + next(remaining, 0.0)] * 4

    report = compare(train, list)
    assert str(report).startswith(text)
    assert bool(report) is text.startswith("precision loss")
    assert (report.undecided, report.pairs) == ("undecided" in text, pairs)
    assert report.status == {"p": "found", "n": "clean", "u": "inconclusive"}[text[0]]


def test_regions_of_torch_are_judged_too() -> None:
    """By torch's lists, which have their own code; a recompute has the region of its forward."""
    model, bits = fragile(), list[float]()

    def steps() -> Iterator[float]:
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        for _ in range(6):
            x = torch.randn(32, 16)
            optimizer.zero_grad()
            with torch.autocast("cpu", B16):
                h = checkpoint(lambda x: model[1](model[0](x)), x.requires_grad_(), use_reentrant=False)
                with torch.autocast("cpu", enabled=False):
                    inside = torch.ones(2, 2) @ torch.ones(2, 2)
                loss = (model[2](h).float() - x).square().mean()
            assert inside.dtype is torch.float32
            loss.backward()
            optimizer.step()
            bits.append(loss.item())
            yield loss.item()

    list(steps())
    model, plain = fragile(), list(bits)
    enter = torch.autocast.__enter__
    report = judged(steps, model)
    assert report.fix == 'policy = Policy.torch("cpu").for_modules(model, {"1": torch.float32})'
    assert report.remaining is not None
    assert report.remaining < 0.05 < report.gap
    assert torch.autocast.__enter__ is enter
    bits.clear()
    with replaced_regions(lambda spec: spec):
        torch.manual_seed(0)
        model = fragile()
        list(steps())
    assert bits == plain


def test_what_cannot_be_judged_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, generator = harmless(), torch.Generator().manual_seed(0)

    def other_batches() -> Iterator[float]:
        with autocast("cpu", B16):
            yield model(torch.randn(4, 16, generator=generator)).float().square().mean().item()

    def without_region() -> Iterator[float]:
        yield model(torch.ones(4, 16)).square().mean().item()

    with pytest.raises(ValueError, match=r"does not do the same each time: its first loss is .*, and then "):
        judged(other_batches, model)
    with pytest.raises(ValueError, match=r"nothing is computed in low precision. .*an autocast region"):
        judged(without_region, model)
    with pytest.raises(ValueError, match=r"steps\(\) yields nothing; expected the loss of each step"):
        judged(lambda: iter(()), model)
    with pytest.raises(ValueError, match="the loss of the reference is not finite"):
        judged(training(broken := _broken(model)), broken)
    with pytest.raises(TypeError, match=r"model is str; expected the torch\.nn\.Module"):
        judged(without_region, "model")  # type: ignore[arg-type]
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="rehearse runs in one process: ranks would decide separately"):
        judged(training(model), model)


def _broken(model: nn.Module) -> nn.Module:
    nn.init.constant_(next(model.parameters()), float("nan"))
    return model


SCRIPT = """
    import sys, torch
    from ampkit import autocast
    from tests.debugging.test_rehearse import fragile, harmless

    model = {"fragile": fragile, "harmless": harmless}[sys.argv[1]]()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(100):
        x = torch.randn(32, 16)
        optimizer.zero_grad()
        with autocast("cpu", torch.bfloat16):
            loss = (model(x).float() - x).square().mean()
        loss.backward()
        optimizer.step()
"""


@pytest.fixture
def script(tmp_path: Path, in_process: None) -> str:
    """A script, whose processes are calls in this one."""
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("model", "options", "code", "expected"),
    [
        ("fragile", [], 1, 'policy = Policy.default("cpu").for_modules(model, {"1": torch.float32})'),
        ("harmless", ["--against", "fp8_rowwise"], 0, "no precision loss: low precision changes"),
    ],
)
def test_the_command(
    script: str, model: str, options: list[str], code: int, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["rehearse", "--steps", "4", *options, script, model]) == code
    out, err = capsys.readouterr()
    assert expected in out
    assert "rehearse: pair 3: " in err


def test_the_command_starts_processes_and_says_why_they_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit('no data')", encoding="utf-8")
    assert cli.main(["rehearse", str(path)]) == cli.INCONCLUSIVE
    assert "the script ended with sys.exit('no data')" in capsys.readouterr().err
    assert cli.main(["rehearse", str(tmp_path / "absent.py")]) == cli.BAD_INPUT
    assert subprocess.run is trials.subprocess.run
