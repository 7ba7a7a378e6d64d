"""The demo's fault: planted, skipped, named."""

import copy

import pytest
import torch

from ampkit.demo.fault import show_fault
from ampkit.demo.lanes import make_lanes
from ampkit.demo.tasks import TASKS

CPU = torch.device("cpu")


@pytest.mark.parametrize(("name", "dtype"), [("digits", torch.float16), ("gpt", torch.bfloat16)])
def test_the_step_is_skipped_and_the_place_is_named(name: str, dtype: torch.dtype) -> None:
    task = TASKS[name](CPU)
    lane = make_lanes(task, CPU, dtype, seed=0)[-1]
    before = copy.deepcopy(lane.model.state_dict())
    fault = show_fault(task, lane, seed=0)
    assert [(step.skipped, step.changed) for step in fault.steps] == [(False, True), (True, False), (False, True)]
    assert [step.scale for step in fault.steps] == [256.0, 128.0, 128.0]
    assert fault.first_bad == [fault.module]
    after = lane.model.state_dict().values()
    assert all(torch.equal(old, new) for old, new in zip(before.values(), after, strict=True))
    assert not any(module._forward_hooks for module in lane.model.modules())
    lines = list(fault.lines())
    assert lines[0] == f"a fault: in step 2 of 3 the gradient of {fault.module}'s output overflows"
    assert lines[2].endswith("skipped, no parameter changed")
    assert f"first bad: {fault.module}" in lines[5]
