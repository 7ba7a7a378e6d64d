"""Every kernel variant that a launcher can ask for, with what its machine code must look like.

Ceilings are what the compilers of triton 3.6 to 3.9 use, rounded up; 64 registers let four programs of eight warps
share a multiprocessor. Wide accesses are counted in the unmasked loop: at least one per list and direction.
"""

from collections.abc import Iterator
from typing import Any

import triton
import triton.language as tl

from ampkit_kernels.configs import Config
from ampkit_kernels.triton_ops import adamw, float8, norm, scale, sgd, unscale, unscale_into
from tests.kernels.aot import Case

SIZES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp64": 8}
DTYPES = {"fp32": tl.float32, "fp16": tl.float16, "bf16": tl.bfloat16, "fp64": tl.float64}
NO_FUSION = {"enable_fp_fusion": False}


def one_list(name: str) -> dict[str, Any]:
    """Constants of the kernels that walk one list."""
    return {
        "DTYPE": DTYPES[name],
        "ACC": tl.float64 if name == "fp64" else tl.float32,
        "ITEMSIZE": SIZES[name],
    }


def gradient_passes() -> Iterator[Case]:
    """unscale, norm, multiply in every dtype; the rarer norms in those whose code differs most."""
    for name, size in SIZES.items():
        config = unscale.CONFIGS[size]
        for checks, skips in ((True, False), (False, True), (False, False)) if name == "fp32" else ((True, False),):
            constants = {**one_list(name), "CHECKS": checks, "SKIPS": skips}
            label = f"{'unscale' if checks else 'multiply'} {name}{' or skip' * skips}"
            yield _case(label, unscale.unscale_kernel, config, constants, 80, 1, 1)
        for order in (0, 1, 2) if name in ("fp32", "bf16") else (2,):
            constants = {**one_list(name), "ORDER": order}
            label = f"norm p={order or 'inf'} {name}"
            ceiling = 72 if size == 2 else 64
            fusion = {"enable_fp_fusion": order != 0}
            yield _case(label, norm.norm_kernel, norm.CONFIGS[size], constants, ceiling, 1, 0, fusion)


def casts() -> Iterator[Case]:
    """Masters to halves and back, and the scalar path for unaligned views."""
    pairs = [("fp32", "fp16", True), ("fp32", "bf16", True), ("fp32", "bf16", False)]
    pairs += [("fp16", "fp32", True), ("bf16", "fp32", True), ("fp64", "fp16", True)]
    pairs += [("fp16", "bf16", True), ("bf16", "fp16", True), ("fp64", "bf16", True), ("fp32", "fp32", True)]
    pairs += [("fp32", "fp16", False), ("bf16", "fp32", False)]
    for source, destination, aligned in pairs:
        constants = {
            "SOURCE": DTYPES[source], "DESTINATION": DTYPES[destination], "ACC": DTYPES[source], "SCALES": False,
            "ACCUMULATE": False, "ALIGNED": aligned,
        }
        label = f"cast {source} to {destination}{'' if aligned else ' unaligned'}"
        kernel, wide = unscale_into.unscale_into_kernel, int(aligned)
        yield _case(label, kernel, unscale_into.CONFIG, constants, 96, wide, wide)


def unscales_into() -> Iterator[Case]:
    """Gradients of half or float32 models to float32 master gradients, overwriting and adding; and the scalar path."""
    for source in ("fp16", "bf16", "fp32"):
        for accumulate, aligned in ((False, True), (True, True), (False, False), (True, False)):
            constants = {
                "SOURCE": DTYPES[source], "DESTINATION": tl.float32, "ACC": tl.float32, "SCALES": True,
                "ACCUMULATE": accumulate, "ALIGNED": aligned,
            }
            label = f"unscale_into {source}{' adding' * accumulate}{'' if aligned else ' unaligned'}"
            config = unscale_into.CONFIG_ADDING if accumulate else unscale_into.CONFIG
            kernel, wide = unscale_into.unscale_into_kernel, int(aligned)
            # Two float32 lists a word at a time keep many addresses; shorter blocks spill on sm_80 instead.
            ceiling = 80 if aligned or source != "fp32" else 128
            yield _case(label, kernel, config, constants, ceiling, wide, wide, lists_read=1 + accumulate)


