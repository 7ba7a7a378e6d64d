"""Shared by the tests of `test_compile` and its neighbours."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampkit import Policy, Rule

EXACT = ("eager", "aot_eager")

TORCH = Policy.torch("cpu")

RULES = TORCH.with_rules({"aten::layer_norm": Rule.FLOAT32, "aten::gelu": Rule.FLOAT32, "aten::softmax.int": Rule.KEEP})


class Net(nn.Module):
    """Matrix products around a normalisation: every policy here treats it differently."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.gelu(self.norm(self.first(x))))


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """No compiled code from another test, and no region, mark or cache tag left behind by this one."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    assert not any(torch.is_autocast_enabled(device) for device in torch._C._autocast_supported_devices())
    assert torch.compiler.config.cache_key_tag == ""


def outputs(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = net(x)
    return y, torch.softmax(y, -1), F.cross_entropy(y, torch.zeros(len(y), dtype=torch.long))


def step(function: Callable[..., Any], net: nn.Module, x: Tensor) -> list[Tensor]:
    """Outputs, and the gradients of their squares by the input and every parameter."""
    x = x.clone().requires_grad_()
    found = function(net, x)
    found = [found] if isinstance(found, Tensor) else list(found)
    wanted = [x, *net.parameters()]
    gradients = torch.autograd.grad(sum(o.float().square().sum() for o in found), wanted)  # type: ignore[arg-type]
    return [o.detach() for o in found] + list(gradients)


def assert_same(got: list[Tensor], wanted: list[Tensor], *, exact: bool = True) -> None:
    assert [t.dtype for t in got] == [t.dtype for t in wanted]
    for a, b in zip(got, wanted, strict=True):
        # 1e-6 is exact for the two 16-bit dtypes; AOTAutograd may add up float32 gradients in another order.
        torch.testing.assert_close(a, b, rtol=1e-6 if exact else 0.05, atol=1e-5 if exact else 0.05)


def module_rules(net: nn.Module) -> Policy:
    """Rules for the modules of a `Net`."""
    return TORCH.for_modules(net, {"norm": "float32", "last": torch.float16})


def policies(net: nn.Module) -> tuple[Policy, ...]:
    """Policies that differ in what a `Net` computes."""
    return TORCH, Policy.default("cpu"), RULES, module_rules(net), TORCH.for_modules(net, {"last": "float32"})
