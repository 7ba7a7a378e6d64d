"""torchao's AdamW with 8-bit state under the scaler: unscaled, clipped and skipped like any other optimizer.

It needs torchao, and a C++ compiler on a CPU, where the optimizer compiles its step.
"""

import torch
from torch import nn
from torchao.optim import AdamW8bit

from ampkit import GradScaler, autocast


def main(steps: int = 12) -> list[float]:
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).to(device)
    optimizer, scaler = AdamW8bit(model.parameters(), lr=1e-2), GradScaler(device, init_scale=2.0**10)
    batch, losses = torch.randn(32, 64, device=device), []
    for step in range(steps):
        optimizer.zero_grad()
        with autocast(device.type, torch.float16):
            loss = (model(batch) - batch).square().mean()
        scaler.scale(loss).backward()
        if step == 3:
            model[0].weight.grad[0, 0] = torch.inf  # an overflow
        scaler.clip_grad_norm_(optimizer, max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {scaler.stats().skips} step skipped")
    return losses


if __name__ == "__main__":
    main()