def adamw_steps() -> Iterator[Case]:
    """AdamW over gradient dtypes, amsgrad, copies, alignment, and in half and double precision throughout."""
    variants = [("fp32", grad, "fp32", False, None, True) for grad in ("fp32", "fp16", "bf16")]
    variants += [("fp32", "fp32", "fp32", True, None, True), ("fp32", "fp32", "fp32", False, None, False)]
    variants += [("fp32", "fp32", "fp32", False, copy, True) for copy in ("fp16", "bf16")]
    variants += [(kind, kind, kind, False, None, True) for kind in ("fp16", "bf16", "fp64")]
    variants += [("fp32", "fp16", "fp32", True, "fp16", False)]
    for param, grad, moment, amsgrad, copy, aligned in variants:
        acc = tl.float64 if param == "fp64" else tl.float32
        constants = {
            "PARAM": DTYPES[param], "GRAD": DTYPES[grad], "MOMENT": DTYPES[moment], "COPY_TO": DTYPES[copy or moment],
            "ACC": acc, "AMSGRAD": amsgrad, "COPY": copy is not None, "LERP_FROM_END": False, "HAS_FOUND_INF": True,
            "REMAINDER": False, "STOCHASTIC": False, "ALIGNED": aligned,
        }
        label = f"adamw {param} g={grad}{' amsgrad' * amsgrad}{f' copy={copy}' if copy else ''}"
        # Four elements per thread: 16 bytes where the list is fp32, 8 where it is half.
        wide = 0 if not aligned or param in ("fp16", "bf16") else 3
        # Word by word, all that is loaded before the first store wants an address each.
        ceiling = 128 if param == "fp64" else 64 if aligned else 96 if amsgrad else 80
        config = adamw.CONFIGS[8 if param == "fp64" else 4]
        label += "" if aligned else " unaligned"
        yield _case(label, adamw.adamw_kernel, config, constants, ceiling, wide, wide, lists_read=4 + amsgrad)
        if label == "adamw fp32 g=fp32":  # an optimizer without a scaler, and one whose beta1 is below a half
            constants = {**constants, "HAS_FOUND_INF": False, "LERP_FROM_END": True}
            yield _case(f"{label} alone", adamw.adamw_kernel, config, constants, ceiling, wide, wide, lists_read=4)
    for several in (False, True):
        constants = {
            "HAS_LR": several, "HAS_MULTIPLIER": several, "HAS_GRAD_SCALE": several, "HAS_FOUND_INF": several,
            "MAXIMIZE": several, "STOCHASTIC": several, "STEPS_COLUMN": 4, "BLOCK": 128,
        }
        yield Case(f"adamw prepare {several}", adamw.prepare_kernel, constants, 4, 64)


def steps_of_low_bits() -> Iterator[Case]:
    """Weights and moments of 16 bits, rounded at random, with remainders, or both, by either optimizer."""
    for param, moment, remainder, stochastic, aligned in (
        ("bf16", "bf16", False, True, True), ("bf16", "fp32", False, True, True), ("fp32", "bf16", False, True, True),
        ("bf16", "fp32", True, False, True), ("bf16", "bf16", True, True, True), ("bf16", "bf16", False, True, False),
    ):
        lists = {
            "PARAM": DTYPES[param], "GRAD": DTYPES[param], "MOMENT": DTYPES[moment],
            "COPY_TO": tl.int16 if remainder else DTYPES[moment], "ACC": tl.float32, "COPY": False,
            "REMAINDER": remainder, "STOCHASTIC": stochastic, "HAS_FOUND_INF": True, "ALIGNED": aligned,
        }
        label = f"{param} state={moment}{' remainder' * remainder}{' stochastic' * stochastic}"
        label += "" if aligned else " unaligned"
        loads, stores = 2 * (param == "fp32") + 2 * (moment == "fp32"), (param == "fp32") + 2 * (moment == "fp32")
        ceiling = 64 if aligned else 104
        yield _case(
            f"adamw {label}", adamw.adamw_kernel, adamw.CONFIGS[4], {**lists, "AMSGRAD": False, "LERP_FROM_END": False},
            ceiling, loads, stores, lists_read=4 + remainder,
        )
        if remainder and stochastic:
            continue
        flags = dict.fromkeys(("HAS_LR", "HAS_MULTIPLIER", "HAS_GRAD_SCALE", "MAXIMIZE", "DECAY"), True)
        yield _case(
            f"sgd {label}", sgd.sgd_kernel, sgd.CONFIGS[4], {**lists, **flags, "MOMENTUM": True, "NESTEROV": False},
            ceiling, int(aligned), int(aligned), lists_read=3 + remainder,
        )
    yield Case("sgd advance", sgd.advance_kernel, {"HAS_FOUND_INF": True, "COLUMN": 3, "BLOCK": 128}, 4, 32)


