"""Regions beside everything else that torch does: programs that have torch.amp's bits, and the default policy near.

See `tests.helpers.matrix` for what is compared.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_leaves

from tests.helpers.matrix import QUIET, Net, Program, Programs, Region, default, gradients, native, ours, weights

PROGRAMS = Programs()
pytestmark = QUIET


# --- autograd: grad modes, double backward, hooks


@PROGRAMS.add
def inference_mode_first_then_training(region: Region) -> Any:
    model, x = Net(), torch.randn(4, 6)
    with region():
        with torch.inference_mode():
            evaluated = model(x)
        out = model(x)
    assert evaluated.is_inference()
    out.float().sum().backward()
    return evaluated.clone(), out, gradients(model)


@PROGRAMS.add
def double_backward_inside(region: Region) -> Any:
    model, x = Net(), torch.randn(4, 6, requires_grad=True)
    with region():
        out = model(x).float().pow(2).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        (out + slope.norm()).backward()
    return slope, x.grad, gradients(model)


@PROGRAMS.add
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


@PROGRAMS.add
def partly_frozen(region: Region) -> Any:
    model, x = Net(), torch.randn(4, 6)
    model.enter.requires_grad_(False)
    with region():
        out = model(x)
        model.enter.requires_grad_(True)
        again = model(x)
    (out + again).float().sum().backward()
    return out, again, gradients(model)


@PROGRAMS.add
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


@PROGRAMS.add
def parametrizations(region: Region) -> Any:
    model, x = nn.Sequential(weight_norm(nn.Linear(6, 6)), spectral_norm(nn.Linear(6, 6)), orthogonal(nn.Linear(6, 6)),
                             nn.Linear(6, 6)), torch.randn(4, 6)
    parametrize.register_parametrization(model[3], "weight", Doubled())
    with region():
        out = model(x)
    out.float().sum().backward()
    return out, gradients(model)


@PROGRAMS.add
def encoder_fast_path(region: Region) -> Any:
    """Evaluation of torch's own transformer layers, where it may take a fused operator."""
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False
    ).eval()
    attention, x = nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(2, 5, 8)
    with torch.inference_mode(), region():
        return encoder(x), attention(x, x, x, need_weights=False)[0]


# --- tensors that are not plain: sparse, complex, nested, subclasses, out= and in place


@PROGRAMS.add
def sparse_embedding_gradients(region: Region) -> Any:
    embedding, head = nn.Embedding(10, 6, sparse=True), nn.Linear(6, 3)
    with region():
        out = head(embedding(torch.tensor([1, 3, 3, 7])))
    out.float().sum().backward()
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.is_sparse
    return out, embedding.weight.grad.to_dense(), gradients(head)


@PROGRAMS.add
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


@PROGRAMS.add
def jagged_nested_tensors(region: Region) -> Any:
    model = nn.Linear(6, 3)
    rows = [torch.randn(2, 6, requires_grad=True), torch.randn(3, 6, requires_grad=True)]
    ragged = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    with region():
        out = model(ragged)
    out.values().float().sum().backward()
    return out.values(), [row.grad for row in rows], gradients(model)


@PROGRAMS.add
def strided_nested_tensors(region: Region) -> Any:
    model = nn.Linear(6, 3)
    rows = [torch.randn(2, 6), torch.randn(3, 6)]
    nested = torch.nested.nested_tensor(rows, requires_grad=True)
    with region():
        out = model(nested)
        padded = torch.nested.to_padded_tensor(out, 0.0)
    padded.float().sum().backward()
    return padded, gradients(model)


@PROGRAMS.add
def tensor_subclass(region: Region) -> Any:
    """A wrapper subclass stays one through casts, and the two tensors inside are cast alike."""
    x = TwoTensor(torch.randn(4, 6), torch.randn(4, 6))
    weight = torch.randn(3, 6, requires_grad=True)
    with region():
        out = F.linear(x, weight)
    assert isinstance(out, TwoTensor)
    out.float().sum().backward()
    return out.a, out.b, weight.grad.a if isinstance(weight.grad, TwoTensor) else weight.grad


@PROGRAMS.add
def torch_function_subclass(region: Region) -> Any:
    class Named(Tensor):
        pass

    x, model = torch.randn(4, 6).as_subclass(Named), Net()
    with region():
        out = model(x)
    assert type(out) is Named
    out.float().sum().backward()
    return out.as_subclass(Tensor), gradients(model)


@PROGRAMS.add
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


TRANSFORMS: dict[str, Callable[[Callable[..., Tensor], Tensor, Tensor, Tensor], Any]] = {
    "grad": lambda f, w, v, x: torch.func.grad(f, argnums=(0, 1))(w, v, x),
    "grad_and_value": lambda f, w, v, x: torch.func.grad_and_value(f)(w, v, x),
    "vmap": lambda f, w, v, x: torch.vmap(f, (None, None, 0))(w, v, x),
    "vmap_weights": lambda f, w, v, x: torch.vmap(f, (0, None, None))(torch.stack([w, 2 * w]), v, x),
    "per_sample_grad": lambda f, w, v, x: torch.vmap(torch.func.grad(f), (None, None, 0))(w, v, x),
    "jvp": lambda f, w, v, x: torch.func.jvp(f, (w, v, x), (torch.ones_like(w), torch.ones_like(v), x)),
    "vjp": lambda f, w, v, x: torch.func.vjp(f, w, v, x)[1](torch.ones(())),
    "jacrev": lambda f, w, v, x: torch.func.jacrev(f)(w, v, x),
    "jacfwd": lambda f, w, v, x: torch.func.jacfwd(f, argnums=1)(w, v, x),
    "hessian": lambda f, w, v, x: torch.func.hessian(f, argnums=1)(w, v, x),
    "grad_of_grad": lambda f, w, v, x: torch.func.grad(
        lambda w: torch.func.grad(f)(w, v, x).pow(2).sum())(w),
    "functionalize": lambda f, w, v, x: torch.func.functionalize(f)(w, v, x),
    "linearize": lambda f, w, v, x: torch.func.linearize(f, w, v, x)[1](
        torch.ones_like(w), torch.ones_like(v), x),
    "autograd_jacobian": lambda f, w, v, x: torch.autograd.functional.jacobian(lambda v: f(w, v, x), v),
    "autograd_hessian": lambda f, w, v, x: torch.autograd.functional.hessian(lambda v: f(w, v, x), v),
}


def _add_transforms() -> None:
    for name, transform in TRANSFORMS.items():
        def inside(region: Region, transform: Any = transform) -> Any:
            def function(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
                with region():
                    return loss_of(w, v, x)

            x, w, v = weights()
            return transform(function, w, v, x)

        def around(region: Region, transform: Any = transform) -> Any:
            x, w, v = weights()
            with region():
                return transform(loss_of, w, v, x)

        PROGRAMS.append(Program(f"{name}_inside", inside))
        PROGRAMS.append(Program(f"{name}_around", around))


_add_transforms()


# --- what holds of each


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_programs_have_torchs_bits(program: Program) -> None:
    program.check_bits()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_programs_under_the_default_policy_stay_near_float32(program: Program) -> None:
    program.check_near_float32()


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
