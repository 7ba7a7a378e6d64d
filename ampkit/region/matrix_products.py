"""Which matrix products an operator is: their sizes and floating-point operations, from the shapes it is called with.

Operators as regions meet them, before they are decomposed (`linear`), and as kernels do (`addmm`). FLOPs are counted
as `torch.utils.flop_counter` counts what they are decomposed into: two for a multiplication, none for anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["MatrixProduct", "factors", "matrix_products", "shape_of"]

Shape = tuple[int, ...]


class MatrixProduct(NamedTuple):
    """One product, or a batch of them, by the names of its dimensions; of convolutions the channels of a group."""

    sizes: tuple[tuple[str, int], ...]
    flops: int

    def odd(self, multiple: int) -> dict[str, int]:
        """The dimensions that are no multiple of it; none of a product with a vector, which no padding helps."""
        if any(size == 1 for _, size in self.sizes):
            return {}
        return {name: size for name, size in self.sizes if size % multiple}


def matrix_products(op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[MatrixProduct, ...]:
    """The products in a call of an operator ("aten::linear"); none where it is no product, or one not known here."""
    find = _how(op)
    if find is None:
        return ()
    try:
        return tuple(find(*args, **kwargs))
    except (TypeError, ValueError, IndexError, AttributeError):     # the call is refused when it is made: not here
        return ()


def factors(op: str, args: Sequence[Any]) -> Sequence[Any]:
    """The two arguments that an operator multiplies, of those that are products of two; without what it adds."""
    first = int(_how(op) in (_added, _summed))
    return args[first:first + 2]


def _how(op: str) -> Callable[..., list[MatrixProduct]] | None:
    name = op.removeprefix("aten::")
    return _PRODUCTS.get(name) or _PRODUCTS.get(name.partition(".")[0])


def shape_of(tensor: Tensor) -> Shape:
    """A tensor's shape in numbers; of a symbolic size its example, as asking for its value would fix it."""
    sizes: tuple[Any, ...] = tuple(tensor.shape)
    return tuple(size if type(size) is int else size.node.hint or 0 for size in sizes)


def _product(rows: int, inner: int, columns: int, batch: int = 1) -> MatrixProduct:
    return MatrixProduct((("rows", rows), ("inner", inner), ("columns", columns)), 2 * batch * rows * inner * columns)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> list[MatrixProduct]:
    shape, out = shape_of(x), shape_of(weight)
    return [_product(prod(shape[:-1]), shape[-1], out[0] if len(out) == 2 else 1)]


def _matmul(a: Tensor, b: Tensor) -> list[MatrixProduct]:
    left, right = shape_of(a), shape_of(b)
    inner, columns = prod(left[-1:]), right[-1] if len(right) > 1 else 1
    if len(right) <= 2:     # one matrix: the batch is rows
        return [_product(prod(left[:-1]), inner, columns)]
    return [_product(prod(left[-2:-1]), inner, columns, _broadcast(left[:-2], right[:-2]))]


def _broadcast(a: Shape, b: Shape) -> int:
    longest = max(len(a), len(b))
    a, b = (1,) * (longest - len(a)) + a, (1,) * (longest - len(b)) + b
    return prod(one if other == 1 else other for one, other in zip(a, b, strict=True))


def _added(added: Tensor, a: Tensor, b: Tensor, **scales: Any) -> list[MatrixProduct]:
    return _matmul(a, b)


def _summed(added: Tensor, a: Tensor, b: Tensor, **scales: Any) -> list[MatrixProduct]:
    batch, rows, inner = shape_of(a)
    return [_product(rows, batch * inner, shape_of(b)[-1])]


def _inner(a: Tensor, b: Tensor) -> list[MatrixProduct]:
    left, right = shape_of(a), shape_of(b)
    return [_product(prod(left[:-1]), left[-1], prod(right[:-1]))]


