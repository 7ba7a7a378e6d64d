"""Every operation under a default device that is not the tensors', and of tensors without values."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from ampkit_kernels import adamw_, cast_, multiply_, nonfinite_counts, norm_and_check, sgd_, unscale_, unscale_into_

pytestmark = pytest.mark.usefixtures("interpreted")
zeros, tensor = partial(torch.zeros, device="cpu"), partial(torch.tensor, device="cpu")


def all_operations(impl: str) -> list[Tensor]:
    """Run each; what they return."""
    lists = [[zeros(3)] for _ in range(4)]
    scale, flag = tensor(2.0), zeros(())
    mixed = [zeros(5), zeros(3, dtype=torch.float16), zeros(4, dtype=torch.bfloat16), zeros(0), zeros(4, 4)[:, ::2]]
    scalars = {"found_inf": flag, "multiplier": scale, "grad_scale": scale}
    unscale_(mixed, scale, flag, impl=impl)
    multiply_(mixed, scale, flag, impl=impl)
    cast_(lists[0], [zeros(3, dtype=torch.float16)], impl=impl)
    for accumulate in (False, True):
        unscale_into_([zeros(3, dtype=torch.float16)], lists[0], scale, flag, accumulate=accumulate, impl=impl)
    adamw_(*lists, [], [zeros(())], lr=0.1, beta1=0.9, beta2=0.9, eps=1e-8, weight_decay=0.1, impl=impl, **scalars)
    sgd_(*lists[:3], lr=0.1, momentum=0.9, started=[zeros(())], impl=impl, **scalars)
    norms = [norm_and_check(mixed[:n], scale, flag, order, impl=impl) for order in (2.0, 3.0) for n in (0, 5)]
    return [*norms, nonfinite_counts(mixed, impl=impl), nonfinite_counts([], impl=impl)]


@pytest.mark.parametrize("impl", ["auto", "triton"])
def test_results_are_where_the_tensors_are(impl: str) -> None:
    with torch.device("meta"):
        assert [found.device.type for found in all_operations(impl)] == ["cpu"] * 6


def test_tensors_without_values() -> None:
    want = [found.shape for found in all_operations("auto")]
    with FakeTensorMode():
        assert [found.shape for found in all_operations("auto")] == want
