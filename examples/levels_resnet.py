"""Apex's usage for image models: `initialize(..., opt_level)` once, `scale_loss` around backward.

A script with `from apex import amp` changes that line and nothing else. The network is a small residual
one, the data scikit-learn's digits.

    python examples/levels_resnet.py --opt-level O1
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from ampkit import amp


class Block(nn.Module):
    """Two convolutions with batch norm and a shortcut."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.short = nn.Identity() if stride == 1 and width_in == width else nn.Conv2d(width_in, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(inner + self.short(x))


def resnet(width: int = 12) -> nn.Module:
    """Return a ResNet for 8 by 8 images."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, 1, 1),
        Block(width, width, 1),
        Block(width, 2 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 10),
    )


def main(opt_level: str = "O1", epochs: int = 4, device: str = "cpu") -> float:
    """Train and return the share of held-out digits that is recognized."""
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32, device=device).view(-1, 1, 8, 8) / 16
    y = torch.tensor(labels, device=device)
    held_out = torch.arange(len(y), device=device) % 5 == 0
    train_x, train_y = x[~held_out], y[~held_out]

    model = resnet().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-4)
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)

    for epoch in range(epochs):
        model.train()
        for rows in torch.randperm(len(train_y)).split(64):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(train_x[rows]), train_y[rows])
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 5.0)
            optimizer.step()
        scheduler.step()
        model.eval()
        with torch.no_grad():
            accuracy = (model(x[held_out]).argmax(1) == y[held_out]).double().mean().item()
        print(f"epoch {epoch}: loss {loss.item():.3f}, accuracy {accuracy:.1%}")

    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict(optimizer)}
    print(f"checkpoint in {checkpoint['model']['0.weight'].dtype}, weights in {model[0].weight.dtype}")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--opt-level", default="O1")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    main(options.opt_level, options.epochs, options.device)
