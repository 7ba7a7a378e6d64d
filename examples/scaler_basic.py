"""The shortest loop with a loss scale: one model, one optimizer."""

import torch

from ampkit import GradScaler, autocast


def main(steps: int = 30) -> float:
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = GradScaler(device)
    inputs = torch.randn(64, 8, device=device)
    targets = inputs.sum(1, keepdim=True)

    for _ in range(steps):
        optimizer.zero_grad()
        with autocast(device.type, dtype=torch.float16):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    print(f"loss {loss.item():.4f}; {scaler.stats()}")
    return loss.item()


if __name__ == "__main__":
    main()
