"""Each operation on a device beside plain arithmetic; on the CPU, with TRITON_INTERPRET=1, in the interpreter.

`impl` is "triton", or on the CPU "reference". The interpreter truncates to bfloat16, where a GPU rounds, and takes
bfloat16's subnormals for 0: there these checks keep to bfloat16 values and products that are exact.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import ampkit_kernels as kernels
from tests.gpu_checks.tools import FLOATS, HALF, Guarded, Registry, close, gradients, same, scalar, within_ulps

CHECKS = Registry()
check = CHECKS.add
NONFINITE = (float("inf"), -float("inf"), float("nan"))
ORDERS = (1.0, 2.0, float("inf"))


def truncates(device: torch.device, impl: str, dtype: torch.dtype) -> bool:
    """Whether this is the interpreter's bfloat16."""
    return device.type == "cpu" and impl == "triton" and dtype is torch.bfloat16


def product(value: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """`value * factor` in float32, or float64 for float64, rounded once."""
    wide = torch.float64 if value.dtype is torch.float64 else torch.float32
    return (value.to(wide) * factor.to(wide)).to(dtype)


def all_finite(tensors: Sequence[Tensor]) -> bool:
    return all(bool(t.isfinite().all()) for t in tensors)


@check
def unscale_and_multiply_at_any_address(device: torch.device, impl: str = "triton") -> None:
    for dtype in FLOATS:
        values, exact = gradients(dtype, scale=100.0, device=device), truncates(device, impl, dtype)
        info = torch.finfo(dtype)
        if not exact:
            extremes = [info.max, info.min, info.tiny, info.tiny / 4, info.smallest_normal * info.eps, -0.0, 0.0]
            values[4][:7] = torch.tensor(extremes, dtype=dtype)
        factor = scalar(0.25 if exact else 0.001, device)
        for name in ("unscale", "multiply"):
            guarded, flag = Guarded(values), scalar(0.0, device)
            if name == "unscale":
                kernels.unscale_(guarded.views, factor, flag, impl=impl)
            else:
                kernels.multiply_(guarded.views, factor, flag, impl=impl)
            same([*guarded.views, flag], [*(product(v, factor, dtype) for v in values), scalar(0.0)], f"{name} {dtype}")
            guarded.check(f"{name} {dtype}")


@check
def unscale_into_at_any_address(device: torch.device, impl: str = "triton") -> None:
    for source, accumulate in itertools.product(FLOATS, (False, True)):
        values, before = gradients(source, scale=100.0, device=device), gradients(torch.float32, device=device)
        sources, into, flag = Guarded(values), Guarded(before, (0, 0, 1)), scalar(0.0, device)
        factor = scalar(0.001, device)
        kernels.unscale_into_(sources.views, into.views, factor, flag, accumulate=accumulate, impl=impl)
        want = [product(v, factor, torch.float32) for v in values]
        if accumulate:
            want = [b + w for b, w in zip(before, want, strict=True)]
        what = f"{source}{' added' * accumulate}"
        same([*into.views, flag, *sources.views], [*want, scalar(0.0), *values], what)
        into.check(what)


@check
def casts_equal_pytorchs(device: torch.device, impl: str = "triton") -> None:
    for source, destination in itertools.product(FLOATS, FLOATS):
        values = gradients(source, (1, 17, 300, 1025), device=device)
        if truncates(device, impl, destination):
            values = [v.bfloat16().to(source) for v in values]
        copies = Guarded([torch.full_like(v, torch.nan, dtype=destination) for v in values], (0, 0, 1))
        kernels.cast_(Guarded(values).views, copies.views, impl=impl)
        same(copies.views, [v.to(destination) for v in values], f"{source} to {destination}")
        copies.check(f"{source} to {destination}")


@check
def every_half_pattern(device: torch.device, impl: str = "triton") -> None:
    """In place and into float32, by a factor that overflows, one that makes subnormals, and without one."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype, number in itertools.product(HALF, (1.0, 0.5, 0.001, 3.0)):
        patterns, exact = bits.view(dtype), truncates(device, impl, dtype)
        if exact:
            patterns = patterns[~((patterns.abs() < torch.finfo(dtype).tiny) & (patterns != 0))]
        for values in (patterns.to(device), patterns[patterns.isfinite()].to(device)):
            factor, what = scalar(number, device), f"{dtype} factor {number}"
            want = [product(values, factor, torch.float32)]
            into, flag = torch.empty_like(values, dtype=torch.float32), scalar(0.0, device)
            kernels.unscale_into_([values], [into], factor, flag, impl=impl)
            same([into, flag], [*want, scalar(float(not all_finite(want)))], what)
            if number == 1.0:
                kernels.cast_([values], [into.fill_(-1.0)], impl=impl)
                same([into], [values.float()], f"cast of {dtype}")
            elif not exact:
                want, got, flag = [want[0].to(dtype)], values.clone(), scalar(0.0, device)
                kernels.unscale_([got], factor, flag, impl=impl)
                same([got, flag], [*want, scalar(float(not all_finite(want)))], what)


@check
def casts_round_every_tie_to_even(device: torch.device, impl: str = "triton") -> None:
    halves = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16).float()
    middles = ((halves[:-1] + halves[1:]) / 2).to(device)
    rounded = torch.full_like(middles, torch.nan, dtype=torch.float16)
    kernels.cast_([middles], [rounded], impl=impl)
    same([rounded], [middles.half()], "ties")


@check
def every_planted_value_is_found(device: torch.device, impl: str = "triton") -> None:
    places = [(0, 0), (1, 299), (2, 1023), (2, 1024), (2, 1499)]
    for n, (dtype, value) in enumerate(itertools.product(FLOATS, NONFINITE)):
        for tensor, at in places if device.type == "cuda" else [places[n % 5]]:
            grads = gradients(dtype, (1, 300, 1500), device=device)
            grads[tensor][at] = value
            factor, flags = scalar(0.5, device), [scalar(0.0, device) for _ in range(6)]
            for flag, order in zip(flags, ORDERS, strict=False):
                if device.type == "cpu" and order != ORDERS[(n + n // 3) % 3]:
                    flag.fill_(1.0)     # every order meets every value, in another dtype
                    continue
                norm = kernels.norm_and_check(grads, factor, flag, order, impl=impl)
                assert bool(norm.isnan() if value != value else norm == float("inf")), f"norm {order} of {value}"
            for flag, accumulate in zip(flags[3:], (False, True), strict=False):
                into = [torch.zeros_like(g, dtype=torch.float32) for g in grads]
                kernels.unscale_into_(grads, into, factor, flag, accumulate=accumulate, impl=impl)
                assert not into[tensor][at].isfinite()
            kernels.unscale_(grads, factor, flags[5], impl=impl)
            assert [flag.item() for flag in flags] == [1.0] * 6, f"{dtype} {value} at {tensor}, {at}"
    signalling, flag = torch.full((40,), 0x7FA00000, dtype=torch.int32, device=device), scalar(0.0, device)
    kernels.unscale_([signalling.view(torch.float32)], scalar(0.5, device), flag, impl=impl)
    assert flag.item() == 1.0
    kernels.unscale_([torch.ones(3, device=device)], scalar(0.5, device), flag, impl=impl)
    assert flag.item() == 1.0, "the flag was cleared"


@check
def a_product_that_overflows_is_found_by_all_alike(device: torch.device, impl: str = "triton") -> None:
    """As it would be stored: from half a spacing above the largest number on."""
    for dtype in FLOATS[:1] + HALF:
        largest, tie = torch.finfo(dtype).max, 2.0 - torch.finfo(dtype).eps / 2
        cases = [(largest / 2, factor) for factor in (0.25, 1.0, 1.5, 4.0)]
        if dtype is not torch.float32 and not truncates(device, impl, dtype):
            power = 2.0 ** math.floor(math.log2(largest))
            cases += [(power, tie), (-power, tie - 2.0**-23)]
        for value, factor in cases:
            grads = [torch.full((20,), value, dtype=dtype, device=device), torch.ones(3, device=device)]
            flags = [scalar(0.0, device) for _ in range(2 + len(ORDERS))]
            for flag, order in zip(flags, ORDERS, strict=False):
                kernels.norm_and_check(grads, scalar(factor, device), flag, order, impl=impl)
            into = [torch.empty_like(g) for g in grads]
            kernels.unscale_into_(grads, into, scalar(factor, device), flags[-2], impl=impl)
            kernels.unscale_(grads, scalar(factor, device), flags[-1], impl=impl)
            expected = float(not product(torch.tensor(value), scalar(factor), dtype).isfinite())
            assert [flag.item() for flag in flags] == [expected] * 5, f"{value} times {factor} in {dtype}"


@check
def norms_against_float64(device: torch.device, impl: str = "triton") -> None:
    lists = [gradients(dtype, scale=10.0, device=device) for dtype in FLOATS]
    mixed = [g for part in lists for g in part[3:6]]
    for grads, order in itertools.product([*lists, mixed], ORDERS):
        guarded, flag = Guarded(grads), scalar(0.0, device)
        before = [buffer.clone() for buffer in guarded.buffers]
        results = [
            kernels.norm_and_check(guarded.views, scalar(0.25, device), flag, order, impl=impl)
            for _ in range(2 if device.type == "cuda" or order == 2.0 else 1)
        ]
        want = torch.linalg.vector_norm(torch.cat([g.double() for g in grads]) * 0.25, order)
        what = f"{grads[0].dtype} to {grads[-1].dtype}, order {order}"
        close(results[0], want, 1e-5 if device.type == "cuda" else 2e-6, what)
        assert results[0].dtype is (torch.float64 if {g.dtype for g in grads} & {torch.float64} else torch.float32)
        same([results[0], flag, *guarded.buffers], [results[-1], scalar(0.0), *before], what)
    for dtype in FLOATS[:3]:    # squares that overflow are no overflow
        grads, flag = [torch.full((300,), torch.finfo(dtype).max, dtype=dtype, device=device)], scalar(0.0, device)
        kernels.norm_and_check(grads, scalar(1.0, device), flag, impl=impl)
        assert flag.item() == 0.0


@check
def multiply_leaves_alone(device: torch.device, impl: str = "triton") -> None:
    grads = gradients(torch.float32, (40, 700), device=device)
    grads[0][3] = float("nan")
    before = [g.clone() for g in grads]
    for factor, found_inf in ((1.0, None), (1.0, 0.0), (0.5, 1.0), (float("nan"), 1.0)):
        flag = None if found_inf is None else scalar(found_inf, device)
        kernels.multiply_(grads, scalar(factor, device), flag, impl=impl)
        same(grads, before, f"factor {factor}, found_inf {found_inf}")


ADAMW: list[dict[str, Any]] = [
    {}, {"weight_decay": 0.0, "maximize": True}, {"amsgrad": True, "beta1": 0.3}, {"grads": torch.float16},
    {"dtype": torch.float64, "amsgrad": True}, {"dtype": torch.float16, "lr": torch.tensor(0.01)},
]
SGD: list[dict[str, Any]] = [
    {}, {"weight_decay": 0.1, "grads": torch.float16}, {"momentum": 0.9, "nesterov": True, "maximize": True},
    {"momentum": 0.9, "weight_decay": 0.1, "lr": torch.tensor(0.1)}, {"momentum": 0.9, "dtype": torch.float64},
]


class State:
    """An optimizer's lists, at any address: parameters, two of momenta, maxima; counts; copies."""

    def __init__(self, params: Sequence[Tensor], device: torch.device, **options: Any) -> None:
        def zeros() -> list[Tensor]:
            wide = torch.promote_types(params[0].dtype, torch.float32)
            return Guarded([torch.zeros_like(p, dtype=wide, device=device) for p in params], (0, 0, 1)).views

        self.adamw = "beta1" in options
        self.params = Guarded([p.to(device) for p in params]).views
        self.moments = [zeros(), zeros()]
        self.maxima = zeros() if options.get("amsgrad") else []
        self.counts = [torch.zeros((), device=device) for _ in params]
        self.copies = [torch.zeros_like(p, dtype=torch.float16, device=device) for p in params]
        self.options = {name: o.to(device) if isinstance(o, Tensor) else o for name, o in options.items()}

    def lists(self) -> list[Tensor]:
        return [*self.params, *self.moments[0], *self.moments[1], *self.maxima, *self.counts]

    def step(self, grads: Sequence[Tensor], **more: Any) -> None:
        options = {**self.options, **more, "copies": self.copies}
        if self.adamw:
            kernels.adamw_(self.params, grads, *self.moments, self.maxima, self.counts, **options)
        else:
            kernels.sgd_(self.params, grads, self.moments[0], **options)


def steps_within_an_ulp(device: torch.device, impl: str, options: dict[str, Any]) -> None:
    """Scaled gradients, some steps skipped; each step beside the reference's on the CPU from the same state."""
    options = dict(options)
    dtype = options.pop("dtype", torch.float32)
    grads_dtype = options.pop("grads", dtype)
    sizes = (0, 1, 17, 255, 257, 1030) if device.type == "cpu" else None
    params = gradients(dtype, sizes)
    ours, theirs = State(params, device, **options), State(params, torch.device("cpu"), **options)
    for i in range(4):
        grads = gradients(grads_dtype, sizes, scale=1024.0)
        sent = Guarded([g.to(device) for g in grads], (0, 1)).views
        before = [t.clone() for t in [*ours.lists(), *ours.copies]]
        numbers = {"multiplier": 2.0**-11, "grad_scale": 0.5, "found_inf": float(i in (0, 2))}
        ours.step(sent, impl=impl, **{name: scalar(number, device) for name, number in numbers.items()})
        theirs.step(grads, impl="reference", **{name: scalar(number) for name, number in numbers.items()})
        what = f"{dtype} {options}, step {i}"
        same(sent, grads, f"{what}: gradients were written")
        if numbers["found_inf"]:
            same([*ours.lists(), *ours.copies], before, f"{what}, skipped")
            continue
        same([*ours.counts, *ours.copies], [*theirs.counts, *(p.half() for p in ours.params)], what)
        # Against what goes into a sum, not what is left of it: momenta and parameters may cancel to almost nothing.
        operands = zip(theirs.params, grads, theirs.moments[0], strict=True)
        size = [p.abs() + g.abs() / 1024 + m.abs() + 0.02 for p, g, m in operands]
        # In float64 the bias corrections themselves carry a few roundings.
        within_ulps(ours.params, theirs.params, size, 4.0 if dtype is torch.float64 else 1.0, what)
        if ours.adamw:
            size = [torch.maximum(m.abs(), g.abs() / 1024) for m, g in zip(theirs.moments[0], grads, strict=True)]
            within_ulps(ours.moments[1], theirs.moments[1], theirs.moments[1], 1.0, what)
        within_ulps(ours.moments[0], theirs.moments[0], size, 1.0, what)
        for mine, other in zip(ours.lists(), theirs.lists(), strict=True):
            mine.copy_(other)


@check
def adamw_steps_within_an_ulp(device: torch.device, impl: str = "triton") -> None:
    usual = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
    for options in ADAMW:
        steps_within_an_ulp(device, impl, {**usual, **options})
    for late in (9_999.0, 1_000_000.0):     # bias corrections
        ours = State([torch.ones(20)], device, **{**usual, "lr": torch.tensor(0.01)})
        theirs = State([torch.ones(20)], torch.device("cpu"), **usual)
        for state, chosen in ((ours, impl), (theirs, "reference")):
            state.counts[0].fill_(late)
            state.step([torch.full((20,), 0.1, device=state.params[0].device)], impl=chosen)
        same(ours.counts, [torch.tensor(late + 1)], "count")
        within_ulps(ours.params, theirs.params, theirs.params, 1.0, f"step {late + 1}")


@check
def sgd_steps_within_an_ulp(device: torch.device, impl: str = "triton") -> None:
    for options in SGD:
        steps_within_an_ulp(device, impl, {"lr": 0.1, **options})
