"""Planted faults strike where and when they are told to, and nowhere else."""

import math

import pytest
import torch

from ampkit.testing import plant_nonfinite, spoil_grad


def backward(param: torch.nn.Parameter) -> torch.Tensor:
    param.grad = None
    (param * 2).sum().backward()
    return param.grad


@pytest.mark.parametrize(("kind", "check"), [("inf", math.inf), ("-inf", -math.inf), ("nan", math.nan)])
def test_a_fault_strikes_once_at_its_step(kind, check) -> None:
    param = torch.nn.Parameter(torch.ones(2, 2))
    fault = plant_nonfinite(param, 2, kind, index=3)
    assert backward(param).tolist() == [[2.0, 2.0], [2.0, 2.0]]
    assert not fault.planted
    spoiled = backward(param).flatten().tolist()
    assert spoiled[:3] == [2.0, 2.0, 2.0]
    assert spoiled[3] == check or (math.isnan(spoiled[3]) and math.isnan(check))
    assert fault.planted
    assert backward(param).isfinite().all()
    assert fault.backwards == 3


def test_a_fault_in_a_gradient_that_arrives_transposed() -> None:
    param = torch.nn.Parameter(torch.ones(2, 3))
    plant_nonfinite(param, index=1)
    (param.t() * torch.arange(6.0).view(3, 2)).sum().backward()
    assert param.grad.tolist() == [[0.0, math.inf, 4.0], [1.0, 3.0, 5.0]]


def test_a_fault_can_be_taken_back() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    with plant_nonfinite(param):
        pass
    assert backward(param).isfinite().all()


def test_spoiling_what_is_there() -> None:
    param = torch.nn.Parameter(torch.ones(2, 3))
    param.grad = torch.zeros(3, 2).t()
    spoil_grad(param, "nan", index=1)
    assert param.grad.isnan().nonzero().tolist() == [[0, 1]]
    table = torch.nn.Parameter(torch.ones(4))
    table.grad = torch.sparse_coo_tensor([[2]], torch.ones(1), (4,), check_invariants=True)
    spoil_grad(table)
    assert table.grad.to_dense().tolist() == [0.0, 0.0, math.inf, 0.0]


def test_mistakes_are_named() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="no gradient to spoil"):
        spoil_grad(param)
    with pytest.raises(ValueError, match="step is 0; expected 1"):
        plant_nonfinite(param, 0)
    with pytest.raises(ValueError, match=r"unknown kind 'big'; expected one of \('inf', '-inf', 'nan'\)"):
        plant_nonfinite(param, 1, "big")
    with pytest.raises(ValueError, match="does not require grad"):
        plant_nonfinite(torch.ones(1))
    backward(param)
    with pytest.raises(ValueError, match="index is 2; the gradient has 2 elements"):
        spoil_grad(param, index=2)
