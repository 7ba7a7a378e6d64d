"""Compile a model with its region ahead of time by AOTInductor, and run the package without ampkit's regions.

It needs a C++ compiler, and on a GPU Triton. `python examples/export_aotinductor.py model.pt2`
"""

import sys

import torch
from torch import nn

from ampkit import autocast


class Classifier(nn.Module):
    """Opens the region in `forward`, so that it is exported as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with autocast(x.device.type, torch.bfloat16):
            return self.layers(x).float()


def main(path: str = "model.pt2") -> float:
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    model, batch = Classifier().to(device).eval(), torch.randn(8, 16, device=device)
    with torch.no_grad():
        exported = torch.export.export(model, (batch,))
        package = torch._inductor.aoti_compile_and_package(exported, package_path=path)
        error = (torch._inductor.aoti_load_package(package)(batch) - model(batch)).abs().max().item()
    print(f"{package}: differs from eager code by at most {error:.2g}")
    return error


if __name__ == "__main__":
    main(*sys.argv[1:])
