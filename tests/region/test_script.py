"""Regions and TorchScript: scripted code obeys an eager region; a region itself cannot be scripted, and says so."""

import pytest
import torch
from torch import Tensor, nn

from ampkit import Policy, Rule, WeightCache, autocast
from tests.helpers.regions import like_torch

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:.*TracerWarning")
TORCH = Policy.torch("cpu")


def product(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(torch.mm(x, w), -1)


def with_no_region(x: Tensor, w: Tensor) -> Tensor:
    return torch.mm(x, w)


@pytest.mark.parametrize("policy", [TORCH, None, TORCH.with_rules({"aten::softmax.int": Rule.FLOAT32})], ids=str)
def test_a_scripted_function_obeys_the_region(policy: Policy | None) -> None:
    """Also after the executor has specialised it, and outside again."""
    scripted, x, w = torch.jit.script(product), torch.randn(3, 4), torch.randn(4, 4)
    for _ in range(4):
        with autocast("cpu", policy=policy):
            assert torch.equal(scripted(x, w), product(x, w))
            assert scripted(x, w).dtype is product(x, w).dtype
        assert torch.equal(scripted(x, w), product(x, w))


def test_torchscript_casts_the_products_of_its_own_list_before_any_policy_sees_them() -> None:
    """Documented, not wanted: TorchScript rewrites its graph when autocast is on. A rule can only cast up again."""
    scripted, x, w = torch.jit.script(with_no_region), torch.randn(3, 4), torch.randn(4, 4)
    with autocast("cpu", policy=TORCH.with_rules({"aten::mm": Rule.KEEP})):
        assert (with_no_region(x, w).dtype, scripted(x, w).dtype) == (torch.float32, torch.bfloat16)
    with autocast("cpu", policy=TORCH.with_rules({"aten::mm": Rule.FLOAT32})):
        assert scripted(x, w).dtype is torch.float32


def test_a_decorated_function_cannot_be_scripted() -> None:
    @autocast("cpu")
    def decorated(x: Tensor) -> Tensor:
        return torch.mm(x, x)

    with pytest.raises(RuntimeError, match=r"ampkit\.autocast is not supported in script mode"):
        torch.jit.script(decorated)

    class Net(nn.Module):
        @autocast("cpu")
        def forward(self, x: Tensor) -> Tensor:
            return torch.mm(x, x)

    with pytest.raises(RuntimeError, match=r"decorate\.py"):
        torch.jit.script(Net())


def test_trace_inside_a_region() -> None:
    """With its cache on, torch.amp cannot trace a module twice used; ours steps aside while tracing."""
    layer, x = nn.Linear(4, 4), torch.randn(3, 4)
    twice = nn.Sequential(layer, layer)
    with torch.autocast("cpu"):
        layer(x)
        with pytest.raises(RuntimeError, match="Tensor that requires grad as a constant"):
            torch.jit.trace(twice, x, check_trace=False)
    for options in ({"cache_enabled": False}, {}, {"cache": WeightCache()}):
        with like_torch(**options):
            wanted = twice(x)
            traced = torch.jit.trace(twice, x)
        assert torch.equal(traced(x), wanted)
        assert traced(x).dtype is torch.bfloat16
        with torch.no_grad():
            layer.weight.mul_(0.5)
        assert not torch.equal(traced(x), wanted), "a cast weight was baked into the trace"
