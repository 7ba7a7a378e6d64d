"""Regions beside TorchScript, registered operators, data parallelism and Dynamo. Numbers are the conformance list's.

Compilation has its own tests in `test_compile`.
"""

import pytest
import torch
from torch import nn

from ampkit import Policy, WeightCache, autocast, wrap_forward
from tests.helpers.regions import BF16, FP16, FP32, both, like_torch, state

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated"),
    pytest.mark.filterwarnings("ignore:`torch.jit.*` is not supported"),
]
X = torch.ones(4, 4)


# Module-level, because TorchScript reads their source.
def products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.mm(a, b)


def with_region_of_torch(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu"):
        return torch.mm(a, b)


def softmaxed(a: torch.Tensor) -> torch.Tensor:
    return torch.softmax(a, 0)


@both
def test_scripted_function_obeys_the_region(region):
    """A region of torch in the script, and a script inside a region, both cast."""
    scripted = torch.jit.script(products)
    for _ in range(4):      # the first runs are profiled, the later ones optimised
        assert scripted(X, X).dtype is FP32
        with region("cpu"):
            assert scripted(X, X).dtype is BF16
        with region("cpu", FP16):
            assert scripted(X, X).dtype is FP16


@both
def test_region_of_torch_in_a_scripted_function(region):
    """A region of torch in the script, and a script inside a region, both cast."""
    scripted = torch.jit.script(with_region_of_torch)
    before = state()
    for _ in range(3):
        assert scripted(X, X).dtype is BF16
        with region("cpu", enabled=False):
            assert scripted(X, X).dtype is BF16
        assert state() == before


def test_scripted_function_obeys_the_policy():
    """torch.amp's list does not name softmax on the CPU; ampkit's does, and in scripted code too."""
    scripted, half = torch.jit.script(softmaxed), X.bfloat16()
    for _ in range(4):
        with autocast("cpu"):
            assert scripted(half).dtype is FP32
        with like_torch():
            assert scripted(half).dtype is BF16


@both
def test_decorated_function_is_not_scripted(region):
    """A RuntimeError."""
    with pytest.raises(RuntimeError, match="not supported in script mode"):
        torch.jit.script(region("cpu")(products))


def test_trace_inside_a_region():
    """With its cache on, torch.amp cannot trace a module; ours steps aside while tracing."""
    layer = nn.Linear(4, 4)
    with torch.autocast("cpu", cache_enabled=False), torch.no_grad():
        expected = torch.jit.trace(layer, X, check_trace=False)
    with torch.autocast("cpu"):
        layer(X)
        with pytest.raises(RuntimeError, match="Tensor that requires grad as a constant"):
            torch.jit.trace(nn.Sequential(layer, layer), X, check_trace=False)

    for options in ({"cache_enabled": False}, {}, {"cache": WeightCache()}):
        with like_torch(**options):
            layer(X)
            traced = torch.jit.trace(nn.Sequential(layer, layer), X, check_trace=False)
        out = traced(X)
        assert out.dtype is BF16
        with like_torch():
            assert torch.equal(out, layer(layer(X)))
    assert expected(X).dtype is BF16


@pytest.fixture(scope="module")
def registered():
    """An operator that told torch which dtype it wants under autocast on the CPU."""
    @torch.library.custom_op("ampkit_tests::registered", mutates_args=())
    def registered(x: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:
        return x * 2

    registered.register_autocast("cpu", FP16)
    return registered


@both
def test_operator_that_registered_a_dtype(region, registered):
    """It casts to the dtype it registered, whatever the region's is."""
    assert registered(X, [X]).dtype is FP32
    for dtype in (BF16, FP16):
        with region("cpu", dtype):
            assert registered(X, [X]).dtype is FP16
            assert registered(X.double(), [X]).dtype is torch.float64
    with region("cpu", enabled=False):
        assert registered(X, [X]).dtype is FP32
    with region("cuda:0"):
        assert registered(X, [X]).dtype is FP32
    with pytest.raises(ValueError, match=r"does not support autocast|Unknown device type"):
        registered.register_autocast("meta", FP16)


def test_rule_goes_over_a_registered_dtype(registered):
    policy = Policy.default("cpu").with_rules({"ampkit_tests::registered": "lower"})
    with autocast("cpu", BF16, policy=policy):
        assert registered(X, [X]).dtype is BF16


@both
def test_compiled_product(region):
    """With backend='eager', in the region's dtype."""
    torch._dynamo.reset()
    compiled = torch.compile(products, backend="eager", fullgraph=True)
    with region("cpu"):
        assert compiled(X, X).dtype is BF16
    assert compiled(X, X).dtype is FP32
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_data_parallel_replicas():
    """torch.amp hands its replicas the flag and not the dtype; a wrapped module has both."""
    model, x = nn.Linear(4, 4).cuda(), torch.ones(4, 4, device="cuda")
    with torch.autocast("cuda", BF16):
        assert nn.DataParallel(model)(x).dtype is FP16
    wrap_forward(model, "cuda", BF16)
    assert nn.DataParallel(model)(x).dtype is BF16


def test_libraries_that_ask_torch_see_our_region():
    """What third-party code reads: flags, dtypes, and torch's own helpers built on them."""
    with autocast("cpu", FP16):
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is FP16
        assert torch._C._is_any_autocast_enabled()
        kept = torch.utils.checkpoint._get_autocast_kwargs("cpu")[1]
        assert (kept["enabled"], kept["dtype"]) == (True, FP16)
    assert not torch._C._is_any_autocast_enabled()
