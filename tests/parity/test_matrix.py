"""Regions beside everything else that torch does: programs that have torch.amp's bits, and the default policy near.

A program is a function of a region that returns tensors. It runs under torch.autocast and under ampkit with torch's
list, which must agree to the bit; and under ampkit's default policy, which must be as near to float32 as bfloat16
allows. At the end: modes that watch or replace what runs.
"""

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from ampkit import autocast
from tests.helpers.regions import like_torch as ours
from tests.helpers.training import Region, native

Program = Callable[[Region], Any]

# torch's own: what forward-mode differentiation, linearize and nested tensors say when they are used.
pytestmark = [
    pytest.mark.filterwarnings(r"ignore:`torch\.jit\.\w+` is (deprecated|not supported)"),
    pytest.mark.filterwarnings(r"ignore:Attempted to insert a get_attr Node:UserWarning"),
    pytest.mark.filterwarnings(r"ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"),
]
PROGRAMS: dict[str, Program] = {}
default = functools.partial(autocast, "cpu")


def program(function: Program) -> Program:
    """Add a function to the programs."""
    PROGRAMS[function.__name__] = function
    return function


class Net(nn.Module):
    """Linear, layer norm, tanh, linear: (..., 6) to (..., 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm, self.leave = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.norm(self.enter(x))))


def gradients(model: nn.Module) -> list[Tensor]:
    """The gradients of the parameters of a model that have one."""
    return [p.grad for p in model.parameters() if p.grad is not None]


def weights() -> tuple[Tensor, Tensor, Tensor]:
    """An input and two weight matrices, leaves without gradients, for functional transforms."""
    return torch.randn(4, 6), torch.randn(8, 6) / 3, torch.randn(3, 8) / 3


def run(program: Program, region: Region) -> list[Tensor]:
    """Every tensor in a program's answer, from the same seed."""
    torch.manual_seed(0)
    tensors = [leaf.detach() for leaf in tree_leaves(program(region)) if isinstance(leaf, Tensor)]
    assert tensors, "the program returned nothing to compare"
    return tensors


# --- autograd: grad modes, double backward, hooks


@program
def double_backward_inside(region: Region) -> Any:
    model, x = Net(), torch.randn(4, 6, requires_grad=True)
    with region():
        out = model(x).float().pow(2).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        (out + slope.norm()).backward()
    return slope, x.grad, gradients(model)


@program
def gradient_penalty(region: Region) -> Any:
    """Gradient outside the region, its penalty inside: torch's own recipe."""
    model, x = Net(), torch.randn(4, 6)
    with region():
        loss = model(x).float().pow(2).sum()
    slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    with region():
        penalty = sum((slope.pow(2).sum() for slope in slopes), loss.new_zeros(())).sqrt()
        loss = loss + penalty
    loss.backward()
    return loss, gradients(model)


@program
def partly_frozen(region: Region) -> Any:
    model, x = Net(), torch.randn(4, 6)
    model.enter.requires_grad_(False)
    with region():
        out = model(x)
        model.enter.requires_grad_(True)
        again = model(x)
    (out + again).float().sum().backward()
    return out, again, gradients(model)


@program
def hooks_of_every_kind(region: Region) -> Any:
    model, x, seen = Net(), torch.randn(4, 6), []

    def keep(*values: Any) -> None:
        seen.extend(v.detach().clone() for v in tree_leaves(values) if isinstance(v, Tensor))

    model.enter.register_forward_pre_hook(lambda module, args: keep(args))
    model.enter.register_forward_hook(lambda module, args, out: keep(args, out))
    model.norm.register_full_backward_pre_hook(lambda module, grad: keep(grad))
    model.norm.register_full_backward_hook(lambda module, grad_in, grad_out: keep(grad_in, grad_out))
    model.leave.weight.register_hook(lambda grad: keep(grad))
    model.enter.weight.register_post_accumulate_grad_hook(lambda p: keep(p.grad))
    with region():
        out = model(x)
        out.register_hook(lambda grad: 2 * grad)
        hidden = out.float()
    assert out.grad_fn is not None
    out.grad_fn.register_prehook(lambda grads: keep(grads))
    hidden.sum().backward()
    return out, seen, gradients(model)


# --- modules: parametrizations, copies, optimizers, scripts


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@program
def parametrizations(region: Region) -> Any:
    model, x = (
        nn.Sequential(
            weight_norm(nn.Linear(6, 6)), spectral_norm(nn.Linear(6, 6)), orthogonal(nn.Linear(6, 6)), nn.Linear(6, 6)
        ),
        torch.randn(4, 6),
    )
    parametrize.register_parametrization(model[3], "weight", Doubled())
    with region():
        out = model(x)
    out.float().sum().backward()
    return out, gradients(model)


