"""Dtypes and policies by name, as configuration files have them: the same as the objects, everywhere they are taken."""

import pickle

import pytest
import torch
from torch import nn

from ampkit import Policy, autocast, half, unwrap_forward, wrap_forward
from ampkit.amp import initialize


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("policy", ["torch", "default"])
def test_a_region_by_names_is_the_region_of_the_objects(dtype, policy):
    named = autocast("cpu", str(dtype).removeprefix("torch."), policy=policy)
    given = autocast("cpu", dtype, policy=getattr(Policy, policy)("cpu"))
    assert (named.fast_dtype, named.policy) == (given.fast_dtype, given.policy)
    assert repr(named) == repr(given)
    assert pickle.loads(pickle.dumps(named)).policy == given.policy
    x = torch.randn(4, 4)
    with named:
        results = torch.softmax(x @ x, 0), x @ x
    with given:
        expected = torch.softmax(x @ x, 0), x @ x
    for result, wanted in zip(results, expected, strict=True):
        assert result.dtype is wanted.dtype
        assert torch.equal(result, wanted)


def test_a_named_policy_is_one_object():
    """So that entering such a region again finds the mode that it had, as with an object that is kept."""
    first, second = autocast("cpu", policy="torch"), autocast("cpu", policy="torch")
    assert first.policy is second.policy


def test_names_are_understood_in_compiled_code():
    @torch.compile(fullgraph=True, backend="eager")
    def step(x):
        with autocast("cpu", "bfloat16", policy="torch"):
            return torch.softmax(x @ x, 0)

    assert step(torch.ones(2, 2)).dtype is torch.bfloat16


def test_wrapped_half_and_initialized_models_take_names():
    model = nn.Linear(2, 2)
    wrap_forward(model, "cpu", "bfloat16", policy="torch", cast_outputs="float16")
    assert model(torch.ones(1, 2)).dtype is torch.float16
    unwrap_forward(model)
    assert half(model, "bfloat16", cast_outputs="float32")(torch.ones(1, 2)).dtype is torch.float32
    converted = initialize(nn.Linear(2, 2), opt_level="O3", dtype="bfloat16", cast_model_outputs="float16", verbosity=0)
    assert converted.weight.dtype is torch.bfloat16
    assert converted(torch.ones(1, 2)).dtype is torch.float16
    by_region = initialize(nn.Sequential(nn.Softmax(-1)), opt_level="O1", dtype="bfloat16", policy="torch", verbosity=0)
    assert by_region(torch.ones(1, 2)).dtype is torch.float32


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: half(nn.Linear(1, 1), "fp8"), "dtype is 'fp8'; expected torch.float16, torch.bfloat16 or one's"),
        (lambda: half(nn.Linear(1, 1), cast_outputs="fp64"), "cast_outputs is 'fp64'; .* torch.float32, its name"),
        (lambda: initialize(nn.Linear(1, 1), opt_level="O2", dtype="half"), "dtype is 'half'; expected torch.float16"),
        (lambda: initialize(nn.Linear(1, 1), policy="apex"), "policy is 'apex'; expected a Policy for 'cpu'"),
        (lambda: wrap_forward(nn.Linear(1, 1), policy="apex"), "policy is 'apex'; expected a Policy for"),
        (lambda: wrap_forward(nn.Linear(1, 1), cast_outputs="half"), "cast_outputs is 'half'; expected a torch.dtype"),
    ],
)
def test_an_unknown_name_is_refused_with_what_is_known(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_refused_model_is_as_it_was():
    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="policy is 'apex'"):
        initialize(model, opt_level="O1", policy="apex", verbosity=0)
    assert type(model) is nn.Linear
