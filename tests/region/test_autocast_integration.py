"""Regions beside operators that registered a dtype, data parallelism, and code that asks torch for its state."""

import pytest
import torch
from torch import nn

from ampkit import Policy, autocast, wrap_forward
from tests.helpers.regions import BF16, FP16, FP32, both

X = torch.ones(4, 4)


@pytest.fixture(scope="module")
def registered():
    """An operator that told torch which dtype it wants under autocast on the CPU."""
    @torch.library.custom_op("ampkit_tests::registered", mutates_args=())
    def registered(x: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:
        return x * 2

    registered.register_autocast("cpu", FP16)
    return registered


@both
def test_operator_that_registered_a_dtype(region, registered):
    """It casts to the dtype it registered, whatever the region's is."""
    assert registered(X, [X]).dtype is FP32
    for dtype in (BF16, FP16):
        with region("cpu", dtype):
            assert registered(X, [X]).dtype is FP16
            assert registered(X.double(), [X]).dtype is torch.float64
    with region("cpu", enabled=False):
        assert registered(X, [X]).dtype is FP32
    with region("cuda:0"):
        assert registered(X, [X]).dtype is FP32
    with pytest.raises(ValueError, match=r"does not support autocast|Unknown device type"):
        registered.register_autocast("meta", FP16)


def test_rule_goes_over_a_registered_dtype(registered):
    policy = Policy.default("cpu").with_rules({"ampkit_tests::registered": "lower"})
    with autocast("cpu", BF16, policy=policy):
        assert registered(X, [X]).dtype is BF16


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_data_parallel_replicas():
    """torch.amp hands its replicas the flag and not the dtype; a wrapped module has both."""
    model, x = nn.Linear(4, 4).cuda(), torch.ones(4, 4, device="cuda")
    with torch.autocast("cuda", BF16):
        assert nn.DataParallel(model)(x).dtype is FP16
    wrap_forward(model, "cuda", BF16)
    assert nn.DataParallel(model)(x).dtype is BF16


def test_libraries_that_ask_torch_see_our_region():
    """What third-party code reads: flags, dtypes, and torch's own helpers built on them."""
    with autocast("cpu", FP16):
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is FP16
        assert torch._C._is_any_autocast_enabled()
        kept = torch.utils.checkpoint._get_autocast_kwargs("cpu")[1]
        assert (kept["enabled"], kept["dtype"]) == (True, FP16)
    assert not torch._C._is_any_autocast_enabled()
