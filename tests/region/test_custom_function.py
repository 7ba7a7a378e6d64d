"""The autocast state of backward: that of its caller, and under `custom_fwd` and `custom_bwd` that of the forward."""

import contextlib
import threading
from collections import OrderedDict, namedtuple
from types import MappingProxyType

import pytest
import torch
import torch.nn.functional as F

import ampkit
from ampkit import Policy, autocast
from tests.helpers.regions import BF16, FP16, FP32, REGIONS, like_torch

KEEPS = Policy.default("cpu").with_rules({"aten::mm": "keep"})


def here(device: str = "cpu") -> tuple[bool, torch.dtype, torch.dtype]:
    """Enabled, dtype, and the dtype that a product comes out in."""
    product = torch.mm(torch.ones(2, 2, device=device), torch.ones(2, 2, device=device))
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), product.dtype


@pytest.mark.parametrize(
    ("region", "forward", "backward", "expected"),
    [
        *((region, {}, {"enabled": False}, (False, BF16, FP32)) for region in REGIONS),
        *((region, {"enabled": False}, {}, (True, BF16, BF16)) for region in REGIONS),
        *((region, {"dtype": BF16}, {"dtype": FP16}, (True, FP16, FP16)) for region in REGIONS),
        (autocast, {}, {"policy": KEEPS}, (True, BF16, FP32)),
        (autocast, {"policy": KEEPS}, {}, (True, BF16, BF16)),
    ],
)
def test_backward_sees_the_state_of_its_caller(region, forward, backward, expected):
    """Not that of the forward."""
    seen = []
    with region("cpu", **forward):
        y = torch.ones(2, requires_grad=True).clone()
    y.register_hook(lambda _: seen.append(here()))
    with region("cpu", **backward):
        y.sum().backward()
    assert seen == [expected]


def test_float32_forward_and_backward_in_a_region():
    """float32 in dtype, low in accuracy. Backward's own products are cast, as with torch.amp: call backward outside."""
    model, x = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)), torch.randn(8, 16)
    gradients = []
    for region in (contextlib.nullcontext(), torch.autocast("cpu"), like_torch()):
        loss = F.mse_loss(model(x), torch.zeros(8, 4))
        with region:
            gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    exact, theirs, ours = gradients
    assert {gradient.dtype for gradient in ours} == {FP32}
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert False in [torch.equal(gradient, exactly) for gradient, exactly in zip(ours, exact, strict=True)]


@pytest.mark.gpu
def test_backward_threads_see_the_policy_of_their_caller():
    """On CUDA backward runs in a thread of its own."""
    keeps = Policy.default("cuda").with_rules({"aten::mm": "keep"})
    for policy, expected in ((None, BF16), (keeps, FP32)):
        seen, y = [], torch.ones(2, device="cuda", requires_grad=True).clone()
        y.register_hook(lambda _, seen=seen: seen.extend((here("cuda"), threading.current_thread())))
        with autocast("cuda", BF16, policy=policy):
            y.sum().backward()
        assert seen[0] == (True, BF16, expected)
        assert seen[1] is not threading.main_thread()


# custom_fwd and custom_bwd


TORCH = (torch.autocast, torch.amp.custom_fwd, torch.amp.custom_bwd)
AMPKIT = (autocast, ampkit.custom_fwd, ampkit.custom_bwd)
decorators = pytest.mark.parametrize(("region", "fwd", "bwd"), [TORCH, AMPKIT], ids=["torch", "ampkit"])
styles = pytest.mark.parametrize("classic", [True, False], ids=["with ctx", "setup_context"])


def noting(fwd, bwd, classic=True, cast_inputs=None, device_type="cpu"):
    """An autograd function and what it saw: the state, and the dtypes of its arguments.

    In the style of `setup_context` that is decorated too: only it gets the `ctx` that backward has.
    """
    seen, forward = {}, fwd(device_type=device_type, cast_inputs=cast_inputs)
    device = autocast(device_type).device

    def run(x, other):
        seen.update(forward=here(device), dtypes=(x.dtype, other.dtype))
        return x.clone()

    @bwd(device_type=device_type)
    def backward(ctx, gradient):
        seen["backward"] = here(device)
        return gradient, None

    body = {"forward": forward(lambda ctx, x, other: run(x, other)), "backward": backward}
    if not classic:
        body |= {"forward": forward(run), "setup_context": forward(lambda ctx, inputs, output: None)}
    return type("Function", (torch.autograd.Function,), {name: staticmethod(f) for name, f in body.items()}), seen


OTHER = torch.ones(2, dtype=FP16)


@decorators
@styles
def test_forward_sees_the_region_and_backward_goes_back_to_it(region, fwd, bwd, classic):
    """Without cast_inputs; enabled and dtype are replayed."""
    function, seen = noting(fwd, bwd, classic)
    x = torch.ones(2, 2, requires_grad=True)
    with region("cpu", FP16):
        first = function.apply(x, OTHER)
    first.sum().backward(retain_graph=True)
    assert seen["forward"] == seen["backward"] == (True, FP16, FP16)
    with region("cpu", BF16):
        function.apply(x, OTHER).sum().backward()
        assert seen["backward"] == (True, BF16, BF16)
        first.sum().backward()
    assert seen["backward"] == (True, FP16, FP16)
    y = function.apply(x, OTHER)
    with region("cpu"):
        y.sum().backward()
    assert seen["forward"] == seen["backward"] == (False, BF16, FP32)


