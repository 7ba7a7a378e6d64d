"""Recurrent layers on CUDA: the cast weights are moved into one buffer, in cuDNN's layout.

cuDNN reads the weights of an RNN from one buffer. Casting each weight separately scatters them; cuDNN then copies them
into a buffer at every call and warns. Here the casts are moved into one buffer once, right after they are made. Cached
casts stay there, so the copy happens once per optimizer step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampkit.torch_internals.tensors import flatten_rnn_weights

_aten = torch.ops.aten
# Operator -> cuDNN's mode number, as in torch.backends.cudnn.rnn.get_cudnn_mode.
LAYERS = {
    _aten.rnn_relu.input: 0,
    _aten.rnn_relu.data: 0,
    _aten.rnn_tanh.input: 1,
    _aten.rnn_tanh.data: 1,
    _aten.lstm.input: 2,
    _aten.lstm.data: 2,
    _aten.gru.input: 3,
    _aten.gru.data: 3,
}


def flatten_weights(op: Any, args: tuple[Any, ...]) -> None:
    """Move the weights of a layer's call, in place, into one buffer in cuDNN's layout.

    `args` are those of `aten::lstm.input` and similar operators, `(input, hx, params, has_biases, num_layers, dropout,
    train, bidirectional, batch_first)`, or of `aten::lstm.data` for packed sequences, which has `batch_sizes` after the
    input and no `batch_first`. Does nothing on other devices, without cuDNN, or if the weights are in one buffer
    already. Values do not change. Never synchronizes with the device.
    """
    if len(args) < 9:
        return
    if op._overloadname == "data":
        input, _, hidden, weights, has_biases, num_layers, _, _, bidirectional = args[:9]
        batch_first = False
    else:
        input, hidden, weights, has_biases, num_layers, _, _, bidirectional, batch_first = args[:9]
    if not weights or not weights[0].is_cuda or not _acceptable(weights) or _in_one_buffer(weights):
        return
    state = hidden if isinstance(hidden, Tensor) else hidden[-1]
    hidden_size = state.shape[-1]
    output_size = hidden_size if isinstance(hidden, Tensor) else hidden[0].shape[-1]
    projection = output_size if output_size != hidden_size else 0
    per_layer = (4 if has_biases else 2) + (1 if projection else 0)
    with torch.no_grad():
        flatten_rnn_weights(
            list(weights),
            per_layer,
            input.shape[-1],
            LAYERS[op],
            hidden_size,
            projection,
            num_layers,
            batch_first,
            bool(bidirectional),
        )


def _acceptable(weights: Any) -> bool:
    """Whether cuDNN accepts the weights, and they may be moved: they are casts, not the model's own weights."""
    first = weights[0]
    return (
        torch.backends.cudnn.is_acceptable(first)
        and all(type(w) is Tensor and w.dtype is first.dtype and not (w.is_leaf and w.requires_grad) for w in weights)
        and len({w.data_ptr() for w in weights}) == len(weights)
    )


def _in_one_buffer(weights: Any) -> bool:
    return len({w.untyped_storage().data_ptr() for w in weights}) == 1
