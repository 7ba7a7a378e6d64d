"""quantize: convert a matrix to FP8 along its rows, its columns, or both.

Contract. x[rows, columns]: float32, bfloat16 or float16, of any strides, not empty. The result equals
`..float8_scaling.quantize`, contiguous. Amaxes are maxima of the bits without the sign, which order like magnitudes,
NaN above inf. Needs compute capability 8.9; older devices get PyTorch's operators. On 8.9 itself Triton converts
through float16, which rounds some values twice. Does not synchronize.

Bytes per 16-bit element:

- with one scale: 2 to find it and 4 for both forms, in two launches;
- with scales of rows and of columns: 3 and 3 in two launches, the columns' amaxes found while the rows are cast;
- with scales of only rows: 3 in one launch.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import reference
from ..configs import Config
from ..float8_scaling import SMALLEST_AMAX, Quantized, Scaling
from .launch import on_device

CONFIG = Config(block=2048)  # of `amax_kernel`
TILE = 64  # rows and columns of a tile, which is transposed at a time
ROWS = 8  # of a program that finds the amaxes of columns, for one atomic operation per column
LONGEST_ROW = 16384  # elements that a program can hold in its registers
LONGEST = 1 << 30  # rows or columns, whose numbers and the numbers of a tile beyond them fit int32
MOST_PROGRAMS = 65535  # in the second dimension of a grid, and in the third
FP8 = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}
# Triton specializes on addresses that are multiples of 16 bytes, and all addresses here are: there is one variant for
# each set of constants. With ALIGNED, sizes are in units of 16: the compiler infers that rows start at such addresses.
_jit_kernel = triton.jit(do_not_specialize=["rows", "columns", "n"])
_SMALLEST: tl.constexpr = tl.constexpr(SMALLEST_AMAX)


@triton.jit
def magnitude_bits(x):
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(bits, LARGEST: tl.constexpr, POWER_OF_2: tl.constexpr):
    amax = bits.to(tl.float32, bitcast=True)
    scale = tl.math.div_rn(LARGEST, tl.maximum(amax, _SMALLEST, propagate_nan=tl.PropagateNan.ALL))
    if POWER_OF_2:
        power = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        scale = tl.where(scale == scale, power, scale)
    return scale


@_jit_kernel
def amax_kernel(x_ptr, amax_ptr, n, BLOCK: tl.constexpr):
    largest = tl.zeros([BLOCK], tl.int32)
    b = tl.program_id(0).to(tl.int64)
    while (b + 1) * BLOCK <= n:
        largest = tl.maximum(largest, magnitude_bits(tl.load(x_ptr + b * BLOCK + tl.arange(0, BLOCK))))
        b += tl.num_programs(0)
    if b * BLOCK < n:
        at = b * BLOCK + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, magnitude_bits(tl.load(x_ptr + at, mask=at < n, other=0.0)))
    tl.atomic_max(amax_ptr, tl.max(largest, 0), sem="relaxed")


@_jit_kernel
def row_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    amax_ptr,
    rows,
    columns,
    LARGEST: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    DTYPE: tl.constexpr,
    CASTS: tl.constexpr,
    COLUMN_AMAX: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if ALIGNED:
        columns *= 16
    c = tl.arange(0, BLOCK)
    inside = c < columns
    largest = tl.zeros([BLOCK], tl.int32)
    row = tl.program_id(0).to(tl.int64) * ROWS
    last = tl.minimum(row + ROWS, rows)
    while row < last:
        x = tl.load(x_ptr + row * columns + c, mask=inside, other=0.0).to(tl.float32)
        bits = magnitude_bits(x)
        if CASTS:
            scale = scale_of(tl.max(bits, 0), LARGEST, POWER_OF_2)
            tl.store(q_ptr + row * columns + c, (x * scale).to(DTYPE), mask=inside)
            tl.store(scale_ptr + row, scale)
        largest = tl.maximum(largest, bits)
        row += 1
    if COLUMN_AMAX:
        tl.atomic_max(amax_ptr + c, largest, mask=inside, sem="relaxed")


@_jit_kernel
def tile_kernel(
    x_ptr,
    amax_ptr,
    q_ptr,
    q_t_ptr,
    scale_ptr,
    rows,
    columns,
    LARGEST: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    DTYPE: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    CASTS: tl.constexpr,
    TRANSPOSES: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    if ALIGNED:
        rows, columns = rows * 16, columns * 16
    down, across = tl.program_id(0), tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)
    r, c = down * TILE + tl.arange(0, TILE), across * TILE + tl.arange(0, TILE)
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    at = r[:, None].to(tl.int64) * columns + c[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if BY_COLUMN:
        scale = scale_of(tl.load(amax_ptr + c, mask=c < columns, other=0), LARGEST, POWER_OF_2)
        q = (x * scale[None, :]).to(DTYPE)
        if down == 0:
            tl.store(scale_ptr + c, scale, mask=c < columns)
    else:
        scale = scale_of(tl.load(amax_ptr), LARGEST, POWER_OF_2)
        q = (x * scale).to(DTYPE)
        if (down == 0) & (across == 0):
            tl.store(scale_ptr, scale)
    if CASTS:
        tl.store(q_ptr + at, q, mask=inside)
    if TRANSPOSES:
        inside_t = (c < columns)[:, None] & (r < rows)[None, :]
        tl.store(q_t_ptr + c[:, None].to(tl.int64) * rows + r[None, :], tl.trans(q), mask=inside_t)


def quantize(
    x: Tensor, along_rows: Scaling | None, along_columns: Scaling | None
) -> tuple[Quantized | None, Quantized | None]:
    """Launch the kernels for these scalings; see the module's docstring."""
    if x.stride(0) == 1 and x.stride(1) != 1:
        columns, rows = quantize(x.t(), along_columns, along_rows)
        return rows, columns
    by_row = along_rows is not None and along_rows.rowwise
    by_column = along_columns is not None and along_columns.rowwise
    too_long = ((by_row or by_column) and x.shape[1] > LONGEST_ROW) or max(x.shape) > LONGEST
    if too_long or not _converts(x.device):
        return reference.quantize(x, along_rows, along_columns)
    x = x.resolve_neg().contiguous()
    x = x.clone() if x.data_ptr() % 16 else x
    with on_device(x.device):
        rows = columns = None
        if by_row or by_column:
            rows, amaxes = _by_rows(x, along_rows if by_row else None, finds_columns=by_column)
            if by_column:
                _, columns = _by_tiles(x, along_columns, amaxes, casts=False, transposes=True)
        if along_rows is not None and not by_row:
            both = along_columns == along_rows
            rows, transposed = _by_tiles(x, along_rows, _amax(x), casts=True, transposes=both)
            columns = transposed if both else columns
        if along_columns is not None and columns is None:
            _, columns = _by_tiles(x, along_columns, _amax(x), casts=False, transposes=True)
    return rows, columns