def _tensordot(a: Tensor, b: Tensor, dims_a: Sequence[int], dims_b: Sequence[int]) -> list[MatrixProduct]:
    left, right = shape_of(a), shape_of(b)
    inner = prod(left[dim] for dim in dims_a)
    return [_product(prod(left) // inner, inner, prod(right) // inner)]


def _einsum(equation: str, operands: Sequence[Tensor], **options: Any) -> list[MatrixProduct]:
    """Of two operands; in which order more of them are taken is not known here, and an ellipsis is not looked into."""
    if len(operands) != 2 or "." in equation:
        return []
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    a, b = inputs.split(",")
    if not arrow:
        output = "".join(letter for letter in {*a, *b} if (a + b).count(letter) == 1)
    sizes = dict(zip(a + b, shape_of(operands[0]) + shape_of(operands[1]), strict=True))

    def size(letters: set[str]) -> int:
        return prod(sizes[letter] for letter in letters)

    left, right, kept = {*a}, {*b}, {*output}       # an index of one operand alone that is not kept is summed before
    both = left & right
    return [_product(size((left - right) & kept), size(both - kept), size((right - left) & kept), size(both & kept))]


def _convolution(
    x: Tensor, weight: Tensor, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> list[MatrixProduct]:
    """`weight` is `[out, in / groups, *kernel]`."""
    shape, (out, inner, *kernel) = shape_of(x), shape_of(weight)
    stride, dilation = _each(stride, kernel), _each(dilation, kernel)
    if padding == "valid":
        padding = 0
    if padding == "same":
        places = [-(-size // step) for size, step in zip(shape[-len(kernel):], stride, strict=True)]
    else:
        places = [
            (size + 2 * pad - apart * (width - 1) - 1) // step + 1
            for size, width, step, pad, apart in zip(
                shape[-len(kernel):], kernel, stride, _each(padding, kernel), dilation, strict=True
            )
        ]
    batch = shape[0] if len(shape) > len(kernel) + 1 else 1
    flops = 2 * batch * prod(places) * prod(kernel) * inner * out
    return [MatrixProduct((("in", inner), ("out", out // groups)), flops)]


def _transposed(
    x: Tensor, weight: Tensor, bias: Any = None, stride: Any = 1, padding: Any = 0, output_padding: Any = 0,
    groups: int = 1, dilation: Any = 1,
) -> list[MatrixProduct]:
    """`weight` is `[in, out / groups, *kernel]`."""
    shape, (inner, out, *kernel) = shape_of(x), shape_of(weight)
    batch = shape[0] if len(shape) > len(kernel) + 1 else 1
    flops = 2 * batch * prod(shape[-len(kernel):]) * prod(kernel) * inner * out
    return [MatrixProduct((("in", inner // groups), ("out", out)), flops)]


def _any_convolution(
    x: Tensor, weight: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int, *flags: Any,
) -> list[MatrixProduct]:
    if transposed:
        return _transposed(x, weight, bias, stride, padding, output_padding, groups, dilation)
    return _convolution(x, weight, bias, stride, padding, dilation, groups)


def _each(value: Any, kernel: Sequence[int]) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * len(kernel) if len(values) == 1 else values


def _attention(q: Tensor, k: Tensor, v: Tensor, *options: Any, **more: Any) -> list[MatrixProduct]:
    (*batch, queries, width), keys, values = shape_of(q), shape_of(k)[-2], shape_of(v)[-1]
    flops = 2 * prod(batch) * queries * keys * (width + values)
    return [MatrixProduct((("keys", keys), ("width", width), ("values", values)), flops)]


def _layer(x: Tensor, first: Any, second: Any, *options: Any) -> list[MatrixProduct]:
    """A recurrent layer, padded (`x, state, weights`) or packed (`x, batch_sizes, state, weights`)."""
    shape = shape_of(x)
    weights = second if isinstance(second, list | tuple) else options[0]
    rows = prod(shape[:-1])
    return [_product(rows, *shape_of(weight)[::-1]) for weight in weights if weight.dim() == 2]


def _cell(x: Tensor, state: Any, *weights: Any) -> list[MatrixProduct]:
    rows = prod(shape_of(x)[:-1])
    return [_product(rows, *shape_of(weight)[::-1]) for weight in weights if weight is not None and weight.dim() == 2]


_PRODUCTS: dict[str, Callable[..., list[MatrixProduct]]] = {
    "linear": _linear,
    **dict.fromkeys(("mm", "bmm", "matmul", "linalg_matmul", "mv"), _matmul),
    **dict.fromkeys(("addmm", "addmv", "baddbmm", "_addmm_activation"), _added),
    "addbmm": _summed,
    "inner": _inner,
    "tensordot": _tensordot,
    "einsum": _einsum,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _convolution),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _transposed),
    **dict.fromkeys(("convolution", "_convolution"), _any_convolution),
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _layer),
    **dict.fromkeys(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), _cell),
}