@program
def encoder_fast_path(region: Region) -> Any:
    """Evaluation of torch's own transformer layers, where it may take a fused operator."""
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False
    ).eval()
    attention, x = nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(2, 5, 8)
    with torch.inference_mode(), region():
        return encoder(x), attention(x, x, x, need_weights=False)[0]


# --- tensors that are not plain: sparse, complex, nested, subclasses, out= and in place


@program
def sparse_embedding_gradients(region: Region) -> Any:
    embedding, head = nn.Embedding(10, 6, sparse=True), nn.Linear(6, 3)
    with region():
        out = head(embedding(torch.tensor([1, 3, 3, 7])))
    out.float().sum().backward()
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.is_sparse
    return out, embedding.weight.grad.to_dense(), gradients(head)


@program
def complex_numbers(region: Region) -> Any:
    """Complex tensors are not autocast's; the real ones beside them are."""
    z = torch.randn(4, 6, dtype=torch.complex64, requires_grad=True)
    model = Net()
    with region():
        product = z @ z.conj().T
        magnitude = model(torch.view_as_real(z).sum(-1))
        spectrum = torch.fft.fft(magnitude.float()).abs()
    (product.abs().sum() + spectrum.sum()).backward()
    assert z.grad is not None
    return torch.view_as_real(product.detach()), magnitude, spectrum, torch.view_as_real(z.grad), gradients(model)


@program
def jagged_nested_tensors(region: Region) -> Any:
    model = nn.Linear(6, 3)
    rows = [torch.randn(2, 6, requires_grad=True), torch.randn(3, 6, requires_grad=True)]
    ragged = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    with region():
        out = model(ragged)
    out.values().float().sum().backward()
    return out.values(), [row.grad for row in rows], gradients(model)


@program
def tensor_subclass(region: Region) -> Any:
    """A wrapper subclass stays one through casts, and the two tensors inside are cast alike."""
    x = TwoTensor(torch.randn(4, 6), torch.randn(4, 6))
    weight = torch.randn(3, 6, requires_grad=True)
    with region():
        out = F.linear(x, weight)
    assert isinstance(out, TwoTensor)
    out.float().sum().backward()
    return out.a, out.b, weight.grad.a if isinstance(weight.grad, TwoTensor) else weight.grad


@program
def torch_function_subclass(region: Region) -> Any:
    class Named(Tensor):
        pass

    x, model = torch.randn(4, 6).as_subclass(Named), Net()
    with region():
        out = model(x)
    assert type(out) is Named
    out.float().sum().backward()
    return out.as_subclass(Tensor), gradients(model)


@program
def out_and_in_place(region: Region) -> Any:
    """What the caller writes to keeps its dtype: those variants are never cast."""
    x, w = torch.randn(4, 6), torch.randn(6, 6)
    product, base = torch.empty(4, 6), torch.ones(4, 6)
    with region():
        torch.mm(x, w, out=product)
        base.addmm_(x, w)
        return product, base, base.exp_()


# --- functional transforms: torch.func, torch.autograd.functional, functional calls


