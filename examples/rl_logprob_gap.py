"""Policy gradients in float16, and the gap between the log-probabilities of the trainer and of its rollout.

The policy learns to count: tokens that follow the one before are rewarded. The rollout samples with 16-bit weights, as
an inference engine does, and the trainer computes the tokens again in an autocast region. All of the gap is rounding;
importance weights correct for it. Every 10 steps it is measured in three precisions, on the same weights and tokens.
"""

import copy

import torch
from torch import Tensor, nn

from ampkit import GradScaler, Policy, Rule, autocast

TOKENS, LENGTH = 16, 8


class Network(nn.Module):
    """A causal language model of one block: `[batch, time]` codes to logits."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(TOKENS, width), nn.Embedding(LENGTH, width)
        self.block = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, TOKENS, bias=False)

    def forward(self, codes: Tensor) -> Tensor:
        x = self.embed(codes) + self.position.weight[: codes.shape[1]]
        mask = torch.full((codes.shape[1],) * 2, -torch.inf, dtype=x.dtype, device=x.device).triu(1)
        return self.head(self.block(x, mask, is_causal=True))


def logprobs(network: nn.Module, codes: Tensor) -> Tensor:
    """Return the log-probability of each token after the first: `[batch, time - 1]` in float32."""
    logits = network(codes[:, :-1]).float()
    return logits.log_softmax(-1).gather(-1, codes[:, 1:, None])[..., 0]


@torch.no_grad()
def sample(network: nn.Module, codes: Tensor) -> Tensor:
    """Extend codes of shape `[batch, 1]` to `[batch, LENGTH]`."""
    while codes.shape[1] < LENGTH:
        codes = torch.cat([codes, network(codes)[:, -1].float().softmax(-1).multinomial(1)], 1)
    return codes


def main(steps: int = 40) -> dict[str, list[float]]:
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    trainer = Network().to(device)
    plain = Policy.default(device.type)
    wide = plain.for_modules(trainer, {"head": plain.with_rules({"aten::linear": Rule.LOWER_FLOAT32_OUT})})
    settings = {"bfloat16": plain, "bfloat16, float32 logits": wide, "float16": plain}
    optimizer, scaler = torch.optim.AdamW(trainer.parameters(), lr=2e-3), GradScaler(device)
    gaps: dict[str, list[float]] = {name: [] for name in settings}
    for step in range(steps):
        rollout = copy.deepcopy(trainer).to(torch.float16)
        with autocast(device.type, torch.float16):
            codes = sample(rollout, torch.randint(TOKENS, (64, 1), device=device))
            new = logprobs(trainer, codes)
            with torch.no_grad():
                weights = (new - logprobs(rollout, codes)).exp().clamp(max=2.0)
        rewards = (codes[:, 1:] == (codes[:, :-1] + 1) % TOKENS).float().mean(1)
        loss = -(weights * (rewards - rewards.mean())[:, None] * new).mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        if step % 10 == 9:
            for name, policy in settings.items():
                dtype = getattr(torch, name.partition(",")[0])
                copied = copy.deepcopy(trainer).to(dtype)  # rules for modules hold for copies
                with torch.no_grad(), autocast(device.type, dtype, policy=policy):
                    difference = logprobs(trainer, codes) - logprobs(copied, codes)
                gaps[name].append(difference.abs().mean().item())
            row = "; ".join(f"{name} {gap[-1]:.1e}" for name, gap in gaps.items())
            print(f"step {step + 1}, reward {rewards.mean():.2f}, mean gap: {row}")
    return gaps


if __name__ == "__main__":
    main()
