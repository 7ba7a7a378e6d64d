"""A step that is slower than it could be: where its time and its bytes go, and which shapes do not fit."""

import torch
from torch import nn

from ampkit import autocast, debugging


def main() -> debugging.OperatorStats:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 250), nn.LayerNorm(250), nn.GELU(), nn.Linear(250, 256))
    batch = torch.randn(512, 256)

    def step() -> None:
        with autocast("cpu", dtype=torch.bfloat16):
            loss = model(batch).float().square().mean()
        loss.backward()

    step()      # the first one warms up
    with debugging.collect_operator_stats(model) as stats:
        step()
    print(stats.table(6))
    return stats


if __name__ == "__main__":
    main()
