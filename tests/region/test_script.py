"""Regions and TorchScript: scripted code obeys an eager region; a region itself cannot be scripted, and says so."""

import pytest
import torch
from torch import Tensor, nn

from ampkit import Policy, Rule, WeightCache, autocast

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:.*TracerWarning")
TORCH = Policy.torch("cpu")


def product(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(torch.mm(x, w), -1)


def with_no_region(x: Tensor, w: Tensor) -> Tensor:
    return torch.mm(x, w)


def with_region(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu"):
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


def test_a_scripted_module_obeys_the_region_with_gradients() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    scripted, x = torch.jit.script(net), torch.randn(3, 4)
    for _ in range(3):
        found = []
        for module in (net, scripted):
            with autocast("cpu", policy=TORCH):
                loss = module(x).float().square().sum()
            found.append(torch.autograd.grad(loss, list(net.parameters())))
        for a, b in zip(*found, strict=True):
            assert a.dtype is b.dtype is torch.float32
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_torch_regions_in_scripted_code_still_work() -> None:
    scripted, x, w = torch.jit.script(with_region), torch.randn(3, 4), torch.randn(4, 4)
    assert scripted(x, w).dtype is torch.bfloat16
    with autocast("cpu", torch.float16, policy=TORCH):
        assert torch.mm(x, w).dtype is torch.float16


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


@pytest.mark.parametrize("cache", [True, False, "kept"])
def test_tracing_in_a_region(cache: bool | str) -> None:
    """Two uses of one weight: torch's trace has to be made with the cache off; here either works."""
    net, x = nn.Linear(4, 4), torch.randn(3, 4)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            return self.net(torch.relu(self.net(x)))

    kept = WeightCache() if cache == "kept" else None
    region = autocast("cpu", cache_enabled=bool(cache), policy=TORCH, cache=kept)
    twice = Twice()
    with region:
        wanted = twice(x)
        traced = torch.jit.trace(twice, x)
    assert torch.equal(traced(x), wanted)
    assert traced(x).dtype is torch.bfloat16
    with torch.no_grad():
        net.weight.zero_()
    assert not torch.equal(traced(x), wanted), "a cast weight was baked into the trace"
