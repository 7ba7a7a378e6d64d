"""A model whose output is wrong in bfloat16: the smallest part of it to keep in float32, by a metric of the user's."""

import torch
from torch import Tensor, nn

from ampkit import Policy, autocast, debugging
from ampkit.debugging.search import SearchResult


class Block(nn.Module):
    """The norm subtracts the offset that the first layer adds; bfloat16 has rounded by then."""

    def __init__(self, width: int, offset: float = 0.0) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, width)
        nn.init.constant_(self.inner.bias, offset)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.outer(self.norm(self.inner(x)))).float()


def main() -> SearchResult:
    torch.manual_seed(0)
    model = nn.Sequential(Block(16), Block(16), Block(16, offset=300.0), Block(16), Block(16, offset=300.0)).eval()
    batch = torch.randn(8, 16)
    with torch.no_grad():
        exact = model(batch)

    def evaluate(policy: Policy) -> float:
        with torch.no_grad(), autocast("cpu", dtype=torch.bfloat16, policy=policy):
            return float((model(batch).float() - exact).abs().max())

    result = debugging.search_policy(evaluate, model, lambda error: error < 0.05)
    print(result)
    return result


if __name__ == "__main__":
    main()