def test_backward_goes_back_to_the_policy():
    """Also in another thread."""
    function, seen = noting(*AMPKIT[1:])
    with autocast("cpu", policy=KEEPS):
        y = function.apply(torch.ones(2, 2, requires_grad=True), OTHER).sum()
    with autocast("cpu"):
        y.backward(retain_graph=True)
    assert seen.pop("backward") == (True, BF16, FP32)
    thread = threading.Thread(target=y.backward)
    thread.start()
    thread.join()
    assert seen["backward"] == (True, BF16, FP32)


@decorators
@styles
def test_cast_inputs(region, fwd, bwd, classic):
    """In a region eligible arguments are cast, and autocast is off inside, forward and backward; outside nothing is."""
    function, seen = noting(fwd, bwd, classic, FP32)
    x = torch.ones(2, 2, dtype=BF16, requires_grad=True)
    with region("cpu"):
        y = function.apply(x, OTHER)
        assert here() == (True, BF16, BF16)
        y.sum().backward()
    assert seen == {"forward": (False, BF16, FP32), "backward": (False, BF16, FP32), "dtypes": (FP32, FP32)}
    for around in (contextlib.nullcontext(), region("cpu", enabled=False)):
        with around:
            y = function.apply(x, OTHER)
        y.sum().backward()
        assert seen["dtypes"] == (BF16, FP16)
        assert seen["forward"][0] is seen["backward"][0] is False


def cast_by(region, fwd, value):
    """What a forward gets for an argument."""
    with region("cpu"):
        forward = fwd(lambda ctx, value: value, device_type="cpu", cast_inputs=FP16)
        return forward(torch.autograd.function.FunctionCtx(), value)


def test_containers_that_torch_loses():
    """A namedtuple is a TypeError with torch, a mapping comes out as a dict, a set as a generator."""
    Pair = namedtuple("Pair", "a b")
    x = torch.ones(2)
    with pytest.raises(TypeError):
        cast_by(*TORCH[:2], Pair(x, 1))
    assert type(cast_by(*TORCH[:2], OrderedDict(k=x))) is dict
    pair = cast_by(*AMPKIT[:2], Pair(x, 1))
    assert (type(pair), pair.a.dtype, pair.b) == (Pair, FP16, 1)
    ordered = cast_by(*AMPKIT[:2], OrderedDict(k=x))
    assert (type(ordered), ordered["k"].dtype) == (OrderedDict, FP16)
    assert cast_by(*AMPKIT[:2], MappingProxyType({"k": x}))["k"].dtype is FP16
    assert cast_by(*AMPKIT[:2], {1, 2}) == {1, 2}


@decorators
def test_backward_without_forward(region, fwd, bwd):
    class Function(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: x.clone())

        @staticmethod
        @bwd(device_type="cpu")
        def backward(ctx, gradient):
            return gradient

    message = r"Function.backward has custom_bwd.*custom_fwd; decorate both" if region is autocast else None
    with pytest.raises(AttributeError, match=message):
        Function.apply(torch.ones(2, requires_grad=True)).sum().backward()
    with pytest.raises(ValueError, match="device_type"):
        bwd(lambda ctx, x: x, device_type=torch.device("cpu"))


def test_device_type_may_be_left_out():
    function, seen = noting(*AMPKIT[1:], device_type=None)
    with autocast():
        y = function.apply(torch.ones(2, requires_grad=True), OTHER)
    y.sum().backward()
    assert seen["forward"] == seen["backward"]
    assert seen["backward"][0] is True


def product(cast_inputs):
    """A product whose backward multiplies as its forward did, by the rules of the region or in a dtype."""

    class Product(torch.autograd.Function):
        @staticmethod
        @ampkit.custom_fwd(device_type="cpu", cast_inputs=cast_inputs)
        def forward(ctx, a, b, times=1.0, options=None):
            ctx.save_for_backward(a, b)
            return a @ b * times

        @staticmethod
        @ampkit.custom_bwd(device_type="cpu")
        def backward(ctx, grad):
            a, b = ctx.saved_tensors
            return (grad @ b.t()).float(), (a.t() @ grad).float(), None, None

    return Product


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("rules", ["default", "keep"])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch, which does so
@pytest.mark.parametrize("inside", [True, False])
def test_compiled(inside, rules, backend):
    """One graph, as with torch's decorators; its backward too goes back to the region's rules."""
    a, b = torch.randn(4, 6, requires_grad=True), torch.randn(6, 8, requires_grad=True)
    keep = Policy.torch("cpu").with_rules({"aten::matmul": "keep", "aten::mm": "keep"})
    region = autocast("cpu", policy=keep if rules == "keep" else None, cache_enabled=inside)
    ambient, half = product(None), product(FP16)

    def products(a, b):
        return ambient.apply(a, b), half.apply(a, b, 2.0, {"names": ["a"], "tensor": b})

    def run(compile):
        outputs = (compile(region(products)) if inside else region(compile(products)))(a, b)
        return *outputs, *torch.autograd.grad(sum(y.float().square().sum() for y in outputs), (a, b))

    wanted = run(lambda function: function)
    got = run(lambda function: torch.compile(function, backend=backend, fullgraph=True))
    assert [y.dtype for y in got[:2]] == [FP32 if rules == "keep" else BF16, FP16]
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
