"""Where inf and NaN begin: reports, causes, verified fixes, and steps with unusual tensors."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampkit import GradScaler, Policy, Rule, autocast, debugging
from ampkit.debugging.finding import Finding, Report
from tests.debugging.models import Middle
from tests.debugging.planted import loss_of, region

EIGHTS = torch.full((4, 8), 8.0)


def overflowing() -> nn.Sequential:
    """The middle layer's result overflows float16, also as the last layer's input; the loss is small."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1))
    nn.init.normal_(model.get_parameter("1.weight"), std=2e4)
    nn.init.constant_(model.get_parameter("2.weight"), 1e-6)
    return model


def step_of(model: Callable[[Tensor], Tensor], x: Tensor = EIGHTS, kind: str = "ampkit") -> Callable[[], Tensor]:
    def step() -> Tensor:
        with region(kind, torch.float16):
            loss = model(x).float().mean()
        loss.backward()
        return loss

    return step


def recorded(step: Callable[[], Any], model: nn.Module | None = None) -> Report:
    with debugging.Examination(model) as report:
        step()
    return report


def first(step: Callable[[], Any], model: nn.Module | None = None) -> Finding:
    return recorded(step, model).nonfinite[0]


def test_the_text_of_an_error() -> None:
    """As a terminal shows it, with numbers that add up."""
    model = overflowing()
    with pytest.raises(debugging.NonFiniteError) as raised, debugging.Examination(model, on_nonfinite="raise"):
        step_of(model)()
    lines = str(raised.value).splitlines()
    assert lines[0].startswith("error: tests/debugging/checks/test_nonfinite.py:")
    assert '(aten::addmm, module "1"): the loss is ' in lines[0]
    assert lines[1].startswith("  cause     overflow: the exact result is ")
    assert "the float16 maximum is 6.55e+04; " in lines[1]
    assert lines[2].startswith("  inputs    float16[8] up to")
    assert lines[3] == '  untested  policy = Policy.default("cpu").for_modules(model, {"1": torch.float32})'
    finding = raised.value.report.nonfinite[0]
    exact = model.get_parameter("1.weight").detach().half().double() @ model[0](EIGHTS[:1]).detach().half().double().T
    assert finding.cause.value == pytest.approx(float(exact.abs().max()), rel=0.02)
    assert finding.cause.limit == 65504


def test_an_advised_change_keeps_a_policy_of_the_users_own() -> None:
    model, policy = overflowing(), Policy.default("cpu").with_rules({"aten::gelu": Rule.FLOAT32})

    def step() -> None:
        with autocast("cpu", torch.float16, policy=policy):
            loss = model(EIGHTS).float().mean()
        loss.backward()

    assert first(step, model).fix.code == 'policy = policy.for_modules(model, {"1": torch.float32})'


def test_a_fix_of_two_rules_is_verified() -> None:
    """Two layers overflow, and both are named; a finite step is left alone."""
    model = overflowing()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fix = debugging.examine(step_of(model), model, steps=1).nonfinite[0].fix
    assert fix.verified, fix
    assert fix.code == 'policy = Policy.default("cpu").for_modules(model, {"1": torch.float32, "2": torch.float32})'
    assert re.fullmatch(r"loss in step 0: (nan|-?inf) -> -?[\d.e+-]+", fix.result)
    assert [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])] == []
    assert [name for name, parameter in model.named_parameters() if parameter.grad is not None] == []
    small = nn.Sequential(nn.Linear(8, 1))
    assert not debugging.examine(step_of(small, EIGHTS * 0 + 1e-12), small).nonfinite


@pytest.mark.parametrize("kind", ["none", "torch", "ampkit"])
def test_no_fix_that_failed_is_suggested(kind: str) -> None:
    """Float32 overflows too, so the fix is a recommendation for the code."""
    model = nn.Sequential(nn.Linear(8, 4), Middle(lambda x: x * 1e39), nn.Linear(4, 1))
    batch = EIGHTS
    if kind == "none":
        model, batch = model.half(), batch.half()
    report = debugging.examine(step_of(model, batch, kind), model, steps=1)
    fix = report.nonfinite[0].fix
    assert (fix.verified, fix.tried) == (False, ())
    assert fix.code.startswith("make its inputs smaller before this line")
    assert report.comparison == "in float32 the loss is not finite"


UNDEFINED: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x / (x * 0),
    lambda x: (x - x).log(),
    lambda x: (x.abs() * 0).sqrt(),  # in backward
    lambda x: x.masked_fill(x == x, -math.inf).softmax(-1),
]


@pytest.mark.parametrize("function", UNDEFINED)
@pytest.mark.parametrize("find", [True, False])
def test_what_is_undefined_in_exact_arithmetic_gets_no_change_of_precision(function: Any, find: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 4), Middle(function), nn.Linear(4, 1))
    step = step_of(model, EIGHTS, "torch")
    report = debugging.examine(step, model, steps=1) if find else recorded(step, model)
    finding = report.nonfinite[0]
    assert finding.cause.is_exact
    assert (finding.fix.verified, finding.fix.tried) == (False, ())
    assert not any(word in finding.fix.code for word in ("float32", ".float()", "autocast"))