def sgd_steps() -> Iterator[Case]:
    """SGD with and without momentum, nesterov, decay, copies, alignment, device scalars; in one dtype throughout."""
    flags = ("HAS_LR", "HAS_MULTIPLIER", "HAS_GRAD_SCALE", "HAS_FOUND_INF", "MAXIMIZE")
    for param, grad, momentum, nesterov, decay, copy, aligned, several in (
        ("fp32", "fp32", True, False, True, None, True, True),
        ("fp32", "fp16", True, True, True, None, True, True),
        ("fp32", "fp32", False, False, False, None, True, True),
        ("fp32", "fp32", True, False, True, "bf16", True, True),
        ("fp32", "fp32", True, False, True, None, False, True),
        *((name, name, True, False, True, None, True, False) for name in ("fp16", "bf16", "fp64")),
    ):
        constants = {
            "PARAM": DTYPES[param], "GRAD": DTYPES[grad], "MOMENT": DTYPES[param], "COPY_TO": DTYPES[copy or param],
            "ACC": tl.float64 if param == "fp64" else tl.float32, "MOMENTUM": momentum, "NESTEROV": nesterov,
            "DECAY": decay, "COPY": copy is not None, "REMAINDER": False, "STOCHASTIC": False, "ALIGNED": aligned,
            **dict.fromkeys(flags, several),
        }
        label = f"sgd {param} g={grad}{' momentum' * momentum}{' nesterov' * nesterov}{f' copy={copy}' if copy else ''}"
        label += "" if aligned else " unaligned"
        wide = 1 + momentum if aligned else 0
        config = sgd.CONFIGS[8 if param == "fp64" else 4]
        yield _case(label, sgd.sgd_kernel, config, constants, 64, wide, wide, lists_read=2 + momentum)


def small_kernels() -> Iterator[Case]:
    """Those of one program: nothing is asked of their accesses but that they compile without spills."""
    for order in (0, 1, 2):
        for result in ("fp32", "fp64"):
            for clips in (False, True):
                label = f"finish p={order or 'inf'} {result}{' clip' * clips}"
                constants = {"ORDER": order, "CLIPS": clips, "BLOCK": 1024}
                yield Case(label, norm.finish_kernel, constants, 4, 64, types={"result_ptr": f"*{result}"})
    yield Case("inverse scale", scale.inverse_kernel, {}, 1, 32)
    counters: dict[str, str] = dict.fromkeys(("tracker_ptr", "left_ptr", "updates_ptr", "overflows_ptr"), "*i32")
    for clean in (False, True):
        yield Case(f"update scale {clean}", scale.update_kernel, {"REFILLS_WHEN_CLEAN": clean}, 1, 64, types=counters)
    yield Case("tally", scale.tally_kernel, {}, 1, 32)


def float8_casts() -> Iterator[Case]:
    """Both forms by one scale and by rows and columns; the rows alone; the scalar path of odd sizes."""
    dtypes = {"e4m3": tl.float8e4nv, "e5m2": tl.float8e5}
    for name in ("fp32", "bf16"):
        config, x = float8.CONFIG, {"x_ptr": f"*{name}", "amax_ptr": "*i32", "n": "i64"}
        constants: dict[str, Any] = {"BLOCK": config.block}
        addresses = ("x_ptr", "q_ptr", "q_t_ptr")
        yield Case(
            f"float8 amax {name}", float8.amax_kernel, constants, config.num_warps, 64, 1, types=x, aligned=addresses
        )
        for kind, aligned in (("e4m3", True), ("e5m2", True), ("e4m3", False)):
            scaling = {"LARGEST": 448.0, "POWER_OF_2": kind == "e4m3", "DTYPE": dtypes[kind], "ALIGNED": aligned}
            pointer = {"e4m3": "*fp8e4nv", "e5m2": "*fp8e5"}[kind]
            types = {**x, "q_ptr": pointer, "q_t_ptr": pointer, "rows": "i32", "columns": "i32"}
            label = f"{name} {kind}{'' if aligned else ' unaligned'}"
            for by_column in (False, True):
                constants = {
                    **scaling, "BY_COLUMN": by_column, "CASTS": not by_column, "TRANSPOSES": True, "TILE": float8.TILE
                }
                yield Case(
                    f"float8 tile {label} {'columns' if by_column else 'both'}", float8.tile_kernel, constants, 8, 96,
                    int(aligned), int(aligned), types=types, aligned=addresses,
                )
            for both in (True, False) if kind == "e4m3" else ():
                block = 4096
                constants = {
                    **scaling, "CASTS": True, "COLUMN_AMAX": both, "ROWS": float8.ROWS if both else 1, "BLOCK": block
                }
                yield Case(
                    f"float8 row {label}{' and columns' * both}", float8.row_kernel, constants,
                    float8.row_warps(block), 96, int(aligned), types=types, aligned=addresses,
                )


