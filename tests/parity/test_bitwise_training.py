"""Training under `Policy.torch("cpu")` is training under `torch.autocast("cpu")`, bit for bit, step after step."""

import pytest
import torch

from ampkit import WeightCache
from tests.helpers.models import CASES
from tests.helpers.training import trains_as_torch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_twenty_steps_have_torchs_bits(name: str, dtype: torch.dtype) -> None:
    trains_as_torch(CASES[name].build, CASES[name].loss_of, dtype, steps=20, scaled=dtype is torch.float16)


@pytest.mark.parametrize("name", ["decoder", "convnet"])
def test_backward_inside_the_region_has_torchs_bits(name: str) -> None:
    trains_as_torch(CASES[name].build, CASES[name].loss_of, steps=20, backward_inside=True)


@pytest.mark.usefixtures("small_weights_are_kept")
def test_accumulation_with_a_lasting_cache_has_torchs_bits() -> None:
    """Casts kept over the micro-batches of a step equal those that torch makes again for each."""
    case, cache = CASES["decoder"], WeightCache()
    trains_as_torch(case.build, case.loss_of, cache=cache, steps=20, micro_batches=4)
    assert cache.info().hits > 2 * cache.info().misses