def loss_of(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """A smooth scalar with a matrix product, a softmax and a reduction in it."""
    return F.linear(torch.tanh(F.linear(x, w)), v).softmax(-1).pow(2).sum()


# Those that random programs do not have.
TRANSFORMS: dict[str, Callable[[Callable[..., Tensor], Tensor, Tensor, Tensor], Any]] = {
    "vmap_weights": lambda f, w, v, x: torch.vmap(f, (0, None, None))(torch.stack([w, 2 * w]), v, x),
    "vjp": lambda f, w, v, x: torch.func.vjp(f, w, v, x)[1](torch.ones(())),
    "jacrev": lambda f, w, v, x: torch.func.jacrev(f)(w, v, x),
    "jacfwd": lambda f, w, v, x: torch.func.jacfwd(f, argnums=1)(w, v, x),
    "hessian": lambda f, w, v, x: torch.func.hessian(f, argnums=1)(w, v, x),
    "grad_of_grad": lambda f, w, v, x: torch.func.grad(lambda w: torch.func.grad(f)(w, v, x).pow(2).sum())(w),
    "functionalize": lambda f, w, v, x: torch.func.functionalize(f)(w, v, x),
    "linearize": lambda f, w, v, x: torch.func.linearize(f, w, v, x)[1](torch.ones_like(w), torch.ones_like(v), x),
    "autograd_hessian": lambda f, w, v, x: torch.autograd.functional.hessian(lambda v: f(w, v, x), v),
}


@program
def transforms(region: Region) -> Any:
    """Each transform with the region inside it, and around it."""

    def function(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
        with region():
            return loss_of(w, v, x)

    results, (x, w, v) = [], weights()
    for transform in TRANSFORMS.values():
        results.append(transform(function, w, v, x))
        with region():
            results.append(transform(loss_of, w, v, x))
    return results


# --- what counts operators


@program
def counted_flops(region: Region) -> Any:
    """By a dispatch mode of torch's, around the region and inside."""
    model, x = Net(), torch.randn(4, 6)
    with FlopCounterMode(display=False) as around, region(), FlopCounterMode(display=False) as inside:
        model(x)
    assert around.get_total_flops() > 0
    return torch.tensor([around.get_total_flops(), inside.get_total_flops()])


# --- what is checked of each program


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_programs_have_torchs_bits(program: Program) -> None:
    expected, got = run(program, native), run(program, ours)
    assert [tensor.dtype for tensor in got] == [tensor.dtype for tensor in expected]
    different = [index for index, pair in enumerate(zip(got, expected, strict=True)) if not torch.equal(*pair)]
    assert not different, f"tensors {different} of {len(got)} differ"
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_programs_under_the_default_policy_stay_near_float32(program: Program) -> None:
    """Up to bfloat16's error."""
    for got, exact in zip(run(program, default), run(program, contextlib.nullcontext), strict=True):
        assert got.shape == exact.shape
        if exact.is_floating_point():
            error = (got.double() - exact.double()).norm()
            assert error <= 0.06 * exact.double().norm() + 1e-3, (got, exact)


def test_vmap_over_models_is_the_loop_over_models() -> None:
    """ampkit's rules come before vmap, torch's after it has decomposed `linear`, which leaves biases float32."""
    models, x = [Net() for _ in range(3)], torch.randn(4, 6)
    parameters, buffers = torch.func.stack_module_state(models)  # pyright: ignore[reportArgumentType]
    base = copy.deepcopy(models[0]).to("meta")

    def call(parameters: Any, buffers: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(base, (parameters, buffers), (x,))

    for as_torch in (native, ours):
        with as_torch():
            assert torch.vmap(call, (0, 0, None))(parameters, buffers, x).dtype is torch.float32
    with default():
        out = torch.vmap(call, (0, 0, None))(parameters, buffers, x)
        loop = torch.stack([model(x) for model in models])
    assert out.dtype is loop.dtype is torch.bfloat16
    torch.testing.assert_close(out, loop, rtol=0.01, atol=0.01)
    out.float().sum().backward()
    loop.float().sum().backward()
    for name, batched in parameters.items():
        grads = torch.stack([grad for model in models if (grad := model.get_parameter(name).grad) is not None])
        torch.testing.assert_close(batched.grad, grads, rtol=0.02, atol=0.02)


# --- modes that watch or replace what runs


class Seen(TorchDispatchMode):
    """Notes the operators that reach the Python key, with the dtypes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[torch.dtype, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func.name(), tuple(a.dtype for a in args if isinstance(a, Tensor))))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("outside", [True, False])
def test_dispatch_modes_see_what_runs(outside: bool) -> None:
    """A user's mode, inside or outside the region, sees casts and low-precision operators below autograd."""
    x, w = torch.randn(4, 6), torch.randn(3, 6, requires_grad=True)

    def calls(region: Region) -> list[Any]:
        seen = Seen()
        with contextlib.ExitStack() as stack:
            for context in (seen, region()) if outside else (region(), seen):
                stack.enter_context(context)
            F.linear(x, w).softmax(-1)
        return seen.calls

    assert calls(ours) == calls(native)
    assert ("aten::mm", (torch.bfloat16, torch.bfloat16)) in calls(default)


@pytest.mark.parametrize(("tracing", "pre_dispatch"), [("real", True), ("symbolic", False)])
def test_make_fx_records_the_casts(tracing: Any, pre_dispatch: bool) -> None:
    """The graph, run outside any region, computes what the region computes."""
    x, w, v = weights()

    def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        with default():
            return F.linear(torch.tanh(F.linear(x, w)), v).softmax(-1)

    graph = make_fx(function, tracing_mode=tracing, pre_dispatch=pre_dispatch)(x, w, v)
    with default():
        around = make_fx(
            lambda x, w, v: F.linear(torch.tanh(F.linear(x, w)), v).softmax(-1),
            tracing_mode=tracing,
            pre_dispatch=pre_dispatch,
        )(x, w, v)
    expected = function(x, w, v)
    for traced in (graph, around):
        got = traced(x, w, v)
        assert got.dtype is torch.float32
        assert torch.equal(got, expected)
        arguments = [argument for node in traced.graph.nodes for argument in (*node.args, *node.kwargs.values())]
        assert arguments.count(torch.bfloat16) >= 3, traced.code
    assert not torch.is_autocast_enabled("cpu")
