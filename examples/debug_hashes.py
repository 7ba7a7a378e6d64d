"""Two runs that should be the same and are not: the first operator that differs."""

import torch
from torch import nn

from ampkit import debugging


def main() -> debugging.HashDifference:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 1))
    batch = torch.randn(4, 8)
    logs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with debugging.record_hashes(model) as log:
            model(batch).mean().backward()
        model.zero_grad()
        logs.append(log)
    difference = debugging.compare_hashes(*logs)
    print(difference)
    return difference


if __name__ == "__main__":
    main()
