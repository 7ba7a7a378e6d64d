"""The FP8 kernels in the interpreter have the bits of PyTorch's operators, and move the bytes of the byte model.

Triton's interpreter converts to FP8 without carry, without saturation, and NaN to 384; torch's cast replaces it.
"""

import math

import pytest
import torch

from ampkit_kernels import Scaling, quantize
from benchmarks import byte_model as model
from tests.gpu_checks.cuda_only import same_forms
from tests.kernels.launches import noted_launches
from tests.kernels.test_bytes import count_accesses

CPU, E4M3, E5M2 = torch.device("cpu"), torch.float8_e4m3fn, torch.float8_e5m2
TENSOR, GRADIENT = Scaling(False, E4M3, False), Scaling(False, E5M2, False)
ROW = Scaling(True, E4M3, True)
FORMS = [
    (TENSOR, TENSOR),
    (TENSOR, None),
    (None, TENSOR),
    (GRADIENT, GRADIENT),
    (TENSOR, GRADIENT),
    (ROW, ROW),
    (ROW, None),
    (None, ROW),
    (None, ROW._replace(rowwise=False)),
    (ROW._replace(power_of_2=False), TENSOR),
]


@pytest.fixture
def interpreted_float8(interpreted, monkeypatch):
    from triton import language as tl
    from triton.runtime import interpreter

    from ampkit_kernels.triton_ops import float8_quantize

    convert = interpreter._convert_float

    def corrected(data, source, target, rounding):
        dtype = {tl.float8e4nv: E4M3, tl.float8e5: E5M2}.get(target)
        if dtype is None or source != tl.float32:
            return convert(data, source, target, rounding)
        return torch.tensor(data).to(dtype).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", corrected)
    monkeypatch.setattr(float8_quantize, "CONFIG", float8_quantize.Config(block=256))
    return float8_quantize


def matrix(rows, columns, dtype, special):
    x = torch.randn(rows, columns) * (3 * torch.randn(rows, 1)).exp()
    x[rows // 2] = 0
    for i, value in enumerate(special):
        x[3 * i % rows, 5 * i % columns] = value
    return x.to(dtype)


@pytest.mark.parametrize("forms", FORMS, ids=[f"{rows}, {columns}" for rows, columns in FORMS])
def test_the_bits_of_pytorchs_operators(interpreted_float8, forms):
    """Zeros, inf and NaN among them; sizes that are no multiple of a tile or of 16."""
    same_forms(matrix(80, 48, torch.bfloat16, ()), forms, CPU)
    same_forms(matrix(13, 80, torch.float32, (float("nan"), float("inf"))), forms, CPU)


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_powers_of_two_are_the_largest_that_keep_a_row_in_range(interpreted_float8, dtype, impl):
    """Amaxes just above and below 448 or 57344 times a power of two, where log2 rounds up to the next power."""
    edges = torch.finfo(dtype).max * 2.0 ** torch.arange(-30, 10, 3)
    amaxes = torch.cat([edges, edges.nextafter(torch.tensor(0.0)), edges * (1 + 2**-23), edges * (1 + 2**-22)])
    rows, _ = quantize(torch.stack([amaxes / -3, amaxes], 1), Scaling(True, dtype, True), None, impl=impl)
    largest = rows.scale[:, 0].double() * amaxes.double()
    outside = (largest > torch.finfo(dtype).max) | (largest * 2 <= torch.finfo(dtype).max)
    assert amaxes[outside].tolist() == [], "the largest element of a row is not in the upper half of FP8's range"
    assert torch.frexp(rows.scale).mantissa.unique().tolist() == [0.5]


@pytest.mark.parametrize("forms", [(TENSOR, TENSOR), (ROW, ROW)], ids=["tensor", "row"])
def test_any_strides(interpreted_float8, forms):
    x = matrix(7, 18, torch.float16, (-float("inf"),))
    for view in (x.t(), x[:, ::2], torch.cat([x[:1], x])[1:], x[:1], x[:, :1], torch._neg_view(x)):
        same_forms(view, forms, CPU)


def test_long_rows_take_pytorchs_operators(interpreted_float8, monkeypatch):
    monkeypatch.setattr(interpreted_float8, "LONGEST_ROW", 32)
    monkeypatch.setattr(interpreted_float8, "_by_rows", None)
    monkeypatch.setattr(interpreted_float8, "_by_tiles", None)
    rows, _ = quantize(torch.ones(2, 48), ROW, None, impl="triton")
    assert rows.data.shape == (2, 48)
    monkeypatch.setattr(interpreted_float8, "LONGEST", 32)
    for shape in ((2, 48), (48, 2)):
        rows, _ = quantize(torch.ones(shape), TENSOR, None, impl="triton")
        assert rows.data.shape == shape


@pytest.mark.parametrize("shape", [(1, 65536 * 64), (65536 * 64, 1)])
def test_long_matrices_have_a_grid_that_cuda_accepts(interpreted_float8, shape):
    """Which is of at most 65,535 programs in the second and third dimension."""
    with noted_launches() as launches:
        interpreted_float8._by_tiles(
            torch.empty(shape, dtype=torch.bfloat16),
            TENSOR,
            torch.zeros((), dtype=torch.int32),
            casts=True,
            transposes=True,
        )
    grids = [launch.arguments[0] for launch in launches]
    assert [max(grid[1:]) <= 65535 and math.prod(grid) >= 65536 for grid in grids] == [True]


def test_older_gpus_take_pytorchs_operators(interpreted_float8, monkeypatch):
    """On an A100 or RTX 30 e4m3 does not compile."""
    monkeypatch.setattr(interpreted_float8, "_by_rows", None)
    monkeypatch.setattr(interpreted_float8, "_converts", lambda device: False, raising=False)
    rows, _ = quantize(torch.ones(2, 48), ROW, None, impl="triton")
    assert rows.data.shape == (2, 48)
    monkeypatch.undo()
    for capability in ((8, 0), (8, 6), (8, 9), (9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        converts = interpreted_float8._converts.__wrapped__
        assert [converts(torch.device(name)) for name in ("cpu", "cuda")] == [True, capability >= (8, 9)]


@pytest.mark.parametrize(
    ("forms", "want"),
    [
        ((TENSOR, TENSOR), model.FLOAT8_TENSOR),
        ((ROW, ROW), model.FLOAT8_ROWS_AND_COLUMNS),
        ((ROW, None), model.FLOAT8_ROWS),
    ],
)
def test_bytes(interpreted_float8, monkeypatch, forms, want):
    """Bytes of the matrix and its forms; scales and amaxes, of 32 bits, are not counted: one number for each row."""
    x = torch.randn(64, 128).bfloat16()
    touched = count_accesses(monkeypatch, [(0, 2**64)], widest=16)
    quantize(x, *forms, impl="triton")
    assert (touched["load"], touched["store"]) == (want.read * x.numel(), want.written * x.numel())
