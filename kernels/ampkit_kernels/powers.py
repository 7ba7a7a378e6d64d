"""Integer powers of a float64 base inside a kernel, for bias corrections."""

# Kernel code is Triton's language, which a Python type checker cannot follow.
# pyright: reportInvalidTypeForm=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false

import triton
import triton.language as tl


@triton.jit
def integer_power(base, exponent):
    """base ** exponent for int32 exponents from 0 to 2**25 - 1, by squaring: float64 products only.

    `1 - beta ** step` cancels almost all digits at the first steps, which float32 or a logarithm could not
    afford; and squaring needs no device library, so the interpreter runs the same arithmetic.
    """
    result = tl.full(exponent.shape, 1.0, tl.float64)
    square = result * base
    for _ in tl.static_range(25):
        result = tl.where((exponent & 1) == 1, result * square, result)
        square = square * square
        exponent = exponent >> 1
    return result
