"""FP8 recipes as data: for each FP8 rule, how the operands of a linear layer's three products become FP8.

Every product is A[m, k] @ B[n, k].T, with scales along k. With an input x[M, K], a weight w[N, K], a gradient g[M, N]:

    output         x       with  w
    gradient of x  g       with  w.T
    gradient of w  g.T     with  x.T
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ampkit.policy.rules import Rule
from ampkit_kernels import Scaling

MULTIPLE = 16  # of K and N, for FP8 tensor cores
DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})  # dtypes of operands


class Recipe(NamedTuple):
    """The scalings of the operands; None for both operands of a product in the region's dtype."""

    x: Scaling
    w: Scaling
    g: Scaling
    w_t: Scaling
    g_t: Scaling | None
    x_t: Scaling | None


_TENSOR = Scaling(rowwise=False, dtype=torch.float8_e4m3fn, power_of_2=False)
_GRADIENT = _TENSOR._replace(dtype=torch.float8_e5m2)
_ROW = Scaling(rowwise=True, dtype=torch.float8_e4m3fn, power_of_2=True)

RECIPES: dict[Rule, Recipe] = {
    Rule.FLOAT8_TENSORWISE: Recipe(_TENSOR, _TENSOR, _GRADIENT, _TENSOR, _GRADIENT, _TENSOR),
    Rule.FLOAT8_ROWWISE: Recipe(_ROW, _ROW, _ROW, _ROW, _ROW, _ROW),
    Rule.FLOAT8_ROWWISE_GW_HP: Recipe(_ROW, _ROW, _ROW, _ROW._replace(rowwise=False), None, None),
}


class Operands(NamedTuple):
    """The positions of the operands among the arguments of an operator with an FP8 form."""

    x: int
    weight: int
    added: int | None  # a bias, or the matrix that `addmm` adds to
    is_kn: bool  # the weight is w.T, of shape (K, N)
    is_matrix: bool  # the input must be a matrix


PRODUCTS = {
    "aten::linear": Operands(0, 1, 2, False, False),
    "aten::mm": Operands(0, 1, None, True, True),
    "aten::addmm": Operands(1, 2, 0, True, True),
    "aten::matmul": Operands(0, 1, None, True, False),
}


def wrong_size(k: int, n: int) -> str:
    """Why a product with a weight of these sizes is not computed in FP8; "" if it is."""
    wrong = [f"{name} is {size}" for name, size in (("K", k), ("N", n)) if size % MULTIPLE]
    return f"{', '.join(wrong)}, not a multiple of {MULTIPLE}" if wrong else ""
