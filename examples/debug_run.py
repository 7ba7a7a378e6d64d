"""A training script with a fault, for `ampkit debug examples/debug_run.py`: a product that overflows in float16."""

import torch
from torch import nn

from ampkit import autocast


class Attention(nn.Module):
    def forward(self, x):
        scores = x @ x.T / 1000  # scaled after the product, which overflows first
        return scores.softmax(-1).to(x.dtype) @ x


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), Attention(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(40):
        with autocast("cpu", dtype=torch.float16):
            loss = (model(torch.randn(8, 16) * 300).float() / 100).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
