"""`wrap_forward` and `unwrap_forward`: regions around the forward of modules that one cannot edit."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from ampkit import Policy, autocast, unwrap_forward, wrap_forward
from tests.helpers.regions import BF16, FP16, FP32, product

X = torch.ones(2, 4)


def test_forward_runs_inside_and_its_caller_outside():
    model = nn.Linear(4, 4)
    assert wrap_forward(model, "cpu", FP16) is model
    assert model(X).dtype is model(input=X).dtype is model.forward(X).dtype is FP16
    assert product() is FP32


def test_a_wrapped_module_keeps_class_name_state_and_docs():
    plain, model = nn.Linear(4, 4), wrap_forward(nn.Linear(4, 4), "cpu")
    assert isinstance(model, nn.Linear)
    assert type(model).__name__ == "Linear"
    assert repr(model) == repr(plain)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert model.forward.__doc__ == plain.forward.__doc__ is not None
    model.load_state_dict(plain.state_dict())
    assert model.to(torch.float64).weight.dtype is torch.float64
    assert type(plain) is nn.Linear
    assert plain(X).dtype is FP32


def test_copies_and_pickles_are_wrapped():
    model = wrap_forward(nn.Linear(4, 4), "cpu", FP16, policy=Policy.torch("cpu"))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    others = [
        copy.deepcopy(model),
        copy.copy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
        copy.deepcopy(nn.Sequential(model)),
    ]
    for other in others:
        assert other(X).dtype is FP16
        assert torch.equal(other(X), model(X))
    with pytest.raises(RuntimeError, match="this Linear is wrapped already; a second region would only repeat"):
        wrap_forward(others[0], "cpu")


def test_lazy_module_stays_wrapped_when_it_has_its_weights():
    model = wrap_forward(nn.LazyLinear(3), "cpu")
    assert [model(X).dtype for _ in range(3)] == [BF16] * 3
    assert isinstance(model, nn.Linear)
    assert not isinstance(model, nn.LazyLinear)
    assert copy.deepcopy(model)(X).dtype is BF16
    assert pickle.loads(pickle.dumps(model))(X).dtype is BF16


def test_a_forward_of_the_module_itself_is_refused():
    model = nn.Linear(4, 4)
    model.forward = lambda x: x
    with pytest.raises(RuntimeError, match=r"given a forward of its own.*module.forward = autocast"):
        wrap_forward(model, "cpu")
    model.forward = autocast("cpu")(nn.Linear(4, 4).forward)
    assert model(X).dtype is BF16


def test_outputs_are_cast_in_any_container():
    class Several(nn.Module):
        def forward(self, x):
            y = x @ x.t()
            return {"y": y, "more": [y, (x.long(),)]}

    model = wrap_forward(Several(), "cpu", FP16, cast_outputs=FP32)
    out = model(X)
    assert out["y"].dtype is out["more"][0].dtype is FP32
    assert out["more"][1][0].dtype is torch.int64
    assert copy.deepcopy(model)(X)["y"].dtype is FP32
    assert unwrap_forward(model) is model
    assert type(model) is Several
    assert model(X)["y"].dtype is FP32
    wrap_forward(model, "cpu", FP16)
    assert model(X)["y"].dtype is FP16


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda model: wrap_forward(lambda x: x, "cpu"), TypeError, "wrap_forward takes an nn.Module, got function"),
        (lambda model: wrap_forward(model, "meta"), RuntimeError, "has no autocast"),
        (lambda model: wrap_forward(model, "cpu", policy=1), TypeError, "policy"),
        (
            lambda model: wrap_forward(model, "cpu", cast_outputs=32),
            TypeError,
            "cast_outputs is 32; expected a torch.dt",
        ),
        (lambda model: wrap_forward(model, "cpu", dtyp=FP16), TypeError, "unexpected keyword argument 'dtyp'"),
        (lambda model: unwrap_forward(1), TypeError, "unwrap_forward takes an nn.Module, got int"),
        (lambda model: unwrap_forward(model), RuntimeError, "this Linear is not under wrap_forward"),
    ],
)
def test_what_is_refused_changes_nothing(call, error, message):
    model = nn.Linear(4, 4)
    with pytest.raises(error, match=message):
        call(model)
    assert type(model) is nn.Linear
