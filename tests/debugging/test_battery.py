"""Planted faults are answered: operator, module, line, cause, change; and the named operator is to blame."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ampkit import debugging
from ampkit.debugging.observe.operator_properties import properties_of
from tests.debugging import battery, battery_threads
from tests.debugging.planted import FAULTS, Fault, judged

ROWS = battery, battery_threads  # importing them plants their faults

pytestmark = pytest.mark.filterwarnings("ignore:std.*degrees of freedom")
# Faults with the answers that are missing or wrong.
MISSING: dict[str, set[str]] = {
    "gumbel_noise": {"cause"},  # the row of an inf that is masked, in place of that of the NaN
    "mask_of_large_numbers": {"change"},  # the mask is taken for data
    "a_moving_average_in_half": {"change"},  # no loss depends on it, so a run in float32 does not show it
    # Updates and sums of gradients without an optimizer, whose effect on the loss is too small:
    "update_by_hand": {"op", "line", "cause", "change"},
    "accumulation_in_bfloat16": {"op", "line", "cause", "change"},
    # Averages that are copied, not updated in place, in trainings of 12 steps:
    "moving_average_of_weights": {"op", "line", "cause", "change"},
    "decay_in_bfloat16": {"op", "line", "cause", "change"},
    "average_of_a_bfloat16_model": {"op", "line", "cause", "change"},
}
if not battery.NEWEST:  # before torch 2.15 it is aten::lift_fresh, which makes the number that is assigned
    MISSING |= {"an_infinity_assigned": {"op"}, "nan_where_a_mask_is_set": {"op"}}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault(fault: Fault) -> None:
    """Every answer that is asked for is right; a change that is called verified is the right change."""
    answers, report = judged(fault)
    assert {name for name, right in answers.items() if not right} == MISSING.get(fault.name, set()), str(report)
    assert answers["change"] or not any(each.fix.verified for each in report.ranked()[:1]), str(report)


def test_nine_in_ten_are_answered() -> None:
    assert set(MISSING) <= {fault.name for fault in FAULTS}
    assert len(MISSING) <= 0.1 * len(FAULTS)


class Intervene(TorchDispatchMode):
    """Runs a step with the result of one operator call replaced by its float64 result, as far as the dtype holds it.

    It shares only the count of operators with the tools.
    """

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.count = index, 0
        self.inputs_finite, self.output_finite = False, True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if properties_of(func).is_view:
            return func(*args, **kwargs)
        self.count += 1
        if self.count - 1 != self.index:
            return func(*args, **kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        self.inputs_finite = all(bool(tensor.isfinite().all()) for tensor in inputs)

        def widened(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.double() if value.is_floating_point() else value
            return torch.float64 if isinstance(value, torch.dtype) else value

        wide_args, wide_kwargs = tree_map(widened, (args, kwargs))
        exact = func(*wide_args, **wide_kwargs)
        result = func(*args, **kwargs)
        if func._schema.is_mutable:
            exact, changed = wide_args[0], args[0]
        else:
            changed = result
        for target, want in zip(tree_leaves(changed), tree_leaves(exact), strict=True):
            if isinstance(target, Tensor) and target.is_floating_point():
                self.output_finite &= bool(target.isfinite().all())
                limit = torch.finfo(target.dtype).max
                near = torch.nan_to_num(want, 0.0, limit, -limit).clamp(-limit, limit) / 1e3
                target.copy_(torch.where(want.abs() <= limit, want, near))
        return result


def broken(model: nn.Module, loss: Any) -> bool:
    """Whether the loss is broken, or a parameter or gradient."""
    if isinstance(loss, Tensor) and not bool(loss.isfinite().all()):
        return True
    tensors = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return not all(bool(tensor.isfinite().all()) for tensor in tensors)


NONFINITE = [fault for fault in FAULTS if fault.tool == "nonfinite" and fault.name not in MISSING]


@pytest.mark.parametrize("fault", NONFINITE, ids=lambda fault: fault.name)
def test_the_named_operator_is_to_blame(fault: Fault) -> None:
    """Its inputs were finite and its result was not; its float64 result in its place cures the step.

    The same done one operator earlier cures nothing.
    """
    model, step = fault.build()
    with debugging.Examination(model) as report:
        loss = step()
    finding = report.nonfinite[0]
    kind, index = finding.kind, finding.place.index
    if kind in ("constant", "arrived", "from inf") or finding.place.dtype == "complex64" or not broken(model, loss):
        return  # the operator is not to blame, nothing is left to see, or `Intervene` does not do complex numbers
    in_forward = isinstance(loss, Tensor) and not bool(loss.isfinite().all())
    for place, cured in ((index, True), (index - 1, False)):
        model, step = fault.build()
        with Intervene(place) as there:
            loss = step()
        # Where an operator has a pole, its derivative has one too: if the loss was broken, only the loss is judged.
        assert broken(nn.Identity() if in_forward else model, loss) is not cured, f"with operator {place} in float64"
        if cured:
            assert there.inputs_finite
            assert not there.output_finite
