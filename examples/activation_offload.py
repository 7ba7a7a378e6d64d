"""Activation offload: `torch.autograd.graph.save_on_cpu` around forward moves the saved tensors to the host.

In a region these are half of the bytes of float32. The gradients are bitwise identical to the gradients without
offload.
"""

import torch
from torch import nn

from ampkit import autocast


def main() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)
    batch = torch.randn(32, 64, device=device)
    gradients = []
    for offload in (False, True):
        model.zero_grad()
        with autocast(device.type, torch.bfloat16):
            if offload:
                with torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda"):
                    result = model(batch)
            else:
                result = model(batch)
            loss = (result - batch).square().mean()
        loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    plain, offloaded = gradients
    equal = all(map(torch.equal, plain, offloaded))
    print(f"loss {loss.item():.4f}; gradients with and without offload are {'equal' if equal else 'different'}")
    return plain, offloaded


if __name__ == "__main__":
    main()