def _case(
    name: str, kernel: Any, config: Config, constants: dict[str, Any], registers: int, loads: int, stores: int,
    options: dict[str, Any] = NO_FUSION, lists_read: int = 1,
) -> Case:
    # Coefficients have the type of the arithmetic.
    types = {"coefficients_ptr": "*fp64"} if constants.get("ACC") is tl.float64 else {}
    constants = {**constants, "BLOCK": config.block}
    # The scalar path for unaligned views is no reason for smaller grids.
    programs = config.programs_per_multiprocessor if constants.get("ALIGNED", True) else 0
    warps = config.num_warps
    return Case(name, kernel, constants, warps, registers, loads, stores, lists_read, programs, types, options)


@triton.jit
def _unvectorised_kernel(addresses, numels, blocks, found_inf_ptr, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    # The addressing that looks sufficient and is not: the pointer is known to be aligned, but every access is masked.
    entry = tl.load(blocks + tl.program_id(0))
    tensor = entry & 0xFFFFFFFF
    p = tl.multiple_of(tl.load(addresses + tensor).to(tl.pointer_type(DTYPE)), 16)
    o = (entry >> 32) * BLOCK + tl.arange(0, BLOCK)
    mask = o < tl.load(numels + tensor)
    tl.store(p + o, tl.load(p + o, mask=mask, other=0.0) * tl.load(found_inf_ptr), mask=mask)


@triton.jit
def _hungry_kernel(addresses, found_inf_ptr, BLOCK: tl.constexpr):
    # Needs every value again after it has seen them all: far more at once than a thread has registers.
    p = tl.multiple_of(tl.load(addresses).to(tl.pointer_type(tl.float32)), 16) + tl.arange(0, BLOCK)
    values = tl.load(p)
    tl.store(p, values * tl.sum(values) * tl.load(found_inf_ptr))


@triton.jit
def _waiting_kernel(addresses, n_blocks, BLOCK: tl.constexpr):
    # Stores to one list before it loads from another: the compiler does not know that they do not overlap.
    p = tl.multiple_of(tl.load(addresses).to(tl.pointer_type(tl.float32)), 16) + tl.arange(0, BLOCK)
    q = tl.multiple_of(tl.load(addresses + 1).to(tl.pointer_type(tl.float32)), 16) + tl.arange(0, BLOCK)
    i = tl.program_id(0)
    while i < n_blocks:
        tl.store(p + i * BLOCK, tl.load(p + i * BLOCK) * 2.0)
        tl.store(q + i * BLOCK, tl.load(q + i * BLOCK) * 2.0)
        i += tl.num_programs(0)


BAD = [
    Case("unvectorised", _unvectorised_kernel, {"DTYPE": tl.float32, "BLOCK": 4096}, 8, 64, 1, 1),
    Case("hungry", _hungry_kernel, {"BLOCK": 65536}, 4, 64, 1, 1),
    Case("waiting", _waiting_kernel, {"BLOCK": 1024}, 8, 64, 2, 2, lists_read=2),
]


def all_cases() -> list[Case]:
    """Every variant; names are unique."""
    return [
        *gradient_passes(), *casts(), *unscales_into(), *adamw_steps(), *sgd_steps(), *steps_of_low_bits(),
        *small_kernels(), *float8_casts(),
    ]