@functools.cache
def _converts(device: torch.device) -> bool:
    """Whether Triton converts to FP8 on this device: below capability 8.9 e4m3 does not compile."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def _amax(x: Tensor) -> Tensor:
    """Return the bits of the largest magnitude."""
    amax = torch.zeros((), dtype=torch.int32, device=x.device)
    grid = (min(triton.cdiv(x.numel(), CONFIG.block), CONFIG.programs(x.device)),)
    amax_kernel[grid](x, amax, x.numel(), BLOCK=CONFIG.block, num_warps=CONFIG.num_warps, enable_fp_fusion=False)
    return amax


def _by_rows(x: Tensor, scaling: Scaling | None, *, finds_columns: bool) -> tuple[Quantized | None, Tensor]:
    """Return the rows in FP8, and the bits of the largest magnitude of each column."""
    rows, columns = x.shape
    casts = scaling is not None
    amaxes = torch.zeros(columns if finds_columns else 0, dtype=torch.int32, device=x.device)
    form = Quantized(x, amaxes)
    if scaling is not None:
        form = Quantized(x.new_empty(x.shape, dtype=scaling.dtype), x.new_empty((rows, 1), dtype=torch.float32))
    block = max(triton.next_power_of_2(columns), 16)
    rows_per_program, aligned = ROWS if finds_columns else 1, columns % 16 == 0
    constants = {"CASTS": casts, "COLUMN_AMAX": finds_columns, "ROWS": rows_per_program, "BLOCK": block}
    options = {**_constants(scaling, aligned), **constants, "num_warps": row_warps(block)}
    units = columns // 16 if aligned else columns
    row_kernel[(triton.cdiv(rows, rows_per_program),)](x, *form, amaxes, rows, units, **options)
    return form if casts else None, amaxes


def _by_tiles(
    x: Tensor, scaling: Scaling, amax: Tensor, *, casts: bool, transposes: bool
) -> tuple[Quantized | None, Quantized | None]:
    """Return `x` and `x.T` in FP8 by one scale, or only `x.T` by the scales of columns."""
    rows, columns = x.shape
    scale = torch.empty(amax.shape, device=x.device)
    q = x.new_empty(x.shape if casts else 0, dtype=scaling.dtype)
    q_t = x.new_empty((columns, rows) if transposes else 0, dtype=scaling.dtype)
    across = triton.cdiv(columns, TILE)
    deep = triton.cdiv(across, MOST_PROGRAMS)
    grid = triton.cdiv(rows, TILE), triton.cdiv(across, deep), deep
    aligned = rows % 16 == 0 and columns % 16 == 0
    constants = {"BY_COLUMN": scaling.rowwise, "CASTS": casts, "TRANSPOSES": transposes, "TILE": TILE}
    units = (rows // 16, columns // 16) if aligned else (rows, columns)
    tile_kernel[grid](x, amax, q, q_t, scale, *units, **_constants(scaling, aligned), **constants, num_warps=8)
    scale = scale[:, None] if scaling.rowwise else scale
    return Quantized(q, scale) if casts else None, Quantized(q_t, scale) if transposes else None


def _constants(scaling: Scaling | None, aligned: bool) -> dict[str, Any]:
    """Return the constants that both kernels have; without a scaling, of a kernel that casts nothing."""
    _, dtype, power_of_2 = scaling or Scaling(False, torch.float8_e4m3fn, False)
    constants = {"LARGEST": torch.finfo(dtype).max, "POWER_OF_2": power_of_2, "DTYPE": FP8[dtype]}
    return {**constants, "ALIGNED": aligned, "enable_fp_fusion": False}


def row_warps(block: int) -> int:
    """Warps of a program that holds a row of this many elements."""
    return min(max(block // 256, 4), 16)
