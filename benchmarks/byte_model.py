"""Bytes that each job must move per element, by ampkit and by torch, to turn times into bandwidths.

Counted, not measured: every list read or written once per kernel that touches it. float32 gradients, parameters and
moments. The tests count the kernels' own accesses in the interpreter and compare (`tests/kernels/test_bytes.py`);
torch's figures follow from its kernels: `_amp_foreach_non_finite_check_and_unscale_` always reads and writes,
clipping reads once for the norm and then reads and writes even at coefficient 1, a fused optimizer given
`grad_scale` writes gradients back.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Bytes:
    """Bytes per element."""

    read: int
    written: int

    @property
    def total(self) -> int:
        """Read and written."""
        return self.read + self.written

    def __add__(self, other: "Bytes") -> "Bytes":
        return Bytes(self.read + other.read, self.written + other.written)


def step(state: int, weight: int = 4, state_of: int = 4, remainder: int = 0) -> Bytes:
    """Return an optimizer's step with `state` tensors per weight; gradients have the weights' bytes per element."""
    held = weight + state * state_of + remainder
    return Bytes(held + weight, held)


UNSCALE = Bytes(4, 4)
NORM = Bytes(4, 0)
MULTIPLY = Bytes(4, 4)
UNSCALE_INTO = Bytes(2, 4)  # from half gradients
CAST_TO_HALF = Bytes(4, 2)
ADAMW, ADAMW_AMSGRAD = step(2), step(3)
SGD_MOMENTUM, SGD_PLAIN = step(1), step(0)
# Casts of a matrix of 16-bit elements; the first two need two launches, the third one.
FLOAT8_TENSOR = Bytes(2, 0) + Bytes(2, 2)
FLOAT8_ROWS_AND_COLUMNS = Bytes(2, 1) + Bytes(2, 1)
FLOAT8_ROWS = Bytes(2, 1)

# Whole jobs, as the GradScaler runs them.
OURS = {
    "unscale": UNSCALE,
    "unscale into float32": UNSCALE_INTO,
    "unscale + clip": NORM + MULTIPLY,
    "unscale + clip, factor 1": NORM,
    "clip + AdamW": NORM + ADAMW,
    "AdamW step": ADAMW,
    "SGD step": SGD_MOMENTUM,
    "cast to half": CAST_TO_HALF,
}
TORCH = {
    "unscale": Bytes(4, 4),
    "unscale into float32": Bytes(2, 4) + Bytes(4, 4),
    "unscale + clip": Bytes(4, 4) + Bytes(4, 0) + Bytes(4, 4),
    "unscale + clip, factor 1": Bytes(4, 4) + Bytes(4, 0) + Bytes(4, 4),
    "clip + AdamW": Bytes(4, 4) + Bytes(4, 0) + Bytes(4, 4) + Bytes(16, 12),
    "AdamW step": Bytes(16, 12),
    "SGD step": Bytes(12, 8),
    "cast to half": Bytes(4, 2),
}
# clip + AdamW with torch's default (foreach) AdamW; its addcmul reads the gradient twice, the second time from cache.
TORCH_FOREACH_CLIP_ADAMW = 100
