"""Drawn faults are named: operator, module, call, line, phase, cause; an intervention at that operator cures them."""

import pytest
import torch

from ampkit.debugging import detect_nonfinite, find_nonfinite
from ampkit.debugging.operator_facts import facts_of
from tests.debugging.faults import Drawn, Intervene, broken, draw

SEEDS = range(48)


def is_view(op: object) -> bool:
    return facts_of(op).is_view     # type: ignore[arg-type]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_drawn_fault_is_named(seed: int) -> None:
    """All of it, from one run."""
    fault = draw(seed)
    model, step = fault.build()
    with detect_nonfinite(model, on_found="record") as report:
        loss = step()
    assert broken(model, loss), f"no fault: {fault}"
    assert report, fault
    origin, cause = report.findings[0].origin, report.findings[0].cause
    assert origin.op == fault.op, (fault, str(report))
    assert cause.kind in fault.kinds, (fault, str(report))
    assert origin.dtype == str(fault.dtype).removeprefix("torch.")
    assert all(one.finite for one in report.findings[0].inputs)
    assert origin.phase == fault.direction
    if fault.direction != "optimizer":
        assert origin.module == f"blocks.{fault.place}.fault"
        assert origin.call == fault.in_call
    if fault.direction == "forward":
        assert origin.file.endswith("faults.py")
        assert origin.line in fault.lines


@pytest.mark.parametrize("seed", SEEDS)
def test_the_named_operator_is_to_blame(seed: int) -> None:
    """Its inputs were finite and its result was not; its float64 result in its place cures the step.

    The same done one operator earlier cures nothing. Only single faults can be cured at one place: an optimizer that
    applies the operator to each parameter has several.
    """
    fault = draw(seed)
    model, step = fault.build()
    with detect_nonfinite(model, on_found="record") as report:
        step()
    index = report.findings[0].origin.index
    model, step = fault.build()
    with Intervene(index, is_view) as there:
        loss = step()
    assert there.op == fault.op
    assert there.inputs_finite
    assert not there.output_finite
    if fault.direction == "optimizer":
        return
    assert not broken(model, loss), fault
    model, step = fault.build()
    with Intervene(index - 1, is_view):
        loss = step()
    assert broken(model, loss)


@pytest.mark.parametrize("seed", SEEDS[::6])
def test_a_replay_finds_the_same(seed: int) -> None:
    """Afterwards everything is as it was."""
    fault = draw(seed)
    model, step = fault.build()
    before = [one.clone() for one in (*model.state_dict().values(), torch.get_rng_state())]
    report = find_nonfinite(step, model, verify=False)
    assert report.findings[0].origin.op == fault.op
    assert report.findings[0].cause.kind in fault.kinds
    assert not report.notes
    for one, other in zip(before, (*model.state_dict().values(), torch.get_rng_state()), strict=True):
        assert torch.equal(one, other)


def test_the_draw_is_wide() -> None:
    """Every direction, precision and recompute, most operators and optimizers."""
    drawn = [draw(seed) for seed in SEEDS]

    def values(name: str) -> set[object]:
        return {getattr(fault, name) for fault in drawn}

    assert values("direction") == {"forward", "backward", "optimizer"}
    assert values("dtype") == {torch.float16, torch.bfloat16, torch.float32}
    assert values("recompute") == {"no", "reentrant", "non-reentrant"}
    assert values("optimizer") == {"sgd", "foreach", "loop", "plain"}
    assert values("in_call") == {1, 2, 3}
    assert len(values("name")) >= 20
    assert isinstance(drawn[0], Drawn)
