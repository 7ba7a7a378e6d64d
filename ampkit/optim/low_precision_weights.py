"""Options for bfloat16 weights and state: rounding, and the stored part of a float32 step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import ampkit_kernels as kernels

_EXPECTED: dict[str, tuple[Any, ...]] = {
    "rounding": ("nearest", "stochastic"),
    "masters": (None, "remainder"),
    "state_dtype": (None, torch.float32, torch.bfloat16),
}


@dataclass
class Precision:
    """The checked arguments of these names of `ampkit.optim`'s optimizers.

    Attributes:
        is_torchs: whether torch's own functions can step with these arguments.
        streams: names of the entries of state with a parameter's random numbers: ("stream",) or ().
    """

    rounding: str
    masters: str | None
    state_dtype: torch.dtype | None
    seed: int
    is_torchs: bool = field(init=False)
    streams: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        for name, expected in _EXPECTED.items():
            if getattr(self, name) not in expected:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}; expected one of {expected}")
        if not isinstance(self.seed, int):
            raise TypeError(f"got seed {self.seed!r}; expected an int")
        self.is_torchs = (self.rounding, self.masters, self.state_dtype) == ("nearest", None, None)
        self.streams = ("stream",) if self.rounding == "stochastic" else ()

    def check(self, params: Sequence[Tensor]) -> None:
        """Raise `TypeError` for parameters that these arguments do not support."""
        for param in () if self.is_torchs else params:
            if param.dtype not in (torch.bfloat16, torch.float32):
                raise TypeError(
                    f"rounding, masters and state_dtype got a {param.dtype} parameter of shape {tuple(param.shape)}; "
                    "expected bfloat16 or float32: convert it, or give it an optimizer without these arguments"
                )

    def continues(self, name: str) -> bool:
        """Return whether these arguments step an entry of a loaded state."""
        return {"remainder": self.masters is not None, "stream": bool(self.streams)}.get(name, True)

    def check_state(self, entries: Mapping[Any, Mapping[str, Any]]) -> None:
        """Raise `ValueError` for a state to be loaded in which a remainder or a stream has been converted."""
        for number, state in entries.items():
            for name, dtype in (("remainder", kernels.rounding.REMAINDER), ("stream", torch.int64)):
                got = getattr(state.get(name), "dtype", dtype)
                if self.continues(name) and got is not dtype:
                    raise ValueError(
                        f"the saved {name!r} of parameter {number} is {got}; expected {dtype}, as state_dict() returns "
                        f"it. Load a state that was not converted, or delete its {name!r} entries to start anew"
                    )

    def fill(self, state: dict[str, Any], names: Sequence[str], param: Tensor, number: int) -> None:
        """Make missing entries of the state of parameter `number`: those named, its remainder and its stream.

        Unless torch's functions step, convert entries of another dtype, which a loaded state may have.
        """
        master = torch.float32 if self.masters else param.dtype
        dtypes = dict.fromkeys(names, self.state_dtype or master)
        if self.masters and param.dtype is torch.bfloat16:
            dtypes["remainder"] = kernels.rounding.REMAINDER
        for name, dtype in dtypes.items():
            if state.get(name) is None:
                state[name] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
            elif not self.is_torchs and state[name].dtype is not dtype:
                state[name] = state[name].to(dtype)
        for name in self.streams:
            if name not in state:
                state[name] = kernels.rounding.stream(self.seed, number, param.device)
