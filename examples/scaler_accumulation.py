"""Gradient accumulation: scale every micro-batch, unscale, clip, step and update once."""

import torch

from ampkit import GradScaler, autocast

MICRO_BATCHES = 4


def main(steps: int = 10) -> float:
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    model = torch.nn.Linear(8, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = GradScaler(device)
    batches = torch.randn(steps, MICRO_BATCHES, 16, 8, device=device)

    for batch in batches:
        optimizer.zero_grad()
        total = 0.0
        for micro in batch:
            with autocast(device.type, dtype=torch.float16):
                loss = (model(micro) - micro.sum(1, keepdim=True)).square().mean() / MICRO_BATCHES
            scaler.scale(loss).backward()  # the scale is the same until update()
            total += loss.detach()
        scaler.clip_grad_norm_(optimizer, max_norm=5.0)  # after the last backward, not once per micro-batch
        scaler.step(optimizer)
        scaler.update()

    print(f"loss {float(total):.4f}; {scaler.stats()}")
    return float(total)


if __name__ == "__main__":
    main()
