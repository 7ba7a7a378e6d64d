"""Where backward looks for its state: in the region of its caller, under custom_fwd and custom_bwd in the forward's."""

import contextlib
import threading
from collections import OrderedDict, namedtuple
from types import MappingProxyType

import pytest
import torch
import torch.nn.functional as F

import ampkit
from ampkit import Policy, autocast
from tests.helpers.regions import BF16, FP16, FP32, both, like_torch, state


def gradients(region, backward_region=None):
    """Gradients of two layers, backward outside or in another region."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    with region:
        loss = F.mse_loss(model(torch.randn(8, 16)), torch.zeros(8, 4))
    with backward_region or contextlib.nullcontext():
        loss.backward()
    return [p.grad for p in model.parameters()]


def here(device: str = "cpu") -> tuple[bool, torch.dtype, torch.dtype]:
    """Enabled, dtype, and the dtype that a product comes out in."""
    product = torch.mm(torch.ones(2, 2, device=device), torch.ones(2, 2, device=device))
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), product.dtype


class Probe(torch.autograd.Function):
    """Notes the state in backward, and whether that runs in the main thread."""

    seen: list[tuple[object, bool]] = []

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Probe.seen.append((here(gradient.device.type), threading.current_thread() is threading.main_thread()))
        return gradient


def backward_state(region, forward, backward):
    x = torch.ones(2, requires_grad=True)
    with region("cpu", **forward):
        y = Probe.apply(x)
    with region("cpu", **backward):
        y.sum().backward()
    return Probe.seen.pop()[0]


@both
def test_backward_sees_the_state_of_its_caller(region):
    """Not that of the forward."""
    assert backward_state(region, {}, {"enabled": False}) == (False, BF16, FP32)
    assert backward_state(region, {"enabled": False}, {}) == (True, BF16, BF16)
    assert backward_state(region, {"dtype": BF16}, {"dtype": FP16}) == (True, FP16, FP16)


def test_backward_sees_the_policy_of_its_caller():
    keeps = Policy.default("cpu").with_rules({"aten::mm": "keep"})
    assert backward_state(autocast, {}, {"policy": keeps}) == (True, BF16, FP32)
    assert backward_state(autocast, {"policy": keeps}, {}) == (True, BF16, BF16)


def test_float32_forward_and_backward_in_a_region():
    """float32 in dtype, low in accuracy. Backward's own products are cast, as with torch.amp: call backward outside."""
    exact = gradients(torch.autocast("cpu", enabled=False))
    theirs = gradients(torch.autocast("cpu", enabled=False), torch.autocast("cpu"))
    ours = gradients(autocast("cpu", enabled=False), like_torch())
    assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))
    assert all(g.dtype is FP32 for g in ours)
    assert not all(torch.equal(a, b) for a, b in zip(exact, ours, strict=True))


@pytest.mark.gpu
def test_backward_threads_see_the_policy_of_their_caller():
    """On CUDA backward runs in a thread of its own."""
    keeps = Policy.default("cuda").with_rules({"aten::mm": "keep"})
    for policy, expected in ((None, BF16), (keeps, FP32)):
        with autocast("cuda", BF16, policy=policy):
            Probe.apply(torch.ones(2, device="cuda", requires_grad=True)).sum().backward()
        assert Probe.seen.pop() == ((True, BF16, expected), False)


# custom_fwd and custom_bwd


TORCH = (torch.autocast, torch.amp.custom_fwd, torch.amp.custom_bwd)
AMPKIT = (autocast, ampkit.custom_fwd, ampkit.custom_bwd)
decorators = pytest.mark.parametrize(("region", "fwd", "bwd"), [TORCH, AMPKIT], ids=["torch", "ampkit"])


def classic(fwd, bwd, cast_inputs=None):
    """A function that notes the state and the dtypes it sees."""
    seen = {}

    class Function(torch.autograd.Function):
        @staticmethod
        @fwd(device_type="cpu", cast_inputs=cast_inputs)
        def forward(ctx, x, other=None):
            seen["forward"] = here()
            seen["input"] = x.dtype
            seen["other"] = other
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        @bwd(device_type="cpu")
        def backward(ctx, gradient):
            seen["backward"] = here()
            return gradient.to(ctx.saved_tensors[0].dtype), None

    return Function, seen


