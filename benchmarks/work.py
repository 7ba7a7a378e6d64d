"""Byte and FLOP models: the least that any implementation of a job must move and compute.

Counted, not measured. They turn a time into a position under the machine's roof: no implementation can be faster than
the larger of FLOPs over the peak rate and bytes over the memory rate. A multiply-add counts as two FLOPs; element-wise
arithmetic is not counted. `tests/benchmarks/test_work_models.py` holds the FLOP models against torch's own counter.
"""

from __future__ import annotations

from dataclasses import dataclass

ADAMW_BYTES = 28        # per fp32 parameter: read weight, gradient and two moments, write weight and moments


@dataclass(frozen=True)
class Work:
    """The least work of one call of a job, and where the count comes from."""

    flops: float
    bytes: float
    model: str


def linear(rows: int, inputs: int, outputs: int) -> int:
    """FLOPs of a matrix product (rows, inputs) @ (inputs, outputs)."""
    return 2 * rows * inputs * outputs


def attention(batch: int, length: int, width: int) -> int:
    """FLOPs of softmax(q k^T) v over all heads together; what a causal mask saves is not subtracted."""
    return 4 * batch * length * length * width


def convolution(batch: int, side: int, inputs: int, outputs: int, kernel: int) -> int:
    """FLOPs of a convolution with square kernels and `side` x `side` outputs."""
    return 2 * batch * side * side * inputs * outputs * kernel * kernel


def training(forward: int, first: int = 0) -> int:
    """FLOPs of forward and backward: twice the forward again, less the gradient of an input that needs none.

    `first` is the forward of the layer that gets the raw input (0 where that is an embedding).
    """
    return 3 * forward - first


def transformer_blocks(batch: int, length: int, width: int, blocks: int) -> int:
    """Forward of blocks with q, k, v, output and a perceptron of four times the width: 12 width^2 weights each."""
    rows = batch * length
    return blocks * (linear(rows, width, 12 * width) + attention(batch, length, width))


def decoder(batch: int, length: int, width: int, blocks: int, tokens: int) -> int:
    """Training FLOPs of a GPT-like model."""
    return training(transformer_blocks(batch, length, width, blocks) + linear(batch * length, width, tokens))


def resnet(batch: int, size: int, width: int, depths: tuple[int, ...], classes: int) -> int:
    """Training FLOPs of a bottleneck ResNet over square images of three channels."""
    side = size // 2
    stem = convolution(batch, side, 3, width, 7)
    side, inputs, total = side // 2, width, stem
    for stage, depth in enumerate(depths):
        inner, outputs = width * 2**stage, 4 * width * 2**stage
        for block in range(depth):
            reduced = side if stage == 0 or block > 0 else side // 2
            total += convolution(batch, side, inputs, inner, 1)
            total += convolution(batch, reduced, inner, inner, 3)
            total += convolution(batch, reduced, inner, outputs, 1)
            if inputs != outputs or reduced != side:
                total += convolution(batch, reduced, inputs, outputs, 1)
            side, inputs = reduced, outputs
    return training(total + linear(batch, inputs, classes), first=stem)


def digits(batch: int, width: int = 16) -> int:
    """Training FLOPs of the demo's CNN: two 3x3 convolutions over 8 x 8 and 4 x 4 outputs, and a linear head."""
    first = convolution(batch, 8, 1, width, 3)
    second = convolution(batch, 4, width, 2 * width, 3)
    return training(first + second + linear(batch, 2 * width * 16, 10), first=first)


def recurrent(batch: int, length: int, width: int, layers: int, tokens: int) -> int:
    """Training FLOPs of an LSTM language model: eight products of width x width per layer and token, and the head.

    The first hidden state of each layer is zero and gets no gradient.
    """
    rows = batch * length
    first = layers * linear(batch, width, 4 * width)
    return training(layers * linear(rows, width, 8 * width) + linear(rows, width, tokens), first=first)


def training_bytes(parameters: int, micro_batches: int = 1) -> int:
    """Least bytes of a step with fp32 weights and AdamW; activations are not counted.

    Each micro-batch reads the weights and writes gradients, all but the first also read the gradients so far; then
    the optimizer passes once.
    """
    return parameters * (ADAMW_BYTES + 8 * micro_batches + 4 * (micro_batches - 1))


def region_casts(parameters: int, element_bytes: int = 2) -> int:
    """Bytes of casting fp32 weights once: each is read and its copy written."""
    return parameters * (4 + element_bytes)
