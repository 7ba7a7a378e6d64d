"""Every kernel variant that a launcher can launch, with the requirements on its machine code.

The launchers run here, on the CPU, and their launches become cases instead of being run. Ceilings are the registers
that the compilers of triton 3.6 to 3.9 use, rounded up; with 64 registers four programs of eight warps share a
multiprocessor. Must run in a process without TRITON_INTERPRET.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import triton.language as tl
from torch import Tensor
from triton.compiler import ASTSource

from ampkit_kernels.configs import INTERPRETED_MULTIPROCESSORS
from ampkit_kernels.float8_scaling import Scaling
from ampkit_kernels.triton_ops import float8_quantize, norm, optimizer_step, unscale, unscale_into
from ampkit_kernels.triton_ops.launch import TRITON_DTYPES, jit_kernel
from tests.kernels.aot import Case

FP32, FP16, BF16, FP64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
NAMES = {dtype: str(name) for dtype, name in {**TRITON_DTYPES, **float8_quantize.FP8}.items()}
NAMES |= {torch.int64: "i64", torch.int32: "i32"}
N = 1 << 16  # elements of a list: chunks for every program of a grid
# Registers per thread; 64 for other kernels; 128 in float64, and where lists are not aligned.
CEILINGS = {
    "unscale": 80,
    "unscale_into": 96,
    "norm": 72,
    "inverse": 32,
    "row": 96,
    "tile": 96,
}
ONE, FLAG = torch.ones(()), torch.zeros(())
SCALARS: dict[str, Any] = {"multiplier": ONE, "grad_scale": ONE, "found_inf": FLAG}


def numbers(dtype: torch.dtype, aligned: bool = True) -> list[Tensor]:
    """A list of one tensor."""
    return [torch.zeros(N + 1, dtype=dtype)[0 if aligned else 1 :]]


def gradient_passes() -> None:
    """unscale and norm in every dtype, multiply, 1 / scale; the rarer norms in the dtypes whose code differs most."""
    unscale.inverse_scale(ONE)
    for dtype in (FP32, FP16, BF16, FP64):
        unscale.unscale_(numbers(dtype), ONE, FLAG)
        for order in (2.0,) if dtype is FP16 else (1.0, 2.0, float("inf")):
            norm.norm_and_check(numbers(dtype), ONE, FLAG, order)
            norm.norm_and_clip_factor(numbers(dtype), ONE, FLAG, 1.0, order)
    for found_inf in (FLAG, None):
        unscale.multiply_(numbers(FP32), ONE, found_inf)


def casts() -> None:
    """Masters to halves and back, gradients to master gradients, overwriting and adding; unaligned lists."""
    for source, destination in itertools.product((FP32, FP16, BF16, FP64), repeat=2):
        unscale_into.cast_(numbers(source), numbers(destination))
    for source, destination in ((FP32, FP16), (FP32, BF16), (BF16, FP32)):
        unscale_into.cast_(numbers(source, aligned=False), numbers(destination))
    for source, accumulate, aligned in itertools.product((FP16, BF16, FP32), (False, True), (True, False)):
        lists = numbers(source, aligned), numbers(FP32)
        unscale_into.unscale_into_(*lists, ONE, FLAG, accumulate=accumulate)


def step(
    kind: str,
    param: torch.dtype,
    grad: torch.dtype,
    state: torch.dtype,
    *,
    aligned: bool = True,
    amsgrad: bool = False,
    remainder: bool = False,
    stochastic: bool = False,
    **options: Any,
) -> None:
    """A step of an optimizer."""
    lists = {"params": numbers(param), "grads": numbers(grad, aligned)}
    names = ["exp_avgs", "exp_avg_sqs", *["max_exp_avg_sqs"] * amsgrad]
    if kind == "sgd":
        names = ["momentum_buffers"] if options.setdefault("momentum", 0.9) else []
    lists |= {name: numbers(state) for name in names}
    lists |= {"remainders": numbers(FP16)} if remainder else {}
    lists |= {"streams": [torch.zeros((), dtype=torch.int64)]} if stochastic else {}
    options = {"lr": 0.1, "weight_decay": 0.1, **options}
    if kind == "sgd":
        optimizer_step.sgd_(lists, cache=None, **options)
    else:
        options = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, **options}
        optimizer_step.adamw_({**lists, "steps": [torch.zeros(())]}, cache=None, **options)


def steps() -> None:
    """Dtypes of parameters, gradients and state, alignment, device scalars, remainders; rarer options."""
    for kind in ("adamw", "sgd"):
        for grad in (FP32, FP16, BF16):
            step(kind, FP32, grad, FP32, **SCALARS)
        for dtype in (FP16, BF16, FP64):
            step(kind, dtype, dtype, dtype, **SCALARS)
        step(kind, FP32, FP32, FP32, aligned=False, **SCALARS)
        for dtype, state in ((BF16, BF16), (BF16, FP32), (FP32, BF16)):
            step(kind, dtype, dtype, state, stochastic=True, **SCALARS)
        step(kind, BF16, BF16, BF16, stochastic=True, aligned=False, **SCALARS)
        step(kind, BF16, BF16, FP32, remainder=True, **SCALARS)
    step("adamw", BF16, BF16, BF16, remainder=True, stochastic=True, **SCALARS)
    step("adamw", FP32, FP32, FP32, amsgrad=True, **SCALARS)
    step("adamw", FP32, FP16, FP32, amsgrad=True, aligned=False, **SCALARS)
    step("adamw", FP32, FP32, FP32, beta1=0.3, lr=ONE, maximize=True)
    step("sgd", FP32, FP16, FP32, nesterov=True, lr=ONE, maximize=True, **SCALARS)
    step("sgd", FP32, FP32, FP32, momentum=0.0, weight_decay=0.0, **SCALARS)


def float8_casts() -> None:
    """Both forms by one scale and by rows and columns; the rows alone; odd sizes, whose rows are not aligned."""
    tensor, gradient = Scaling(False, torch.float8_e4m3fn, True), Scaling(False, torch.float8_e5m2, False)
    row = tensor._replace(rowwise=True)
    for dtype, columns in itertools.product((FP32, BF16), (4096, 4095)):
        for forms in ((tensor, tensor), (gradient, gradient), (row, row), (row, None)):
            float8_quantize.quantize(torch.zeros(64, columns, dtype=dtype), *forms)


def lists_walked(kernel: str, constants: dict[str, Any]) -> tuple[list[tl.dtype], list[tl.dtype]]:
    """The dtypes of the lists that a kernel reads, and of those that it writes."""
    if kernel == "unscale_into":
        written = [constants["DESTINATION"]]
        return [constants["SOURCE"], *written * constants["ACCUMULATE"]], written
    if kernel == "step":
        both = [constants["param"], *[constants["state"]] * constants["n_state"], *[tl.int16] * constants["remainder"]]
        return [constants["grad"], *both], both
    return [constants["DTYPE"]], [constants["DTYPE"]] * (kernel != "norm")


def case_of(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> Case:
    """The variant that a launch compiles, and the requirements on its code."""
    named = dict(zip(kernel.arg_names, arguments, strict=False)) | options
    name, words, types = kernel.fn.__name__.removesuffix("_kernel"), [], {}
    constants: dict[str, Any] = {}
    compiled, attrs = {}, {}
    for number, parameter in enumerate(kernel.params):
        key, value = parameter.name, named.pop(parameter.name)
        if parameter.is_constexpr:
            compiled[key], types[key] = value, "constexpr"
            for word, constant in (vars(value) if key == "FORM" else {key: value}).items():
                constants[word] = constant
                if word not in ("acc", "ACC", "ITEMSIZE", "BLOCK") and constant is not False:
                    words.append(word.lower() if constant is True else str(constant))
        elif isinstance(value, Tensor):
            types[key] = f"*{NAMES[value.dtype]}"
            if key.endswith("_ptr") and value.dtype is not FP32 and "blocks" not in types:
                words.append(NAMES[value.dtype])
            if not parameter.do_not_specialize and value.data_ptr() % 16 == 0:
                attrs[(number,)] = [["tt.divisibility", 16]]
        else:
            annotation = kernel.fn.__annotations__.get(key)
            types[key] = "i32" if annotation is None else {tl.int64: "i64", tl.int32: "i32"}.get(annotation, "fp64")
    if "enable_fp_fusion" not in named:
        raise AssertionError(f"{name}: the launch must set enable_fp_fusion, whose default differs between Tritons")
    aligned, is_float8 = constants.get("ALIGNED", constants.get("aligned", True)), "x_ptr" in types
    is_wide = tl.float64 in (constants.get("ACC"), constants.get("acc"))
    required: dict[str, Any] = {}
    if "blocks" in types:
        read, written = lists_walked(name, constants)
        # A list has wide accesses where a thread has 16 bytes or more of a block.
        per_thread = constants["BLOCK"] // (32 * named["num_warps"]) if aligned else 0
        wide_loads, wide_stores = (
            len([dtype for dtype in dtypes if per_thread * dtype.primitive_bitwidth >= 128])
            for dtypes in (read, written)
        )
        required = {
            "wide_loads": wide_loads,
            "wide_stores": wide_stores,
            "lists_read": len(read),
            # Grids are not made smaller for unaligned lists.
            "programs": grid[0] // INTERPRETED_MULTIPROCESSORS if aligned else 0,
        }
    elif is_float8:
        required = {"wide_loads": int(aligned), "wide_stores": int(aligned and name == "tile")}
    ceiling = CEILINGS.get(name, 64) if aligned and not is_wide else 128
    source = ASTSource(kernel, types, compiled, attrs)
    return Case(" ".join([name, *words]), source, named, ceiling, (89 if is_float8 else 80, 90, 100), **required)


def cases_of(*launchers: Callable[[], None]) -> list[Case]:
    """The variants that these functions launch."""
    cases: dict[str, Case] = {}

    def launcher(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            case = case_of(kernel, grid, arguments, options)
            if cases.setdefault(case.name, case).source.hash() != case.source.hash():
                raise AssertionError(f"two variants are called {case.name!r}")

        return launch

    with mock.patch.object(type(unscale.unscale_kernel), "__getitem__", launcher):
        for run in launchers:
            run()
    return [*cases.values()]


@jit_kernel
def waiting_kernel(addresses, n_blocks, BLOCK: tl.constexpr):
    # A store to one list comes before a load from another: the compiler does not know that they do not overlap.
    p = tl.multiple_of(tl.load(addresses).to(tl.pointer_type(tl.float32)), 16) + tl.arange(0, BLOCK)
    q = tl.multiple_of(tl.load(addresses + 1).to(tl.pointer_type(tl.float32)), 16) + tl.arange(0, BLOCK)
    i = tl.program_id(0)
    while i < n_blocks:
        tl.store(p + i * BLOCK, tl.load(p + i * BLOCK) * 2.0)
        tl.store(q + i * BLOCK, tl.load(q + i * BLOCK) * 2.0)
        i += tl.num_programs(0)


def bad_cases(good: list[Case]) -> list[Case]:
    """Code that is bad on purpose: accesses of single elements, too few registers, a wait in a loop."""
    step = next(case for case in good if case.name.startswith("step adamw") and " aligned" in case.name)
    narrow = next(case for case in good if case.name.startswith("step adamw") and " aligned" not in case.name)
    table, options = torch.zeros(2, dtype=torch.int64), {"num_warps": 8, "enable_fp_fusion": False}
    (waiting,) = cases_of(lambda: waiting_kernel[(1,)](table, 1, BLOCK=1024, **options))
    return [
        replace(narrow, name="bad, narrow", wide_loads=1, capabilities=(90,), bad="0 128-bit loads"),
        replace(step, name="bad, spills", options={**step.options, "maxnreg": 32}, capabilities=(90,), bad="spills"),
        replace(waiting, name="bad, waits", lists_read=2, capabilities=(90,), bad="a load waits for a store"),
    ]


def all_cases() -> list[Case]:
    """Every variant, and the bad ones; names are unique."""
    good = cases_of(gradient_passes, casts, steps, float8_casts)
    return [*good, *bad_cases(good)]
