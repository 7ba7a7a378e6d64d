"""Shared by the checks: their registry, the lists that they run over, comparisons of results."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Check = Callable[..., None]  # takes a device, and an `impl` where the CPU has the operation too
HALF = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, torch.float64, *HALF)
# Around 16 elements, and around the blocks and chunks of the interpreter's launches (256 and 1024) and of a GPU's.
SIZES = (0, 1, 15, 16, 17, 255, 256, 257, 1023, 1024, 1025, 4097)
LONG = [3_000_000, 70_001]  # on a GPU; under a memory checker, which is slow, only the shorter one
GUARD = 7.0


class Registry(dict[str, Check]):
    """Checks by name: functions of a device that raise AssertionError."""

    def add(self, function: Check) -> Check:
        """Register a check under its function's name."""
        self[function.__name__] = function
        return function


class Guarded:
    """Copies of tensors at element offsets in larger buffers, whose other elements must not change."""

    def __init__(self, values: Sequence[Tensor], offsets: Sequence[int] = (0, 1, 3)) -> None:
        self.buffers, self.views = [], []
        for i, value in enumerate(values):
            # Allocations start on 64-byte boundaries, so the offset decides the alignment.
            start = 16 + offsets[i % len(offsets)]
            self.buffers.append(torch.full((value.numel() + 64,), GUARD, dtype=value.dtype, device=value.device))
            self.views.append(self.buffers[-1][start : start + value.numel()].copy_(value))

    def check(self, what: str) -> None:
        """Raise where an element outside the views has changed; overwrites the views."""
        for buffer, view in zip(self.buffers, self.views, strict=True):
            view.fill_(GUARD)
            changed = (buffer != GUARD).nonzero().flatten().tolist()
            assert not changed, f"{what}: elements {changed[:8]} outside a tensor were written"


def gradients(
    dtype: torch.dtype, sizes: Sequence[int] | None = None, scale: float = 1.0, device: Any = "cpu"
) -> list[Tensor]:
    """Normally distributed values, of lengths at the borders of the kernels' blocks and chunks."""
    if sizes is None:
        sizes = (*SIZES, *LONG) if torch.device(device).type == "cuda" else SIZES
    return [(torch.randn(n) * scale).to(dtype).to(device) for n in sizes]


def same(got: Sequence[Tensor], want: Sequence[Tensor], what: str = "") -> None:
    """Equal values with equal signs, zeros included; NaN equals NaN."""
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        a, b = a.cpu(), b.cpu()
        assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{what}: tensor {index} is a {a.dtype} {tuple(a.shape)}"
        parts = [torch.view_as_real(t) if t.is_complex() else t for t in (a, b)]
        a, b = parts
        equal = ((a == b) & (a.signbit() == b.signbit())) | (a.isnan() & b.isnan())
        assert bool(equal.all()), f"{what}: tensor {index}: {int((~equal).sum())} of {a.numel()} elements differ"


def close(got: Tensor, want: Tensor | float, relative: float, what: str) -> None:
    """The largest difference, relative to the largest value, is within bounds; NaN never passes."""
    want = torch.as_tensor(want).double().cpu()
    error = ((got.double().cpu() - want).abs().max() / want.abs().max().clamp(min=1e-300)).item()
    assert error <= relative, f"{what}: off by {error:.3g}, allowed {relative:.3g}"


def within_ulps(got: Sequence[Tensor], want: Sequence[Tensor], size: Sequence[Tensor], n: float, what: str) -> None:
    """|got - want| is at most `n` spacings of the result's dtype at the magnitudes in `size`."""
    for a, b, c in zip(got, want, size, strict=True):
        info, c = torch.finfo(a.dtype), c.cpu().abs().double()
        ulp = torch.exp2(torch.floor(torch.log2(c.clamp(min=info.tiny)))) * info.eps
        worst = ((a.cpu().double() - b.cpu().double()).abs() / ulp).max().item() if a.numel() else 0.0
        assert worst <= n, f"{what}: {worst} ulps apart, allowed {n}"


def scalar(value: float, device: Any = "cpu") -> Tensor:
    """One float32 element on the device."""
    return torch.tensor(value, dtype=torch.float32, device=device)
