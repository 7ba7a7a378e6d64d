"""Clipping by norm and by value, and a schedule that waits for skipped steps."""

import torch

from ampkit import GradScaler, autocast


def main(steps: int = 40) -> GradScaler:
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)).to(device)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    scaler = GradScaler(device, growth_interval=10)
    inputs = torch.randn(64, 8, device=device)

    for step in range(steps):
        optimizer.zero_grad()
        with autocast(device.type, dtype=torch.float16):
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        scaler.scale(loss).backward()
        if step == 6:
            model[2].weight.grad[0, 0] = torch.nan  # to show a skipped step
        if step % 2:
            scaler.clip_grad_norm_(optimizer, max_norm=1.0)  # unscales, checks and clips
        else:
            scaler.clip_grad_value_(optimizer, clip_value=0.1)
        scaler.step(optimizer)
        scaler.update()
        if scaler.stepped(optimizer):
            schedule.step()
        else:
            print(f"step {step} was skipped:\n{scaler.overflow_report()}")

    print(f"loss {loss.item():.4f}; {scaler.stats()}")
    return scaler


if __name__ == "__main__":
    main()
