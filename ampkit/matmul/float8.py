"""Linear layers in FP8: the products that regions run for an operator with one of the rules of `float8_recipes`.

One autograd function, `_Products`, has the three products of a layer. It gets the operands in their own dtypes, so
that FP8 data is rounded once. For backward it saves the weight itself, without a copy, and the FP8 form of the input
that the gradient of the weight needs: one byte per element.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from ampkit.dispatch.casting import cast_to, is_eligible
from ampkit.dispatch.dispatcher import in_forward_ad, keysets
from ampkit.matmul.float8_matmul import is_eager, lacks_float8, product
from ampkit.matmul.float8_recipes import DTYPES, PRODUCTS, RECIPES, wrong_size
from ampkit.matmul.float32_output import expands
from ampkit.policy.rules import Rule
from ampkit.torch_private import Exclude, OpOverload, functorch_level, jit_tracing_state
from ampkit_kernels import Quantized, Scaling, is_capturing, quantize

__all__ = ["Product", "prepare", "why_not"]

_c10d: Any = dist.distributed_c10d if dist.is_available() else None


def prepare(
    rule: Rule, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], device_type: str, cache: Any
) -> Any:
    """Return the call of a `Product`; None if the call has no FP8 form.

    Raises `RuntimeError` under `torch.jit.trace`.
    """
    if why_not(op, args, kwargs, device_type):
        return None
    if jit_tracing_state() is not None:
        raise RuntimeError("torch.jit.trace cannot save products in FP8; trace the model under another policy")
    product = Product(rule, op, device_type, torch.get_autocast_dtype(device_type), cache)
    return product, product.prepared(args), kwargs


def why_not(op: OpOverload, args: tuple[Any, ...], kwargs: Any, device_type: str) -> str:
    """Return the reason for which a call with an FP8 rule follows LOWER instead; "" if it runs in FP8."""
    at = PRODUCTS[op.name()]
    x, weight = args[at.x], args[at.weight]
    if kwargs or len(args) > 3:
        return "called with alpha, beta or a dtype"
    operands = [each for each in args if each is not None]
    if not all(is_eligible(each, device_type) and each.dtype in DTYPES for each in operands):
        return "an operand that is not float32, bfloat16 or float16 on the region's device"
    if any(each.layout is not torch.strided or each.is_nested for each in operands):
        return "an operand that is not dense"
    if weight.dim() != 2 or x.dim() < 1 or (at.is_matrix and x.dim() != 2):
        return "not a product with a matrix"
    if functorch_level() is not None:
        return "inside a transform of torch.func"
    if in_forward_ad():
        return "inside forward-mode AD"
    if x.numel() == 0 or weight.numel() == 0:
        return "an empty operand"
    k, n = weight.shape if at.is_kn else reversed(weight.shape)
    added = args[at.added] if at.added is not None and at.added < len(args) else None
    if x.shape[-1] != k or (added is not None and not expands(added.shape, (*x.shape[:-1], n))):
        return "shapes that do not fit"
    return wrong_size(k, n) or lacks_float8(x.device)


class WeightForm(NamedTuple):
    """How a weight becomes FP8. The region's cache takes it in the place of a `casting.Cast`."""

    scaling: Scaling
    transposed: bool  # the form is of `w.T`
    device_type: str
    source_dtypes = DTYPES

    def on_device(self, weight: Tensor) -> bool:
        """Whether the weight is on a device of this type."""
        return weight.device.type == self.device_type

    def convert(self, weight: Tensor) -> Quantized:
        """Return the weight in FP8."""
        if self.transposed:
            return _quantize(weight, None, self.scaling)[1]
        return _quantize(weight, self.scaling, None)[0]

    tensor = convert


class _Input:
    """FP8 forms of the last activation, shared: the layers of q, k and v quantize it, and save it, once."""

    __slots__ = ("forms", "key", "tensor")

    def __init__(self, x: Tensor, key: Any) -> None:
        forms: dict[Any, Any] = {}
        self.forms, self.key = forms, key
        self.tensor = weakref.ref(x, lambda _: forms.clear())


