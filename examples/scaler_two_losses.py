"""Two losses, two models, two optimizers, one scaler: optimizers skip separately, the scale backs off once."""

import torch

from ampkit import GradScaler, autocast


def main(steps: int = 20) -> dict[str, float]:
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    encoder, critic = torch.nn.Linear(8, 4).to(device), torch.nn.Linear(4, 1).to(device)
    optimizers = [
        torch.optim.SGD(encoder.named_parameters(), lr=0.1),
        torch.optim.AdamW(critic.named_parameters(), lr=0.01),
    ]
    scaler = GradScaler(device)
    inputs = torch.randn(32, 8, device=device)

    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with autocast(device.type, dtype=torch.float16):
            code = encoder(inputs)
            spread = code.square().mean()
            score = (critic(code) - inputs.mean(1, keepdim=True)).square().mean()
        scaler.scale(spread).backward(retain_graph=True)
        scaler.scale(score).backward()
        scaler.unscale_(optimizers[0])  # needed only to read or change gradients before the step
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()  # once, after all steps

    print(f"spread {spread.item():.4f}, score {score.item():.4f}; {scaler.stats()}")
    return {"spread": spread.item(), "score": score.item(), "steps": scaler.stats().steps}


if __name__ == "__main__":
    main()
