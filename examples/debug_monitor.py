"""A run in pure bfloat16 that stops learning: monitor how many updates are lost, on every n-th step."""

import torch
from torch import nn

from ampkit import debugging


def main() -> debugging.TensorMonitor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1)).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    batch = torch.randn(64, 16, dtype=torch.bfloat16)
    target = batch[:, :1].square()
    with debugging.TensorMonitor(model, every=20) as monitor:
        for _ in range(41):
            optimizer.zero_grad()
            (model(batch) - target).square().mean().backward()
            optimizer.step()
    print(monitor)
    return monitor


if __name__ == "__main__":
    main()
