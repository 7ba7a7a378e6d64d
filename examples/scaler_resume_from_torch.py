"""Continue a run of torch.amp.GradScaler with ampkit's GradScaler, and go back."""

import tempfile
from pathlib import Path

import torch

import ampkit


def train(model, optimizer, scaler, inputs, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        scaler.scale((model(inputs) - inputs.sum(1, keepdim=True)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()


def main() -> tuple[float, float]:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    inputs = torch.randn(64, 8)
    old = torch.amp.GradScaler("cpu", growth_interval=5)
    train(model, optimizer, old, inputs, 12)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        torch.save({"scaler": old.state_dict(), "model": model.state_dict()}, path)
        checkpoint = torch.load(path, weights_only=True)

    new = ampkit.GradScaler("cpu")
    new.load_state_dict(checkpoint["scaler"])  # scale, factors, interval and the count towards growth
    train(model, optimizer, new, inputs, 3)
    train(model, optimizer, old, inputs, 3)
    print(f"ampkit went on to scale {new.get_scale():g}, torch would have to {old.get_scale():g}")

    old.load_state_dict(new.state_dict())  # torch reads its own entries and ignores ampkit's
    return new.get_scale(), old.get_scale()


if __name__ == "__main__":
    main()
