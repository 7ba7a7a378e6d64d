"""`forward` decorated for nn.DataParallel: a region belongs to a thread, and each replica runs in its own.

A `with autocast():` around the call of a DataParallel model reaches no replica. A decorated forward enters the
region where it runs. Without several GPUs the replicas' threads are shown by hand.

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
    """Enters a region in whichever thread it runs."""

    @autocast(DEVICE, LOW)
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def dtypes_in_threads(model: nn.Module, x: Tensor, replicas: int = 2) -> list[torch.dtype]:
    """What each of several threads gets from the model, as DataParallel's replicas would."""
    found: list[torch.dtype] = []
    threads = [threading.Thread(target=lambda: found.append(model(x).dtype)) for _ in range(replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def main() -> dict[str, list[torch.dtype]]:
    """Call both models inside a region, from other threads; then through DataParallel itself."""
    torch.manual_seed(0)
    x = torch.randn(8, 16, device=DEVICE)
    found = {}
    for model in (Plain().to(DEVICE), Decorated().to(DEVICE)):
        with autocast(DEVICE, LOW):
            found[type(model).__name__] = dtypes_in_threads(model, x)
    parallel = nn.DataParallel(Decorated().to(DEVICE))
    found["DataParallel"] = [parallel(x).dtype]
    for name, dtypes in found.items():
        print(f"{name}: {', '.join(map(str, dtypes))}")
    return found


if __name__ == "__main__":
    main()
