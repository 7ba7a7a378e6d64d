"""Distinguish skipped steps of a loss scale that settles from skipped steps that no smaller scale would avoid."""

import torch
from torch import Tensor, nn

from ampkit import GradScaler, autocast, debugging
from ampkit.debugging.finding import Report


class Norm(nn.Module):
    """A norm whose gradient is undefined where its input is zero."""

    def forward(self, x: Tensor) -> Tensor:
        return x.float().square().sum(-1).sqrt()


def train(batch: Tensor, steps: int = 4) -> Report:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), Norm())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = GradScaler("cpu", init_scale=2.0**20)
    with debugging.Examination(model) as report:
        for _ in range(steps):
            optimizer.zero_grad()
            with autocast("cpu", dtype=torch.float16):
                loss = model(batch).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return report


def main() -> tuple[Report, Report]:
    healthy, broken = train(torch.ones(4, 8)), train(torch.zeros(4, 8))
    print(healthy)
    print(broken)
    return healthy, broken


if __name__ == "__main__":
    main()
