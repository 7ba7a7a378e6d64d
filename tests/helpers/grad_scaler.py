"""Shared by the tests of `test_grad_scaler` and its neighbours."""

import pytest
import torch

from ampkit.scaler.grad_scaler import GradScaler

BOTH = pytest.mark.parametrize("cls", [GradScaler, torch.amp.GradScaler], ids=["ampkit", "torch"])


def one_parameter(value: float = 1.0, grad: float | None = None, **options):
    """A parameter, its SGD optimizer, and a gradient that is taken as already scaled."""
    param = torch.nn.Parameter(torch.tensor([value], **options))
    if grad is not None:
        param.grad = torch.tensor([grad], **options)
    return param, torch.optim.SGD([param], lr=1.0)


def started(cls=GradScaler, *arguments, **options):
    """A scaler whose scale is on the CPU already."""
    scaler = cls("cpu", *arguments, **options)
    scaler.scale(torch.ones((), requires_grad=True))
    return scaler
