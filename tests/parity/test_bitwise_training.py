"""Training under `Policy.torch("cpu")` is training under `torch.autocast("cpu")`, bit for bit, step after step."""

import functools

import pytest
import torch

from ampkit import autocast
from tests.helpers.models import CASES
from tests.helpers.training import trains_as_torch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_twenty_steps_have_torchs_bits(name: str, dtype: torch.dtype) -> None:
    trains_as_torch(CASES[name].build, CASES[name].loss_of, dtype, steps=20, scaled=dtype is torch.float16)


@pytest.mark.parametrize("name", ["decoder", "convnet"])
def test_backward_inside_the_region_has_torchs_bits(name: str) -> None:
    trains_as_torch(CASES[name].build, CASES[name].loss_of, steps=20, backward_inside=True)


def test_accumulation_inside_an_outer_region_has_torchs_bits() -> None:
    """Which keeps the casts over the micro-batches of a step; torch makes them again for each."""
    case = CASES["decoder"]
    outer = functools.partial(autocast, "cpu", enabled=False)
    trains_as_torch(case.build, case.loss_of, around=outer, steps=20, micro_batches=4)
