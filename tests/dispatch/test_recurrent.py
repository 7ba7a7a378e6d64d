"""Recurrent layers in a region: dtypes, gradients, packed sequences, and the layout that cuDNN asks for."""

import contextlib
import functools

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from ampkit import Policy, autocast
from ampkit.dispatch import recurrent
from tests.helpers.regions import BF16, FP16, FP32

CUDNN_MODES = {"RNN_RELU": 0, "RNN_TANH": 1, "LSTM": 2, "GRU": 3}
LAYERS = nn.LSTM, nn.GRU, nn.RNN, functools.partial(nn.RNN, nonlinearity="relu")
layers = pytest.mark.parametrize("make", LAYERS, ids=["LSTM", "GRU", "RNN", "RNN relu"])


def first(result):
    """The output of a layer or cell, without its state; of a packed sequence, the data."""
    result = result[0] if isinstance(result, tuple) else result
    return result.data if hasattr(result, "batch_sizes") else result


X = torch.randn(5, 2, 4, generator=torch.Generator().manual_seed(0))
PACKED = pack_padded_sequence(X, torch.tensor([5, 3]))


@pytest.mark.parametrize(
    ("layer", "args"),
    [
        (nn.LSTM(4, 3), (X, (torch.zeros(1, 2, 3), torch.zeros(1, 2, 3)))),
        (nn.LSTM(4, 3), (PACKED,)),
        (nn.GRU(4, 3, num_layers=2, bidirectional=True), (PACKED,)),
    ],
    ids=["with a state", "packed", "packed GRU"],
)
def test_states_and_packed_sequences(layer, args):
    """Plain calls are in `test_recurrent_layers` of `test_casting`; gradients are close to float32's."""
    results = []
    for region in (autocast("cpu"), contextlib.nullcontext()):
        with region:
            out = first(layer(*args))
        results.append([out, *torch.autograd.grad(out.float().sum(), list(layer.parameters()))])
    assert results[0][0].dtype is BF16
    for low, exact in zip(*results, strict=True):
        torch.testing.assert_close(low.float(), exact, rtol=0.1, atol=0.1)


def test_dtypes_that_torch_refuses_outside_a_region_run_inside():
    """torch's own check of the input dtype steps aside in a region, as it does in torch.amp's."""
    for layer, x in ((nn.GRU(4, 3), X.bfloat16()), (nn.LSTM(4, 3).to(BF16), X), (nn.LSTM(4, 3).half(), X)):
        with pytest.raises((ValueError, RuntimeError), match=r"(?i)dtype"):
            layer(x)
        with autocast("cpu"):
            assert first(layer(x)).dtype is BF16


# The layout for cuDNN, on a machine without it


@layers
@pytest.mark.parametrize("packed", [False, True], ids=["input", "packed"])
@pytest.mark.parametrize("options", [{"num_layers": 2, "bidirectional": True}, {"bias": False, "batch_first": True}])
def test_layout_is_asked_for_as_the_module_asks(monkeypatch, make, packed, options):
    """If the weights were casts on CUDA."""

    class OnCuda(torch.Tensor):
        is_cuda = True

    calls, layer = [], make(4, 3, **options)
    monkeypatch.setattr(recurrent, "flatten_rnn_weights", lambda *args: calls.append(args))
    monkeypatch.setattr(recurrent, "_acceptable", lambda weights: True)
    monkeypatch.setattr(recurrent, "_in_one_buffer", lambda weights: False)
    state = torch.zeros(layer.num_layers * (2 if layer.bidirectional else 1), 2, 3)
    weights = [w.detach().as_subclass(OnCuda) for w in layer._flat_weights]
    call = [torch.zeros(5, 2, 4), [state, state] if make is nn.LSTM else state, weights, layer.bias, layer.num_layers]
    call += [0.0, False, layer.bidirectional]
    packet = getattr(torch.ops.aten, layer.mode.lower())
    if packed:
        recurrent.flatten_weights(packet.data, (call[0], torch.tensor([2]), *call[1:]))
    else:
        recurrent.flatten_weights(packet.input, (*call, layer.batch_first))
    (got,) = calls
    assert got[0] == weights
    assert got[1:] == (
        4 if layer.bias else 2,
        4,
        CUDNN_MODES[layer.mode],
        3,
        0,
        layer.num_layers,
        layer.batch_first and not packed,
        layer.bidirectional,
    )


def test_a_wrong_dtype_in_a_disabled_region_is_refused():
    """By torch's own check, or by its kernel where a tag is set: the check passes if autocast is on for any device."""
    layer, x = nn.LSTM(4, 3), torch.randn(5, 2, 4, dtype=FP16)
    tagged = autocast("cpu", policy=Policy.torch("cpu").with_rules({"gelu": "keep"}))
    for outer, region, error, message in (
        (autocast("cpu"), autocast, ValueError, r"RNN input dtype .* does not match"),
        (autocast("cpu", policy="torch"), torch.autocast, ValueError, r"RNN input dtype .* does not match"),
        (tagged, autocast, RuntimeError, "must have the same dtype, but got Half and Float"),
        (tagged, torch.autocast, RuntimeError, "must have the same dtype, but got Half and Float"),
    ):
        with outer, region("cpu", enabled=False), pytest.raises(error, match=message):
            layer(x)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@layers
@pytest.mark.parametrize("packed", [False, True], ids=["input", "packed"])
def test_cudnn_neither_warns_nor_changes_values(make, packed, dtype):
    """Warnings are errors here: cuDNN warns where weights are not in one buffer."""
    layer, x = make(4, 3, num_layers=2).cuda(), torch.randn(5, 2, 4, device="cuda")
    x = pack_padded_sequence(x, torch.tensor([5, 3])) if packed else x
    for _ in range(3):
        with autocast("cuda", dtype):
            out = first(layer(x))
        assert out.dtype is dtype
        torch.testing.assert_close(out.float(), first(layer(x)), rtol=0.03, atol=0.03)
        out.float().sum().backward()
    assert {p.grad.dtype for p in layer.parameters()} == {FP32}


@pytest.mark.gpu
def test_modes_are_those_of_cudnn():
    from torch.backends.cudnn.rnn import get_cudnn_mode

    assert {mode: get_cudnn_mode(mode) for mode in CUDNN_MODES} == CUDNN_MODES
