"""Short trainings of the demo's models, to compare the one-page programs of `examples/` with ampkit."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from examples import demo

STEPS = 5
DTYPES = (torch.float16, torch.bfloat16)


class Mixed(nn.Module):
    """Operators that the demo's models lack: norms and softmax of 16-bit tensors, and `cat` of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[n, 8]` to `[n, 4]`."""
        hidden = self.inner(x)
        return self.outer(torch.cat([hidden, self.norm(hidden)], dim=-1)).softmax(-1)


def trainings(
    autocast: Callable[[str, torch.dtype], AbstractContextManager], make_scaler: Callable[..., Any]
) -> dict[str, list[str]]:
    """Losses of three models in both dtypes, and the norm of the weights at the end, with all their bits.

    The scale begins too large for float16 and grows every second update.
    """
    torch.set_num_threads(1)
    return {
        f"{name} in {dtype}": _losses(name, lambda dtype=dtype: autocast("cpu", dtype), make_scaler)
        for name in ("DigitsNet", "CharGPT", "Mixed")
        for dtype in DTYPES
    }


def _losses(name: str, context: Callable[[], AbstractContextManager], make_scaler: Callable[..., Any]) -> list[str]:
    torch.manual_seed(0)
    if name == "DigitsNet":
        model, batch = demo.DigitsNet(width=4), (torch.rand(4, 1, 8, 8), torch.randint(10, (4,)))
    elif name == "CharGPT":
        codes = torch.randint(20, (2, 9))
        model, batch = demo.CharGPT(20, context=8, width=32, depth=2), (codes[:, :-1], codes[:, 1:])
    else:
        model, batch = Mixed(), (torch.randn(4, 8), torch.randint(4, (4,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = make_scaler(init_scale=2.0**20, growth_interval=2)
    run = demo.Run(demo.Record("", ""), model, optimizer, context, scaler)
    losses = [run.step(batch) for _ in range(STEPS)]
    weights = torch.cat([param.detach().flatten() for param in model.parameters()]).norm()
    return [number.item().hex() for number in (*losses, weights)]
