"""A gradient penalty: the inner gradients are scaled as well; divide them by the scale before they enter the loss."""

import torch

from ampkit import GradScaler, autocast


def main(steps: int = 20) -> float:
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = GradScaler(device, init_scale=2.0**10)
    inputs = torch.randn(32, 6, device=device)

    for _ in range(steps):
        optimizer.zero_grad()
        with autocast(device.type, dtype=torch.float16):
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        # The scaler unscales only gradients in `.grad`, not the results of autograd.grad.
        scaled = torch.autograd.grad(scaler.scale(loss), list(model.parameters()), create_graph=True)
        grads = [grad / scaler.get_scale() for grad in scaled]
        with autocast(device.type, dtype=torch.float16):
            penalty = sum(grad.square().sum() for grad in grads) ** 0.5
            total = loss + 0.01 * penalty
        scaler.scale(total).backward()
        scaler.step(optimizer)
        scaler.update()

    print(f"loss {loss.item():.4f}, gradient norm {penalty.item():.4f}; {scaler.stats()}")
    return loss.item()


if __name__ == "__main__":
    main()
