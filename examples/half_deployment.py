"""Deploy a trained model in half precision: check, convert, compare.

`check_half` shows that module "0" loses digits; `half` converts the model and keeps that module in
float32. The deployed model is called with the same float32 inputs as before.

    python examples/half_deployment.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from ampkit.half_precision.check_half import check_half
from ampkit.half_precision.half import BATCH_NORMS, half


class Calibrate(nn.Module):
    """Scales sensor values by way of a large offset, next to which half precision loses their digits."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.tensor(1000.0))

    def forward(self, x: Tensor) -> Tensor:
        return (x / 16 + self.offset) - self.offset


def train(x: Tensor, y: Tensor) -> nn.Module:
    """Return a small network in float32."""
    model = nn.Sequential(Calibrate(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval()


def main(dtype: torch.dtype = torch.float16) -> dict[str, float]:
    """Train, report, convert; return the fraction of predictions that conversion changed."""
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32), torch.tensor(labels)
    model = train(x[::2], y[::2])
    print(check_half(model, x[:64], dtype), end="\n\n")
    changed = {}
    with torch.no_grad():
        expected = model(x[1::2]).argmax(1)
        for name, keep in (("all half", BATCH_NORMS), ("0 in float32", (*BATCH_NORMS, "0"))):
            deployed = half(model, dtype, keep)
            changed[name] = (deployed(x[1::2]).argmax(1) != expected).double().mean().item()
            size = sum(p.nbytes for p in deployed.parameters()) / sum(p.nbytes for p in model.parameters())
            print(f"{name}: {changed[name]:.1%} of answers changed, {size:.0%} of the bytes")
    return changed


if __name__ == "__main__":
    main()
