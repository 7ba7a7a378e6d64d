"""What the checks share: how they are registered, the lists they run over, how results are compared."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Check = Callable[[torch.device], None]
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SIZES = (1, 15, 16, 17, 255, 1023, 4097, 20_000)
LONG = [3_000_000, 70_001]      # on a GPU; a memory checker, which slows everything down, takes the shorter alone


class Registry(dict[str, Check]):
    """Checks by name: functions of a device that raise AssertionError."""

    def add(self, function: Check) -> Check:
        """Register a check under its function's name."""
        self[function.__name__] = function
        return function


def same(got: Sequence[Tensor], want: Sequence[Tensor], what: str) -> None:
    """Equal bit patterns, NaN counting as equal to NaN."""
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        a, b = a.cpu(), b.cpu()
        equal = (a == b) | (a.isnan() & b.isnan())
        assert bool(equal.all()), (
            f"{what}: tensor {index}: {int((~equal).sum())} of {a.numel()} elements differ"
        )


def close(got: Tensor, want: Tensor | float, relative: float, what: str) -> None:
    """Relative distance within bounds; NaN never passes."""
    want = torch.as_tensor(want).double().cpu()
    error = ((got.double().cpu() - want).abs().max() / want.abs().max().clamp(min=1e-300)).item()
    assert error <= relative, f"{what}: off by {error:.3g}, allowed {relative:.3g}"


def lists(device: torch.device, dtype: torch.dtype, offset: int = 0) -> list[Tensor]:
    """Ragged gradients at an element offset into their storage."""
    sizes = (*SIZES, *LONG) if device.type == "cuda" else SIZES[:-1]
    made = []
    for n in sizes:
        storage = torch.randn(n + 16, device=device).to(dtype) * 8
        made.append(storage[offset : offset + n])
    return made


def scalar(value: float, device: torch.device) -> Tensor:
    """One float32 element on the device."""
    return torch.tensor(value, device=device)