def with_setup_context(fwd, bwd, cast_inputs=None):
    seen = {}

    class Function(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        @fwd(device_type="cpu", cast_inputs=cast_inputs)
        def forward(x, factor):
            seen["forward"] = here()
            seen["input"] = x.dtype
            return x * factor

        @staticmethod
        @fwd(device_type="cpu", cast_inputs=cast_inputs)
        def setup_context(ctx, inputs, output):
            ctx.factor = inputs[1]

        @staticmethod
        @bwd(device_type="cpu")
        def backward(ctx, gradient):
            seen["backward"] = here()
            return gradient * ctx.factor, None

    return Function, seen


@decorators
def test_forward_sees_the_region_and_backward_goes_back_to_it(region, fwd, bwd):
    """Without cast_inputs; enabled and dtype are replayed."""
    function, seen = classic(fwd, bwd)
    x = torch.ones(2, 2, requires_grad=True)
    before = state()
    with region("cpu", FP16):
        y = function.apply(x)
    y.sum().backward()
    assert seen["forward"] == seen["backward"] == (True, FP16, FP16)
    with region("cpu", BF16):
        function.apply(x).sum().backward()
    with region("cpu", FP16):
        y = function.apply(x)
    with region("cpu", BF16):
        y.sum().backward()
    assert seen["backward"] == (True, FP16, FP16)
    y = function.apply(x)
    with region("cpu"):
        y.sum().backward()
    assert seen["forward"] == seen["backward"] == (False, BF16, FP32)
    assert state() == before


def test_backward_goes_back_to_the_policy():
    """Also in another thread."""
    function, seen = classic(*AMPKIT[1:])
    keeps = Policy.default("cpu").with_rules({"aten::mm": "keep"})
    with autocast("cpu", policy=keeps):
        y = function.apply(torch.ones(2, 2, requires_grad=True)).sum()
    with autocast("cpu"):
        y.backward(retain_graph=True)
    assert seen.pop("backward") == (True, BF16, FP32)
    thread = threading.Thread(target=y.backward)
    thread.start()
    thread.join()
    assert seen["backward"] == (True, BF16, FP32)


@decorators
def test_cast_inputs(region, fwd, bwd):
    """In a region eligible arguments are cast, and autocast is off inside, forward and backward; outside nothing is."""
    function, seen = classic(fwd, bwd, FP32)
    x = torch.ones(2, 2, dtype=BF16, requires_grad=True)
    with region("cpu"):
        y = function.apply(x, torch.ones(2, dtype=FP16))
        assert here() == (True, BF16, BF16)
        assert seen["input"] is FP32
        assert seen["other"].dtype is FP32
        y.sum().backward()
    assert seen["forward"] == seen["backward"] == (False, BF16, FP32)
    for enabled in (None, False):
        with contextlib.nullcontext() if enabled is None else region("cpu", enabled=enabled):
            y = function.apply(x)
        y.sum().backward()
        assert seen["input"] is BF16
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
        @staticmethod
        def forward(ctx, x):
            return x.clone()

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
    seen = []

    class Function(torch.autograd.Function):
        @staticmethod
        @ampkit.custom_fwd
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        @ampkit.custom_bwd
        def backward(ctx, gradient):
            seen.append(torch.is_autocast_enabled(ampkit.autocast().device))
            return gradient

    with autocast():
        y = Function.apply(torch.ones(2, requires_grad=True))
    y.sum().backward()
    assert seen == [True]


@decorators
def test_setup_context(region, fwd, bwd):
    """It is decorated too: only it gets the `ctx` that backward has."""
    function, seen = with_setup_context(fwd, bwd)
    x = torch.ones(2, requires_grad=True)
    with region("cpu", FP16):
        y = function.apply(x, 3.0)
    with region("cpu", BF16):
        z = function.apply(x, 2.0)
    z.sum().backward()
    assert seen["backward"] == (True, BF16, BF16)
    y.sum().backward()
    assert seen["backward"] == (True, FP16, FP16)
    assert torch.equal(x.grad, torch.full((2,), 5.0))

    function, seen = with_setup_context(fwd, bwd, cast_inputs=FP32)
    with region("cpu"):
        function.apply(x.detach().bfloat16().requires_grad_(), 3.0).sum().backward()
    assert seen["input"] is FP32
    assert seen["forward"] == seen["backward"] == (False, BF16, FP32)


class Product(torch.autograd.Function):
    """Its backward multiplies as its forward did, by the rules of the region."""

    @staticmethod
    @ampkit.custom_fwd(device_type="cpu")
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    @ampkit.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return (grad @ b.t()).to(a.dtype), (a.t() @ grad).to(b.dtype)


class HalfProduct(torch.autograd.Function):
    @staticmethod
    @ampkit.custom_fwd(device_type="cpu", cast_inputs=FP16)
    def forward(ctx, a, b, times=1.0, options=None):
        ctx.save_for_backward(a, b)
        return a @ b * times

    @staticmethod
    @ampkit.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return (grad @ b.t()).float(), (a.t() @ grad).float(), None, None


KEEP = Policy.torch("cpu").with_rules({"aten::matmul": "keep", "aten::mm": "keep"})


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("policy", [None, KEEP], ids=["default", "keep"])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")     # of torch, which does so
@pytest.mark.parametrize("inside", [True, False])
def test_compiled(inside, policy, backend):
    """One graph, as with torch's decorators; its backward too goes back to the region's rules."""
    a, b = torch.randn(4, 6, requires_grad=True), torch.randn(6, 8, requires_grad=True)

    def products(a, b):
        return Product.apply(a, b), HalfProduct.apply(a, b, 2.0, {"names": ["a"], "tensor": b})

    def function(a, b):
        with autocast("cpu", policy=policy):
            return products(a, b)

    def run(compile):
        if inside:
            found = compile(function)(a, b)
        else:
            with autocast("cpu", policy=policy, cache_enabled=False):
                found = compile(products)(a, b)
        return *found, *torch.autograd.grad(sum(y.float().square().sum() for y in found), (a, b))

    torch._dynamo.reset()
    before = state()
    wanted = run(lambda function: function)
    got = run(lambda function: torch.compile(function, backend=backend, fullgraph=True))
    torch._dynamo.reset()
    assert state() == before
    assert [y.dtype for y in got[:2]] == [FP32 if policy is KEEP else BF16, FP16]
    assert all(map(torch.equal, got, wanted))
