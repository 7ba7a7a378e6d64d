"""A model that is worse in bfloat16: find the operators that round and amplify, and the effect on gradients."""

import torch
from torch import Tensor, nn

from ampkit import autocast, debugging
from ampkit.debugging.report import PrecisionReport


class Norm(nn.Module):
    """A norm that takes the variance as a difference of two large numbers."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x * x).mean(-1, keepdim=True) - mean * mean
        return (x - mean) / (variance.clamp_min(0) + 1e-5).sqrt()


def main() -> PrecisionReport:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Norm(), nn.Linear(16, 1))
    nn.init.constant_(model[0].bias, 4.0)
    batch = torch.randn(32, 16)

    def step() -> None:
        with autocast("cpu", dtype=torch.bfloat16):
            loss = model(batch).float().square().mean()
        loss.backward()

    report = debugging.compare_precision(step, model)
    print(report)
    print(report.table(5))
    return report


if __name__ == "__main__":
    main()
