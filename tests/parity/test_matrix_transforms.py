"""Regions inside and around functional transforms: torch.func, torch.autograd.functional, functional calls.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.matrix import QUIET, Net, Program, Programs, Region, default, native, ours, weights

PROGRAMS = Programs()
pytestmark = QUIET


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


@PROGRAMS.add
def functional_call(region: Region) -> Any:
    model, x = Net(), torch.randn(4, 6)
    parameters = {name: 2 * p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).float().pow(2).mean()

    with region():
        return list(torch.func.grad(loss)(parameters).values()), model(x)


@PROGRAMS.add
def vmap_randomness_and_in_dims(region: Region) -> Any:
    x, w, _ = weights()
    with region():
        return torch.vmap(lambda row: F.dropout(F.linear(row, w), 0.5), randomness="different")(x)


@PROGRAMS.add
def an_autograd_function_under_vmap(region: Region) -> Any:
    class Square(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Tensor, w: Tensor) -> Tensor:
            return (x @ w) ** 2

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            x, w = ctx.saved_tensors
            slope = (2 * grads[0] * (x @ w)).to(w.dtype)
            return slope @ w.T, torch.outer(x.to(w.dtype), slope)

    x, w = torch.randn(4, 6), torch.randn(6, 3, requires_grad=True)
    with region():
        out = torch.vmap(Square.apply, (0, None))(x, w)
    out.float().sum().backward()
    return out, w.grad


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
