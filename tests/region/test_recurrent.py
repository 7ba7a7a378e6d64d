"""Recurrent layers in a region: dtypes, gradients, packed sequences, and the layout that cuDNN asks for."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from ampkit import Policy, WeightCache, autocast
from ampkit.region import recurrent
from tests.helpers.regions import BF16, FP16, FP32

LAYERS = {
    "LSTM": lambda **k: nn.LSTM(4, 3, **k),
    "GRU": lambda **k: nn.GRU(4, 3, **k),
    "RNN": lambda **k: nn.RNN(4, 3, **k),
    "RNN relu": lambda **k: nn.RNN(4, 3, nonlinearity="relu", **k),
}
CUDNN_MODES = {"RNN_RELU": 0, "RNN_TANH": 1, "LSTM": 2, "GRU": 3}
layers = pytest.mark.parametrize("name", LAYERS)
options_of_layers = pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False, "batch_first": True}],
    ids=["plain", "stacked", "no bias"],
)


def first(result):
    """The output of a layer or cell, whatever it comes with."""
    result = result[0] if isinstance(result, tuple) else result
    return result.data if hasattr(result, "batch_sizes") else result


X = torch.randn(5, 2, 4, generator=torch.Generator().manual_seed(0))
CALLS = {
    "stacked": (lambda: nn.LSTM(4, 3, num_layers=2, bidirectional=True), X),
    "no bias": (lambda: nn.GRU(4, 3, bias=False, batch_first=True), X),
    "RNN": (lambda: nn.RNN(4, 3, nonlinearity="relu"), X),
    "with a state": (lambda: nn.LSTM(4, 3), X, (torch.zeros(1, 2, 3), torch.zeros(1, 2, 3))),
    "packed": (lambda: nn.LSTM(4, 3), pack_padded_sequence(X, torch.tensor([5, 3]))),
    "packed GRU": (lambda: nn.GRU(4, 3), pack_padded_sequence(X, torch.tensor([5, 3]))),
    **{cell.__name__: (lambda cell=cell: cell(4, 3), X[0]) for cell in (nn.LSTMCell, nn.GRUCell, nn.RNNCell)},
}


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", CALLS)
def test_layers_and_cells_run_in_the_dtype_of_the_region(name, dtype):
    make, *args = CALLS[name]
    layer, results = make(), []
    for region in (autocast("cpu", dtype), contextlib.nullcontext()):
        with region:
            out = first(layer(*args))
        out.float().sum().backward()
        results.append([out, *(p.grad for p in layer.parameters())])
        layer.zero_grad()
    (low, *grads), (exact, *exact_grads) = results
    assert low.dtype is dtype
    assert torch.allclose(low.float(), exact, atol=0.03)
    for grad, wanted in zip(grads, exact_grads, strict=True):
        assert grad.dtype is FP32
        assert torch.allclose(grad, wanted, rtol=0.1, atol=0.1)


def test_dtypes_that_torch_refuses_outside_a_region_run_inside():
    """torch's own check of the input dtype steps aside in a region, as it does in torch.amp's."""
    for layer, x in ((nn.GRU(4, 3), X.bfloat16()), (nn.LSTM(4, 3).to(BF16), X), (nn.LSTM(4, 3).half(), X)):
        with pytest.raises((ValueError, RuntimeError), match=r"(?i)dtype"):
            layer(x)
        with autocast("cpu"):
            assert first(layer(x)).dtype is BF16


# The layout for cuDNN, on a machine without it


def calls_of_flatten(monkeypatch, layer, x, hidden, packed):
    """What `flatten_weights` asks of cuDNN for a layer's call, if the weights were casts on CUDA."""
    calls = []

    class OnCuda(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(torch, "_cudnn_rnn_flatten_weight", lambda *args: calls.append(args))
    monkeypatch.setattr(recurrent, "_acceptable", lambda weights: True)
    monkeypatch.setattr(recurrent, "_in_one_buffer", lambda weights: False)
    weights = [w.detach().as_subclass(OnCuda) for w in layer._flat_weights]
    packet = getattr(torch.ops.aten, layer.mode.lower())
    common = (weights, layer.bias, layer.num_layers, 0.0, False, layer.bidirectional)
    if packed:
        recurrent.flatten_weights(packet.data, (x, torch.tensor([2]), hidden, *common))
    else:
        recurrent.flatten_weights(packet.input, (x, hidden, *common, layer.batch_first))
    return calls, weights


@layers
@pytest.mark.parametrize("packed", [False, True], ids=["input", "packed"])
@options_of_layers
def test_layout_is_asked_for_as_the_module_asks(monkeypatch, name, packed, options):
    layer = LAYERS[name](**options)
    directions = 2 if layer.bidirectional else 1
    state = torch.zeros(layer.num_layers * directions, 2, 3)
    hidden = [state, state] if name == "LSTM" else state
    calls, weights = calls_of_flatten(monkeypatch, layer, torch.zeros(5, 2, 4), hidden, packed)
    (got,) = calls
    assert got[0] == weights
    assert got[1:] == (
        4 if layer.bias else 2, 4, CUDNN_MODES[layer.mode], 3, 0, layer.num_layers,
        layer.batch_first and not packed, layer.bidirectional,
    )


def test_a_wrong_dtype_in_an_island_is_refused():
    """torch's own check asks whether autocast is on anywhere; in torch's disabled regions a policy's mark answers."""
    layer, x = nn.LSTM(4, 3), torch.randn(5, 2, 4, dtype=FP16)
    marked = autocast("cpu", policy=Policy.torch("cpu").with_rules({"gelu": "keep"}))
    with marked, autocast("cpu", enabled=False), pytest.raises(ValueError, match=r"RNN input dtype .* does not match"):
        layer(x)
    with autocast("cpu", policy=Policy.torch("cpu")), torch.autocast("cpu", enabled=False):
        with pytest.raises(ValueError, match=r"RNN input dtype .* does not match"):
            layer(x)
    with marked, torch.autocast("cpu", enabled=False):
        with pytest.raises(RuntimeError, match="must have the same dtype, but got Half and Float"):
            layer(x)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@layers
@pytest.mark.parametrize("packed", [False, True], ids=["input", "packed"])
def test_cudnn_neither_warns_nor_changes_values(name, packed, dtype):
    """Warnings are errors here: cuDNN warns where weights are not in one buffer."""
    layer, x = LAYERS[name](num_layers=2).cuda(), torch.randn(5, 2, 4, device="cuda")
    x = pack_padded_sequence(x, torch.tensor([5, 3])) if packed else x
    cache = WeightCache()
    for _ in range(3):
        with autocast("cuda", dtype, cache=cache):
            out = first(layer(x))
        assert out.dtype is dtype
        torch.testing.assert_close(out.float(), first(layer(x)), rtol=0.03, atol=0.03)
        out.float().sum().backward()
    assert cache.info().misses == 8
    assert all(p.grad.dtype is FP32 for p in layer.parameters())


@pytest.mark.gpu
def test_modes_are_those_of_cudnn():
    from torch.backends.cudnn.rnn import get_cudnn_mode

    assert {mode: get_cudnn_mode(mode) for mode in CUDNN_MODES} == CUDNN_MODES