def test_what_is_finite_for_one_step_only_is_not_verified() -> None:
    """A loop that steps past its scaler: a lower scale is finite once, and NaN two steps later."""
    torch.manual_seed(0)
    model, scaler = nn.Linear(8, 1), GradScaler("cpu", init_scale=2.0**20)
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0)

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, EIGHTS)).backward()
        optimizer.step()

    report = debugging.examine(step, model, state=[scaler])
    assert "the optimizer steps with scaled gradients" in report.ranked()[0].what
    assert report.nonfinite
    assert not report.nonfinite[0].fix.verified


def test_what_arrives_broken() -> None:
    """A parameter by its name, a batch by its shape and the line that reads it."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    batch = EIGHTS.clone()
    batch[1, 2] = math.nan
    finding = first(lambda: model(batch).sum().backward(), model)
    assert finding.kind == "arrived"
    assert str(finding.place).startswith("tests/debugging/checks/test_nonfinite.py:")
    assert str(finding.place).endswith('(a tensor float32[4, 8], module "0")')
    nn.init.constant_(model.get_parameter("1.weight"), math.nan)
    finding = first(lambda: model(EIGHTS).sum().backward(), model)
    assert finding.parameter == "1.weight"
    assert finding.what == "the loss is NaN"


def test_a_loss_that_the_loop_reads_is_not_masked() -> None:
    def step() -> None:
        loss = torch.zeros(2).log().sum()
        assert not loss.isnan()
        assert loss.isinf()

    assert recorded(step)


def test_in_inference_mode_operators_come_apart_too() -> None:
    """There, `to` arrives whole, and its schema says that it may be a view."""
    layer = nn.Linear(4, 4)
    with torch.inference_mode(), debugging.Examination() as report:
        y = layer(torch.ones(2, 4) * 1e6).to(torch.float16)
        (y - y).sum()
    assert [finding.place.op for finding in report.nonfinite] == ["aten::_to_copy"]
    assert report.nonfinite[0].cause.kind == "overflow"


def test_memory_that_no_operator_wrote() -> None:
    with debugging.Examination() as report:
        memory = torch.empty(3)
        memory.data_ptr()
        memory.untyped_storage().fill_(255)  # type: ignore[attr-defined]  # a NaN that no operator wrote
        (memory * 2).sum()
    assert report.nonfinite[0].cause.kind == "uninitialized"


def test_a_compiled_model_and_a_closure() -> None:
    model = overflowing()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
    compiled: Any = torch.compile(model, backend="aot_eager")
    report = recorded(lambda: optimizer.step(step_of(compiled)), compiled)  # type: ignore[arg-type]
    assert report.nonfinite[0].place.module == "1"
    assert report.nonfinite[0].place.phase == "forward"  # though the optimizer calls the closure


def test_small_unsigned_integers_are_inputs_too() -> None:
    counts = torch.tensor([3, 0], dtype=torch.uint16)
    assert "uint16[2] from 0 to 3" in first(lambda: torch.ones(2) / counts).inputs[1].text


def test_an_error_of_the_users_own_stays() -> None:
    """Half a step proves nothing of an inf that might have been absorbed; a NaN loss explains the error."""
    with pytest.raises(KeyError), debugging.Examination(on_nonfinite="raise"):  # noqa: PT012
        torch.zeros(2).log()
        raise KeyError
    with pytest.raises(debugging.NonFiniteError) as raised, debugging.Examination(on_nonfinite="raise"):  # noqa: PT012
        loss = (torch.zeros(1) / 0).sum()
        raise ValueError(f"loss is {loss.item()}")
    assert isinstance(raised.value.__context__, ValueError)


def test_a_step_that_breaks_a_parameter_raises_from_the_optimizer() -> None:
    """With the parameter's name, before the next step begins."""
    model = nn.Linear(4, 1).half()
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-8)
    with debugging.Examination(model, on_nonfinite="raise"):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with pytest.raises(debugging.NonFiniteError, match=r"parameter weight is NaN in step 0"):
            optimizer.step()


def test_a_cause_leaves_random_numbers_alone() -> None:
    """Dropout is run again with the user's generator put back."""
    x = torch.full((8,), 60000.0).half()
    torch.manual_seed(0)
    report = recorded(lambda: torch.native_dropout(x, 0.5, True)[0].sum())
    after = torch.get_rng_state()
    torch.manual_seed(0)
    torch.native_dropout(x, 0.5, True)
    assert torch.equal(after, torch.get_rng_state())
    assert report.nonfinite[0].place.op == "aten::native_dropout"


def test_a_softmax_of_inf_beside_a_mask() -> None:
    """The rows with +inf are the cause, not the mask, which leaves elements in each row."""
    scores = torch.zeros(2, 4, requires_grad=True)
    with debugging.Examination() as report:
        large = torch.tensor([[torch.inf, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
        masked = (scores + 2.0).masked_fill(torch.tensor([False, False, False, True]), -torch.inf)
        (masked + large).softmax(-1).sum().backward()
    assert "1 of 2 rows have +inf" in str(report)
