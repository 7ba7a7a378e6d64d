"""Gradient lists that reach the kernels' corners, and how results are compared."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# Around a vector of 16, a block of 256, a chunk of 1024, and over several chunks.
SIZES = (0, 1, 15, 16, 17, 255, 256, 257, 1023, 1024, 1025, 4097)
HALF = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, torch.float64, *HALF)
GUARD = 7.0
SIGNALLING_NAN = 0x7FA00000

NONFINITE: dict[str, Callable[[], float]] = {
    "inf": lambda: float("inf"),
    "-inf": lambda: float("-inf"),
    "nan": lambda: float("nan"),
}


class Guarded:
    """Views at an odd element offset inside larger buffers whose other elements must not change."""

    def __init__(self, values: Sequence[Tensor], offset: int, device: str = "cpu") -> None:
        self.buffers, self.views = [], []
        for value in values:
            buffer = torch.full((value.numel() + 64,), GUARD, dtype=value.dtype, device=device)
            # Allocations start on 64-byte boundaries, so the offset decides the alignment.
            view = buffer[16 + offset : 16 + offset + value.numel()]
            view.copy_(value)
            self.buffers.append(buffer)
            self.views.append(view)
        self._inside = [(16 + offset, 16 + offset + value.numel()) for value in values]

    def guards_intact(self) -> bool:
        """Whether every element outside the views still has its first value."""
        return all(
            bool((buffer[:start] == GUARD).all() and (buffer[stop:] == GUARD).all())
            for buffer, (start, stop) in zip(self.buffers, self._inside, strict=True)
        )


def gradients(
    dtype: torch.dtype, sizes: Sequence[int] = SIZES, scale: float = 1.0, device: str = "cpu"
) -> list[Tensor]:
    """Normal values of the given lengths."""
    return [(torch.randn(n) * scale).to(dtype).to(device) for n in sizes]


def clones(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Independent copies."""
    return [t.clone() for t in tensors]


def assert_same(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    """Equal values everywhere; NaN equals NaN."""
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        torch.testing.assert_close(
            a, b, rtol=0, atol=0, equal_nan=True, msg=lambda text, i=index: f"tensor {i}: {text}"
        )


def ulp(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Spacing of `dtype` at these float64 magnitudes, at least that of its smallest normal number."""
    info = torch.finfo(dtype)
    exponent = torch.floor(torch.log2(value.abs().double().clamp(min=info.tiny)))
    return torch.exp2(exponent) * info.eps


def assert_within_ulps(
    got: Sequence[Tensor], want: Sequence[Tensor], size: Sequence[Tensor], n: float
) -> None:
    """|got - want| is at most `n` spacings of the result's dtype at the magnitudes in `size`."""
    for a, b, c in zip(got, want, size, strict=True):
        if a.numel():
            worst = ((a.double() - b.double()).abs() / ulp(c, a.dtype)).max().item()
            assert worst <= n, f"{worst} ulps apart, allowed {n}"
