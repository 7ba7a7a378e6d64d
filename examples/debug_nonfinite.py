"""Find the cause of a NaN loss: operator, module, line, cause, and a fix that was tried."""

import torch
from torch import Tensor, nn

from ampkit import autocast, debugging
from ampkit.debugging.finding import Report


class Attention(nn.Module):
    """Attention that scales its scores after the product: in float16, the product overflows first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        return self.out(scores.softmax(-1).to(v.dtype) @ v)


def main() -> Report:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Attention(16), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.full((4, 8, 16), 800.0)

    def step() -> None:
        optimizer.zero_grad()
        with autocast("cpu", dtype=torch.float16):
            loss = model(batch).float().square().mean()
        loss.backward()
        optimizer.step()

    report = debugging.examine(step, model, steps=1)
    print(report)
    return report


if __name__ == "__main__":
    main()
