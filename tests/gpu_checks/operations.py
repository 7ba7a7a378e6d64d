"""Each operation beside plain arithmetic, on a GPU, or with TRITON_INTERPRET=1 on the CPU in Triton's interpreter.

`impl` is "triton", or on the CPU "reference". The interpreter truncates to bfloat16, where a GPU rounds, and turns
bfloat16's subnormals into 0: there these checks use bfloat16 values and products that are exact.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import ampkit_kernels as kernels
from ampkit_kernels import rounding
from tests.gpu_checks.tools import FLOATS, HALF, Guarded, Registry, close, gradients, same, scalar, within_ulps

CHECKS = Registry()
check = CHECKS.add
NONFINITE = (float("inf"), -float("inf"), float("nan"))
ORDERS = (1.0, 2.0, float("inf"))


def truncates(device: torch.device, impl: str, dtype: torch.dtype) -> bool:
    """Whether results are truncated: the interpreter's bfloat16."""
    return device.type == "cpu" and impl == "triton" and dtype is torch.bfloat16


def product(value: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    """`value * factor` in float32, or float64 for float64, rounded once."""
    wide = torch.float64 if value.dtype is torch.float64 else torch.float32
    return (value.to(wide) * torch.tensor(factor).to(wide)).to(dtype)


def flagged(
    operation: Callable[..., Any], *lists: list[Tensor], factor: float, impl: str, flag: float = 0.0, **options: Any
) -> tuple[float, Any]:
    """Run an operation that sets `found_inf`; returns the flag afterwards, and the operation's result."""
    device = lists[0][0].device
    found_inf = scalar(flag, device)
    result = operation(*lists, scalar(factor, device), found_inf, impl=impl, **options)
    return found_inf.item(), result


@check
def unscale_and_multiply_at_any_address(device: torch.device, impl: str = "triton") -> None:
    for dtype, operation in itertools.product(FLOATS, (kernels.unscale_, kernels.multiply_)):
        values, exact = gradients(dtype, scale=100.0, device=device), truncates(device, impl, dtype)
        info = torch.finfo(dtype)
        if not exact:
            extremes = [info.max, info.min, info.tiny, info.tiny / 4, info.smallest_normal * info.eps, -0.0, 0.0]
            values[4][:7] = torch.tensor(extremes, dtype=dtype)
        factor, guarded, what = 0.25 if exact else 0.001, Guarded(values), f"{operation.__name__} {dtype}"
        assert flagged(operation, guarded.views, factor=factor, impl=impl)[0] == 0.0
        same(guarded.views, [product(v, factor, dtype) for v in values], what)
        guarded.check(what)


@check
def unscale_into_at_any_address(device: torch.device, impl: str = "triton") -> None:
    for source, accumulate in itertools.product(FLOATS, (False, True)):
        values, before = gradients(source, scale=100.0, device=device), gradients(torch.float32, device=device)
        lists, what = (Guarded(values), Guarded(before, (0, 0, 1))), f"{source}{' added' * accumulate}"
        sources, into = (guarded.views for guarded in lists)
        flag, _ = flagged(kernels.unscale_into_, sources, into, factor=0.001, impl=impl, accumulate=accumulate)
        want = [product(v, 0.001, torch.float32) for v in values]
        want = [b + w for b, w in zip(before, want, strict=True)] if accumulate else want
        assert flag == 0.0
        same([*into, *sources], [*want, *values], what)
        lists[1].check(what)


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
    """In place and into float32, times factors that overflow or make subnormals, and as casts; every tie."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype, factor in itertools.product(HALF, (1.0, 0.5, 0.001, 3.0)):
        patterns, exact, what = bits.view(dtype), truncates(device, impl, dtype), f"{dtype} factor {factor}"
        if exact:
            patterns = patterns[~((patterns.abs() < torch.finfo(dtype).tiny) & (patterns != 0))]
        for values in (patterns.to(device), patterns[patterns.isfinite()].to(device)):
            want, into = product(values, factor, torch.float32), torch.empty_like(values, dtype=torch.float32)
            flag, _ = flagged(kernels.unscale_into_, [values], [into], factor=factor, impl=impl)
            same([into], [want], what)
            assert flag == float(not want.isfinite().all()), what
            if factor == 1.0:
                kernels.cast_([values], [into.fill_(-1.0)], impl=impl)
                same([into], [values.float()], f"cast of {dtype}")
            elif not exact:
                want, got = want.to(dtype), values.clone()
                flag, _ = flagged(kernels.unscale_, [got], factor=factor, impl=impl)
                same([got], [want], what)
                assert flag == float(not want.isfinite().all()), what
    halves = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16).float()
    ties = ((halves[:-1] + halves[1:]) / 2).to(device)
    rounded = torch.full_like(ties, torch.nan, dtype=torch.float16)
    kernels.cast_([ties], [rounded], impl=impl)
    same([rounded], [ties.half()], "ties")


@check
def every_planted_value_is_found(device: torch.device, impl: str = "triton") -> None:
    places, on_gpu = [(0, 0), (1, 299), (2, 1023), (2, 1024), (2, 1499)], device.type == "cuda"
    for n, (dtype, value) in enumerate(itertools.product(FLOATS, NONFINITE)):
        for tensor, at in places if on_gpu else [places[n % 5]]:
            grads, what = gradients(dtype, (1, 300, 1500), device=device), f"{dtype} {value} at {tensor}, {at}"
            grads[tensor][at] = value
            for order in ORDERS if on_gpu else [ORDERS[(n + n // 3) % 3]]:  # every order meets every value
                flag, norm = flagged(kernels.norm_and_check, grads, factor=0.5, impl=impl, norm_type=order)
                assert flag == 1.0, what
                assert bool(norm.isnan() if value != value else norm == float("inf")), f"norm {order}, {what}"
            for accumulate in (False, True):
                into = [torch.zeros_like(g, dtype=torch.float32) for g in grads]
                flag, _ = flagged(kernels.unscale_into_, grads, into, factor=0.5, impl=impl, accumulate=accumulate)
                assert flag == 1.0, what
                assert not into[tensor][at].isfinite(), what
            assert flagged(kernels.unscale_, grads, factor=0.5, impl=impl)[0] == 1.0, what
    signalling = torch.full((40,), 0x7FA00000, dtype=torch.int32, device=device).view(torch.float32)
    assert flagged(kernels.unscale_, [signalling], factor=0.5, impl=impl)[0] == 1.0
    ones = torch.ones(3, device=device)
    assert flagged(kernels.unscale_, [ones], factor=0.5, impl=impl, flag=1.0)[0] == 1.0, "the flag was cleared"


@check
def a_product_that_overflows_is_found_by_all_alike(device: torch.device, impl: str = "triton") -> None:
    """Overflow is judged as stored: it starts half a spacing above the largest number."""
    for dtype in FLOATS[:1] + HALF:
        largest, tie = torch.finfo(dtype).max, 2.0 - torch.finfo(dtype).eps / 2
        cases = [(largest / 2, factor) for factor in (0.25, 1.0, 1.5, 4.0)]
        if dtype is not torch.float32 and not truncates(device, impl, dtype):
            power = 2.0 ** math.floor(math.log2(largest))
            cases += [(power, tie), (-power, tie - 2.0**-23)]
        for value, factor in cases:
            grads = [torch.full((20,), value, dtype=dtype, device=device), torch.ones(3, device=device)]
            into, keywords = [torch.empty_like(g) for g in grads], {"factor": factor, "impl": impl}
            flags = [flagged(kernels.norm_and_check, grads, norm_type=order, **keywords)[0] for order in ORDERS]
            flags += [flagged(kernels.unscale_into_, grads, into, **keywords)[0]]
            flags += [flagged(kernels.unscale_, grads, **keywords)[0]]
            expected = float(not product(torch.tensor(value), factor, dtype).isfinite())
            assert flags == [expected] * 5, f"{value} times {factor} in {dtype}"


@check
def norms_against_float64(device: torch.device, impl: str = "triton") -> None:
    lists = [gradients(dtype, scale=10.0, device=device) for dtype in FLOATS]
    mixed = [g for part in lists for g in part[3:6]]
    for grads, order in itertools.product([*lists, mixed], ORDERS):
        guarded, keywords = Guarded(grads), {"factor": 0.25, "impl": impl, "norm_type": order}
        before = [buffer.clone() for buffer in guarded.buffers]
        flag, norm = flagged(kernels.norm_and_check, guarded.views, **keywords)
        want = torch.linalg.vector_norm(torch.cat([g.double() for g in grads]) * 0.25, order)
        what = f"{grads[0].dtype} to {grads[-1].dtype}, order {order}"
        close(norm, want, 1e-5 if device.type == "cuda" else 2e-6, what)
        assert norm.dtype is (torch.float64 if {g.dtype for g in grads} & {torch.float64} else torch.float32)
        assert flag == 0.0, what
        if device.type == "cuda" or order == 2.0:
            same([norm], [flagged(kernels.norm_and_check, guarded.views, **keywords)[1]], f"{what}, again")
        same(guarded.buffers, before, what)
    for dtype in FLOATS[:3]:  # squares that overflow set no flag
        grads = [torch.full((300,), torch.finfo(dtype).max, dtype=dtype, device=device)]
        assert flagged(kernels.norm_and_check, grads, factor=1.0, impl=impl)[0] == 0.0


@check
def multiply_leaves_alone(device: torch.device, impl: str = "triton") -> None:
    grads = gradients(torch.float32, (40, 700), device=device)
    grads[0][3] = float("nan")
    before = [g.clone() for g in grads]
    for factor, found_inf in ((1.0, None), (1.0, 0.0), (0.5, 1.0), (float("nan"), 1.0)):
        flag = None if found_inf is None else scalar(found_inf, device)
        kernels.multiply_(grads, scalar(factor, device), flag, impl=impl)
        same(grads, before, f"factor {factor}, found_inf {found_inf}")


USUAL = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
ADAMW: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.0, "maximize": True},
    {"amsgrad": True, "beta1": 0.3},
    {"grads": torch.float16},
    {"dtype": torch.float64, "amsgrad": True},
    {"dtype": torch.float16, "lr": torch.tensor(0.01)},
]
SGD: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1, "grads": torch.float16},
    {"momentum": 0.9, "nesterov": True, "maximize": True},
    {"momentum": 0.9, "weight_decay": 0.1, "lr": torch.tensor(0.1)},
    {"momentum": 0.9, "dtype": torch.float64},
]
STATE = {kernels.adamw_: ("exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"), kernels.sgd_: ("momentum_buffers",)}
Lists = dict[str, list[Tensor]]


def at_the_start(operation: Callable[..., None], params: Sequence[Tensor], device: torch.device) -> Lists:
    """The lists of an optimizer's first step by name, at aligned and other addresses."""
    wide = torch.promote_types(params[0].dtype, torch.float32)
    zeros = [torch.zeros_like(p, dtype=wide, device=device) for p in params]
    lists = {"params": Guarded([p.to(device) for p in params]).views}
    lists |= {name: Guarded(zeros, (0, 0, 1)).views for name in STATE[operation]}
    lists |= {"steps": [scalar(0.0, device) for _ in params]} if operation is kernels.adamw_ else {}
    return lists


def take_step(operation: Callable[..., None], lists: Lists, grads: Sequence[Tensor], **options: Any) -> None:
    """Take a step; tensors among the options are moved to the device of the lists."""
    device = lists["params"][0].device
    moved = {name: option.to(device) if isinstance(option, Tensor) else option for name, option in options.items()}
    operation(grads=grads, **lists, **moved)


def steps_within_an_ulp(operation: Callable[..., None], device: torch.device, impl: str, **options: Any) -> None:
    """Scaled gradients, some steps skipped; each step is compared with the reference's on the CPU from equal state."""
    dtype = options.pop("dtype", torch.float32)
    grads_dtype = options.pop("grads", dtype)
    sizes = (0, 1, 17, 255, 257, 1030) if device.type == "cpu" else None
    params = gradients(dtype, sizes)
    ours, theirs = (at_the_start(operation, params, where) for where in (device, torch.device("cpu")))
    for i in range(4):
        grads = gradients(grads_dtype, sizes, scale=1024.0)
        sent = Guarded([g.to(device) for g in grads], (0, 1)).views
        before = {name: [t.clone() for t in tensors] for name, tensors in ours.items()}
        what, found_inf = f"{dtype} {options}, step {i}", scalar(float(i in (0, 2)))
        keywords = {**options, "multiplier": scalar(2.0**-11), "grad_scale": scalar(0.5), "found_inf": found_inf}
        take_step(operation, ours, sent, impl=impl, **keywords)
        take_step(operation, theirs, grads, impl="reference", **keywords)
        same(sent, grads, f"{what}: gradients were written")
        if found_inf:
            for name, tensors in ours.items():
                same(tensors, before[name], f"{what}, skipped: {name}")
            continue
        same(ours.get("steps", []), theirs.get("steps", []), what)
        # Ulps of a sum's operands, not of the sum: momenta and parameters may cancel to almost nothing.
        first, *second = STATE[operation][:2]
        operands = zip(theirs["params"], grads, theirs[first], strict=True)
        size = [p.abs() + g.abs() / 1024 + m.abs() + 0.02 for p, g, m in operands]
        # In float64 the bias corrections themselves carry a few roundings.
        within_ulps(ours["params"], theirs["params"], size, 4.0 if dtype is torch.float64 else 1.0, what)
        if second:
            size = [torch.maximum(m.abs(), g.abs() / 1024) for m, g in zip(theirs[first], grads, strict=True)]
            within_ulps(ours[second[0]], theirs[second[0]], theirs[second[0]], 1.0, what)
        within_ulps(ours[first], theirs[first], size, 1.0, what)
        for name, tensors in theirs.items():
            torch._foreach_copy_(ours[name], tensors)


@check
def adamw_steps_within_an_ulp(device: torch.device, impl: str = "triton") -> None:
    for options in ADAMW:
        steps_within_an_ulp(kernels.adamw_, device, impl, **{**USUAL, **options})
    for late in (9_999.0, 1_000_000.0):  # bias corrections
        results = []
        for where, chosen in ((device, impl), (torch.device("cpu"), "reference")):
            lists = at_the_start(kernels.adamw_, [torch.ones(20)], where)
            lists["steps"][0].fill_(late)
            grad = torch.full((20,), 0.1, device=where)
            take_step(kernels.adamw_, lists, [grad], impl=chosen, **{**USUAL, "lr": torch.tensor(0.01)})
            results.append(lists)
        same(results[0]["steps"], [torch.tensor(late + 1)], "count")
        ours, theirs = (lists["params"] for lists in results)
        within_ulps(ours, theirs, theirs, 1.0, f"step {late + 1}")


@check
def sgd_steps_within_an_ulp(device: torch.device, impl: str = "triton") -> None:
    for options in SGD:
        steps_within_an_ulp(kernels.sgd_, device, impl, **{"lr": 0.1, **options})


def from_bfloat16(dtype: torch.dtype, device: torch.device, seed: int = 0) -> list[Tensor]:
    """Values that bfloat16 can represent; the last tensor has another order of dimensions."""
    torch.manual_seed(seed)
    values = gradients(torch.bfloat16, (0, 1, 17, 257, 1030, 24))
    values[-1] = values[-1].reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
    return [value.to(device, dtype) for value in values]


def streams_on(device: torch.device) -> list[Tensor]:
    return [rounding.stream(3, i, device) for i in range(6)]


def stepped(
    operation: Callable[..., None], param: torch.dtype, state: torch.dtype, device: torch.device, **options: Any
) -> list[list[Tensor]]:
    """Parameters and state after a step from values that bfloat16 can represent."""
    lists = {"params": from_bfloat16(param, device), "grads": from_bfloat16(torch.bfloat16, device, 1)}
    for seed, name in enumerate(STATE[operation], 2):
        lists[name] = [t.abs() for t in from_bfloat16(state, device, seed)]
    if operation is kernels.adamw_:
        options |= {**USUAL, "amsgrad": True, "steps": [scalar(1.0, device) for _ in lists["params"]]}
    else:
        options |= {"lr": 0.1, "momentum": 0.9}
    operation(**lists, **{**options, "weight_decay": 0.1})
    return [lists["params"], *(lists[name] for name in STATE[operation])]


@check
def bfloat16_steps_are_float32_ones_rounded(device: torch.device, impl: str = "triton") -> None:
    """The bits stored in bfloat16 are the float32 results, stochastically rounded by PyTorch's operations."""
    low, wide, skip = torch.bfloat16, torch.float32, scalar(1.0, device)
    for operation in STATE:
        kind, step = operation.__name__, functools.partial(stepped, operation, device=device, impl=impl)
        exact, streams = step(wide, wide), streams_on(device)
        advanced = [stream + rounding.STEP for stream in streams]
        same(step(low, low, streams=streams, found_inf=skip)[0], from_bfloat16(low, device), "a skipped step")
        rounded = step(low, low, streams=streams)
        same(streams, advanced, "streams")
        for number, (ours, unrounded) in enumerate(zip(rounded, exact, strict=True)):
            bits = [rounding.random_bits(stream, w)[number] for stream, w in zip(advanced, unrounded, strict=True)]
            want = [rounding.rounded(w, b).bfloat16() for w, b in zip(unrounded, bits, strict=True)]
            same(ours, want, f"{kind}, list {number}")
        mixed = step(wide, low, streams=streams_on(device))
        same(mixed[0] + mixed[1], exact[0] + rounded[1], f"{kind}, float32 weights with moments of bfloat16")


@check
def remainders_are_stepped_as_float32(device: torch.device, impl: str = "triton") -> None:
    low, wide, skip = torch.bfloat16, torch.float32, scalar(1.0, device)

    def numbers(remainders: Sequence[Tensor]) -> list[Tensor]:
        return [remainder.view(torch.int16) for remainder in remainders]  # as float16 some are NaN

    for operation in STATE:
        kind, step = operation.__name__, functools.partial(stepped, operation, device=device, impl=impl)
        exact, zeros = step(wide, wide), [torch.zeros_like(t).half() for t in from_bfloat16(low, device)]
        remainders = [t.clone() for t in zeros]
        results = step(low, wide, remainders=remainders)
        weights, cut = zip(*(rounding.split(weight) for weight in exact[0]), strict=True)
        same(results[0] + results[1], [*weights, *exact[1]], f"{kind}, weights and momenta")
        same(numbers(remainders), numbers(cut), f"{kind}, remainders")
        step(low, wide, remainders=remainders, found_inf=skip)
        same(numbers(remainders), numbers(cut), f"{kind}, a skipped step")
        (_, momenta, *_), streams = step(wide, low, streams=streams_on(device)), streams_on(device)
        same(step(low, low, remainders=zeros, streams=streams)[1], momenta, f"{kind}, momenta beside remainders")
