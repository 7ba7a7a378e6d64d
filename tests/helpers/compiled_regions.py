"""Functions with regions inside, to compile and export. Their eager results are the oracle."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampkit import Policy, Rule, autocast

TORCH = Policy.torch("cpu")
RULES = TORCH.with_rules({"aten::layer_norm": Rule.FLOAT32, "aten::gelu": Rule.FLOAT32, "aten::softmax.int": Rule.KEEP})


class Net(nn.Module):
    """Matrix products around a normalization: each policy here casts differently in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.gelu(self.norm(self.first(x))))


def module_rules(net: nn.Module) -> Policy:
    """Rules for the modules of a `Net`."""
    return TORCH.for_modules(net, {"norm": "float32", "last": torch.float16})


def outputs(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = net(x)
    return y, torch.softmax(y, -1), F.cross_entropy(y, torch.zeros(len(y), dtype=torch.long))


def plain(policy: Policy | None) -> Callable[..., Any]:
    def function(net: nn.Module, x: Tensor) -> Any:
        with autocast("cpu", policy=policy):
            return outputs(net, x)

    return function


def disabled_regions(net: Any, x: Tensor) -> Any:
    """Regions in a region: of another dtype, disabled, and torch's."""
    with autocast("cpu", torch.bfloat16):
        y = net.first(x)
        with autocast("cpu", enabled=False):
            y = net.norm(y.float())
        with autocast("cpu", torch.float16):
            half = net.last(y)
        with torch.autocast("cpu", enabled=False):
            plain = net.last(y)
        with torch.autocast("cpu", dtype=torch.float16):
            ours = net.last(y)
    return half, plain, ours


def made_inside(net: nn.Module, x: Tensor) -> Any:
    with autocast("cpu", policy=Policy.torch("cpu")):
        return outputs(net, x)


# Each value makes the function for a net.
INSIDE: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "torch": lambda net: plain(TORCH),
    "default": lambda net: plain(None),
    "with_rules": lambda net: plain(RULES),
    "for_modules": lambda net: plain(module_rules(net)),
    "disabled_regions": lambda net: disabled_regions,
    "decorated": lambda net: autocast("cpu", policy=RULES)(outputs),
    "made inside": lambda net: made_inside,
}


def step(function: Callable[..., Any], net: nn.Module, x: Tensor) -> list[Tensor]:
    """Outputs, and the gradients of their squares by the input and every parameter."""
    x = x.clone().requires_grad_()
    result = function(net, x)
    outputs = [result] if isinstance(result, Tensor) else list(result)
    leaves = [x, *net.parameters()]
    gradients = torch.autograd.grad(sum(out.float().square().sum() for out in outputs), leaves)  # type: ignore[arg-type]
    return [out.detach() for out in outputs] + list(gradients)


def assert_same(got: list[Tensor], wanted: list[Tensor], *, exact: bool = True) -> None:
    """Equal dtypes and values."""
    # 1e-6 is exact for the two 16-bit dtypes; AOTAutograd may add up float32 gradients in another order.
    torch.testing.assert_close(got, wanted, rtol=1e-6 if exact else 0.05, atol=1e-5 if exact else 0.05)
