"""Shared by the tests of `test_autocast` and its neighbours."""

import pytest
import torch

from ampkit import autocast
from tests.helpers.regions import FP32

REGIONS = [torch.autocast, autocast]

both = pytest.mark.parametrize("region", REGIONS, ids=["torch", "ampkit"])


def product(dtype: torch.dtype = FP32, device: str = "cpu") -> torch.dtype:
    a = torch.ones(2, 2, dtype=dtype, device=device)
    return torch.mm(a, a).dtype