class Product:
    """The product in FP8 that is called in the place of an operator.

    `notes`, if set, is called with each operand and its FP8 form: `records` measures them.
    """

    def __init__(self, rule: Rule, op: OpOverload, device_type: str, dtype: torch.dtype, cache: Any) -> None:
        self.recipe, self.at = RECIPES[rule], PRODUCTS[op.name()]
        self.device_type, self.dtype, self.cache = device_type, dtype, cache
        self.notes: Any = None

    def prepared(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments in which the bias, or the matrix that is added, is cast to the region's dtype."""
        index = self.at.added
        if index is None or index >= len(args):
            return args
        cast = cast_to(self.device_type, self.dtype)
        return *args[:index], cast.argument(args[index], self.cache), *args[index + 1 :]

    def __call__(self, *args: Any) -> Tensor:
        x, weight = args[self.at.x], args[self.at.weight]
        added = args[self.at.added] if self.at.added is not None and self.at.added < len(args) else None
        if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            out = _Products.apply(x, weight, self)
        else:
            out, _ = self.output(x.detach(), weight, saves=False)  # FP8 forms of a detached input are not shared
        out = out.reshape(*x.shape[:-1], out.shape[1])
        return out if added is None else out + added

    def output(self, x: Tensor, weight: Tensor, *, saves: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        """`x @ w.T` as a matrix, and the tensors to save of the input if the weight will need a gradient."""
        recipe = self.recipe
        forms = self._input_forms(x, transposed=saves)
        if recipe.w is None:
            matrix = self._cast(weight)
            out = torch.mm(x.reshape(-1, x.shape[-1]).to(self.dtype), matrix if self.at.is_kn else matrix.t())
        else:
            w = self.weight_form(weight, recipe.w, self.at.is_kn)
            self.note("output", "input", x, forms["rows"], recipe.x)
            self.note("output", "weight", weight, w, recipe.w, transposed=self.at.is_kn)
            out = _gemm(forms["rows"], w, self.dtype, fast=True)
        if not saves:
            return out, ()
        if recipe.x_t is None:
            return out, (forms["high"],)
        self.note("weight gradient", "input", x, forms["columns"], recipe.x_t, transposed=True)
        return out, tuple(forms["columns"])

    def _cast(self, weight: Tensor) -> Tensor:
        """Return the weight in the region's dtype, from the cache if there is one."""
        return cast_to(self.device_type, self.dtype).argument(weight, self.cache)

    def _input_forms(self, x: Tensor, *, transposed: bool) -> dict[str, Any]:
        """Return the FP8 forms of an input: the ones that this product needs, and perhaps others, made before."""
        recipe, forms = self.recipe, self._shared_forms(x)
        flat = x.reshape(-1, x.shape[-1])
        rows = None if "rows" in forms else recipe.x
        columns = recipe.x_t if transposed and "columns" not in forms else None
        if rows or columns:
            made = _quantize(flat, rows, columns)
            forms.update((name, form) for name, form in zip(("rows", "columns"), made, strict=True) if form is not None)
        if transposed and recipe.x_t is None and "high" not in forms:
            forms["high"] = flat.to(self.dtype)
        return forms

    def _shared_forms(self, x: Tensor) -> dict[str, Any]:
        """Return the dict of an input's FP8 forms that the products of this region share and add to; otherwise an empty
        dict.

        Only activations with a history have one: buffers that graphs, collectives and other libraries write do not.
        """
        cache = self.cache
        if (
            cache is None
            or x.grad_fn is None
            or not is_eager(x)
            or (x.is_cuda and is_capturing(x.device) != cache.in_capture)
            or (collectives := _n_collectives()) is None
        ):
            return {}
        stream = torch.cuda.current_stream(x.device) if x.is_cuda else None
        key = self.recipe, self.dtype, x._version, x.data_ptr(), x.shape, x.stride(), collectives, stream
        last = cache.shared.get("input")
        if last is None or last.tensor() is not x or last.key != key:
            last = cache.shared["input"] = _Input(x, key)
        return last.forms

    def weight_form(self, weight: Tensor, scaling: Scaling, transposed: bool, *, backward: bool = False) -> Quantized:
        """Return the weight or its transpose in FP8, from the cache; convert again in backward (a later region)."""
        form = WeightForm(scaling, transposed, self.device_type)
        if self.cache is None or backward:
            return form.convert(weight)
        return self.cache.get(weight, form)

    def note(self, gemm: str, operand: str, *form: Any, transposed: bool = False) -> None:
        """Report an operand to `notes`: a tensor, its FP8 form, the form's scaling."""
        if self.notes is not None:
            self.notes(gemm, operand, *form, transposed)


def _n_collectives() -> list[Any] | None:
    """How many collectives each process group has started; None if a backend does not count.

    Any of them may write to an activation without incrementing its version counter.
    """
    groups = _c10d._world.pg_map if _c10d is not None else ()
    try:
        return [(weakref.ref(group), group._get_sequence_number_for_group()) for group in list(groups)]
    except RuntimeError:
        return None


class _Products(torch.autograd.Function):
    """`x @ w.T` and its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, call: Product) -> Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        out, saved = call.output(x, weight, saves=needs_weight)
        ctx.call, ctx.shape = call, x.shape
        ctx.save_for_backward(weight if needs_x else None, *saved)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        call = ctx.call
        # An open region would cast the products.
        with torch.no_grad(), Exclude(keysets((call.device_type,))[0]):
            grads = _gradients(call, grad, ctx.saved_tensors, ctx.shape, *ctx.needs_input_grad[:2])
        if torch.is_grad_enabled():  # create_graph=True
            source = torch.zeros((), requires_grad=True)  # `grad` requires none if the operators after it are linear
            grads = [None if each is None else _Once.apply(each, source) for each in grads]
        return *grads, None


def _gradients(
    call: Product, grad: Tensor, saved: tuple[Tensor, ...], shape: torch.Size, needs_x: bool, needs_weight: bool
) -> list[Tensor | None]:
    recipe, at = call.recipe, call.at
    grad_x = grad_weight = None
    rows, columns = _quantize(grad, recipe.g if needs_x else None, recipe.g_t if needs_weight else None)
    if needs_x:
        weight = saved[0]
        if recipe.w_t is None:
            grad_x = torch.mm(grad, (weight.t() if at.is_kn else weight).to(grad.dtype)).reshape(shape)
        else:
            w_t = call.weight_form(weight, recipe.w_t, not at.is_kn, backward=True)
            call.note("input gradient", "gradient", grad, rows, recipe.g)
            call.note("input gradient", "weight", weight, w_t, recipe.w_t, transposed=not at.is_kn)
            grad_x = _gemm(rows, w_t, grad.dtype).reshape(shape)
    if needs_weight:
        if recipe.g_t is None:
            grad_weight = torch.mm(grad.t(), saved[1].to(grad.dtype))
        else:
            call.note("weight gradient", "gradient", grad, columns, recipe.g_t, transposed=True)
            grad_weight = _gemm(columns, Quantized(saved[1], saved[2]), grad.dtype)
        grad_weight = grad_weight.t() if at.is_kn else grad_weight
    return [grad_x, grad_weight]


class _Once(torch.autograd.Function):
    """Passes a gradient on, and raises if it is differentiated. `source` makes the result require grad."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, source: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError(
            "the gradient of an FP8 product has no derivative, since FP8 rounds it. For a gradient penalty or Hessian "
            "give the modules that it goes through another rule: policy.for_modules(model, {'path': "
            "Policy.default(device_type)})"
        )


def _gemm(a: Quantized, b: Quantized, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """`a[m, k] @ b[n, k].T` in `dtype`."""
    left, right = a.data.contiguous(), b.data.contiguous()
    extra = -left.shape[1] % 16
    if extra:  # in the gradient of the weight k is the number of the input's rows; zeros add nothing
        left, right = (functional.pad(each.view(torch.uint8), (0, extra)).view(each.dtype) for each in (left, right))
    return product(left, right, a.scale.reciprocal(), b.scale.reciprocal(), dtype, fast=fast)


def _quantize(x: Tensor, along_rows: Scaling | None, along_columns: Scaling | None) -> Any:
    """`ampkit_kernels.quantize`; with PyTorch's operators for tensors that are traced or distributed."""
    return quantize(x, along_rows, along_columns, impl="auto" if is_eager(x) else "reference")
