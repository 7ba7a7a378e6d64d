"""Decorate `forward` for nn.DataParallel: a region belongs to a thread, and each replica runs in its own thread.

A `with autocast():` around the call of a DataParallel model does not reach its replicas. A decorated forward enters the
region in the thread where it runs. Without several GPUs the example starts such threads itself.

    python examples/data_parallel.py
"""

import threading

import torch
from torch import Tensor, nn

from ampkit import autocast

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOW = torch.float16 if DEVICE == "cuda" else torch.bfloat16


class Plain(nn.Module):
    """Opens no region."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Decorated(Plain):
    """Enters a region in the thread where it runs."""

    @autocast(DEVICE, LOW)
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def dtypes_in_threads(model: nn.Module, x: Tensor, replicas: int = 2) -> list[torch.dtype]:
    """Return the output dtypes of a model called from several threads, as DataParallel calls its replicas."""
    dtypes: list[torch.dtype] = []
    threads = [threading.Thread(target=lambda: dtypes.append(model(x).dtype)) for _ in range(replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return dtypes


def main() -> dict[str, list[torch.dtype]]:
    """Call both models inside a region, from other threads; then through DataParallel itself."""
    torch.manual_seed(0)
    x = torch.randn(8, 16, device=DEVICE)
    dtypes_of = {}
    for model in (Plain().to(DEVICE), Decorated().to(DEVICE)):
        with autocast(DEVICE, LOW):
            dtypes_of[type(model).__name__] = dtypes_in_threads(model, x)
    parallel = nn.DataParallel(Decorated().to(DEVICE))
    dtypes_of["DataParallel"] = [parallel(x).dtype]
    for name, dtypes in dtypes_of.items():
        print(f"{name}: {', '.join(map(str, dtypes))}")
    return dtypes_of


if __name__ == "__main__":
    main()
