"""A mixture of experts: 16-bit experts, and a router whose scores are not rounded.

`Rule.LOWER_FLOAT32_OUT` multiplies 16-bit operands, as the experts do, and returns float32 scores. A bfloat16 router
rounds close scores, so that it picks other experts. After training, the picks of each router are compared with the
picks of a float32 router on the same activations.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampkit import Policy, Rule, autocast, record_casts

WIDTH, EXPERTS, TOP = 64, 32, 2


class Experts(nn.Module):
    """A residual layer that sends each token `[n, width]` to the best experts of its router."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up, self.down = (nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(tokens)
        scores, experts = self.router(x).float().softmax(-1).topk(TOP)
        order = experts.flatten().argsort(stable=True)  # tokens of one expert become neighbors
        ends = experts.flatten().bincount(minlength=EXPERTS).cumsum(0).to(torch.int32)
        rows = order // TOP
        y = F.grouped_mm(F.silu(F.grouped_mm(x[rows], self.up, offs=ends)), self.down, offs=ends)
        return tokens.index_add(0, rows, (y * scores.flatten()[order, None]).to(tokens.dtype))


def train(model: nn.Module, x: Tensor, y: Tensor, policy: Policy, steps: int) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loss = torch.zeros(())
    for _ in range(steps):
        optimizer.zero_grad()
        with autocast(x.device.type, torch.bfloat16, policy=policy):
            loss = (model(x).float() - y).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()


def main(steps: int = 60) -> dict[str, float]:
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Experts(), nn.Linear(WIDTH, WIDTH)).to(device)
    plain = Policy.default(device.type)
    wide = plain.with_rules({"aten::linear": Rule.LOWER_FLOAT32_OUT})
    policy = plain.for_modules(model, {"**.router": wide})
    x = torch.randn(2048, WIDTH, device=device)
    y = torch.roll(x, 1, 1) * x.sign()
    print(f"loss {train(model, x, y, policy, 1):.3f} -> {train(model, x, y, policy, steps):.3f}")
    with record_casts() as record, torch.no_grad(), autocast(device.type, torch.bfloat16, policy=policy):
        model(x)
    print(record)

    router, activations = model[1].router, model[1].norm(model[0](x)).bfloat16()
    exact = router(activations.float()).topk(TOP).indices.sort().values
    others = {}
    for name, each in (("bfloat16 scores", plain), ("float32 scores", wide)):
        with torch.no_grad(), autocast(device.type, torch.bfloat16, policy=each):
            picked = router(activations).topk(TOP).indices.sort().values
        others[name] = (picked != exact).any(1).float().mean().item()
        print(f"{name}: other experts than in float32 for {others[name]:.1%} of the tokens")
    return others


if __name__ == "__main__":
    main()
