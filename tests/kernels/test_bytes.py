"""The kernels read and write the bytes of the byte model, counted access by access in the interpreter."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import ampkit_kernels as kernels
from benchmarks import byte_model as model
from tests.gpu_checks.tools import gradients, scalar

SIZES = (1, 17, 256, 1025, 3000)
HALF, FLAG, SKIP = scalar(0.5), scalar(0.0), scalar(1.0)
NOTHING = model.Bytes(0, 0)


def lists(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [g.abs().to(dtype) for g in gradients(torch.float32, SIZES)]


def step(kind: Callable[..., None], n_lists: int, *of: list[Tensor], remainders: bool = False, **given: Any) -> None:
    """A step over the first `n_lists` lists; with `remainders`, the last list is that argument."""
    given = {"found_inf": FLAG, **given, **({"remainders": of[-1]} if remainders else {})}
    kind(*of[:n_lists], lr=0.1, weight_decay=0.1, multiplier=HALF, impl="triton", **given)


COUNTS, STREAMS = [torch.zeros(()) for _ in SIZES], [torch.zeros((), dtype=torch.int64) for _ in SIZES]
adamw = partial(step, kernels.adamw_, 5, steps=COUNTS, beta1=0.9, beta2=0.99, eps=1e-8)
sgd = partial(step, kernels.sgd_, 3)
BF16, FP16, FLOAT = torch.bfloat16, torch.float16, torch.float32
STEP = [FLOAT] * 5
# The dtype of each list, the operation over the lists, its bytes per element of one list.
CASES: dict[str, tuple[list[torch.dtype], Callable[..., object], model.Bytes]] = {
    "unscale": ([FLOAT], lambda g: kernels.unscale_(g, HALF, FLAG, impl="triton"), model.UNSCALE),
    "norm": ([FLOAT], lambda g: kernels.norm_and_check(g, HALF, FLAG, impl="triton"), model.NORM),
    "multiply": ([FLOAT], lambda g: kernels.multiply_(g, HALF, impl="triton"), model.MULTIPLY),
    "multiply by 1": ([FLOAT], lambda g: kernels.multiply_(g, SKIP, impl="triton"), NOTHING),
    "multiply, skipped": ([FLOAT], lambda g: kernels.multiply_(g, HALF, SKIP, impl="triton"), NOTHING),
    "unscale into": (
        [FP16, FLOAT],
        lambda s, d: kernels.unscale_into_(s, d, HALF, FLAG, impl="triton"),
        model.UNSCALE_INTO,
    ),
    "cast": ([FLOAT, FP16], lambda s, d: kernels.cast_(s, d, impl="triton"), model.CAST_TO_HALF),
    "adamw": (STEP, adamw, model.ADAMW),
    "adamw, amsgrad": (STEP, partial(adamw, amsgrad=True), model.ADAMW_AMSGRAD),
    "adamw, skipped": (STEP, partial(adamw, found_inf=SKIP, amsgrad=True), NOTHING),
    "adamw, bfloat16": ([BF16] * 5, partial(adamw, streams=STREAMS), model.step(2, 2, 2)),
    "adamw, bfloat16, wide moments": ([BF16, BF16, *[FLOAT] * 3], partial(adamw, streams=STREAMS), model.step(2, 2, 4)),
    "adamw, narrow moments": ([FLOAT, FLOAT, *[BF16] * 3], partial(adamw, streams=STREAMS), model.step(2, 4, 2)),
    "adamw, remainder": (
        [BF16, BF16, *[FLOAT] * 3, FP16],
        partial(adamw, remainders=True),
        model.step(2, 2, 4, remainder=2),
    ),
    "adamw, remainder, narrow moments": (
        [*[BF16] * 5, FP16],
        partial(adamw, remainders=True, streams=STREAMS),
        model.step(2, 2, 2, remainder=2),
    ),
    "sgd, momentum": ([FLOAT] * 3, partial(sgd, momentum=0.9), model.SGD_MOMENTUM),
    "sgd": ([FLOAT] * 3, sgd, model.SGD_PLAIN),
    "sgd, bfloat16": ([BF16] * 3, partial(sgd, momentum=0.9, streams=STREAMS), model.step(1, 2, 2)),
    "sgd, remainder": (
        [BF16, BF16, FLOAT, FP16],
        partial(sgd, remainders=True, momentum=0.9),
        model.step(1, 2, 4, remainder=2),
    ),
}


def count_accesses(monkeypatch: pytest.MonkeyPatch, ranges: list[tuple[int, int]], widest: int = 64) -> dict[str, int]:
    """Count the bytes that kernels load and store in ranges of addresses, in elements of at most `widest` bits."""
    from triton.runtime.interpreter import InterpreterBuilder

    touched = {"load": 0, "store": 0}

    def counted(kind: str, original: Callable[..., object], mask_at: int) -> Callable[..., object]:
        def access(builder, *arguments):
            ptrs, mask = arguments[0], arguments[mask_at]
            addresses = ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)]
            inside = sum(int(((addresses >= start) & (addresses < stop)).sum()) for start, stop in ranges)
            bits = ptrs.get_element_ty().primitive_bitwidth
            touched[kind] += inside * bits // 8 if bits <= widest else 0
            return original(builder, *arguments)

        return access

    for kind, mask in (("load", 1), ("store", 2)):  # pointers, mask; pointers, values, mask
        name = f"create_masked_{kind}"
        monkeypatch.setattr(InterpreterBuilder, name, counted(kind, getattr(InterpreterBuilder, name), mask))
    return touched


@pytest.mark.parametrize("name", CASES)
def test_bytes_per_element(interpreted, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dtypes, run, want = CASES[name]
    tensors = [lists(dtype) for dtype in dtypes]
    ranges = [(t.data_ptr(), t.data_ptr() + t.nbytes) for part in tensors for t in part]
    touched = count_accesses(monkeypatch, ranges)
    run(*tensors)
    assert (touched["load"], touched["store"]) == (want.read * sum(SIZES), want.written * sum(SIZES))


def test_steps_add_up_to_the_figures_of_docs_optim() -> None:
    """Bytes of an element's weight, state and remainder; their sum as they are read and written."""
    rows = [(4, 4, 0), (2, 2, 0), (2, 4, 0), (2, 4, 2), (2, 2, 2), (4, 2, 0)]
    assert [model.step(2, *row).total for row in rows] == [28, 14, 22, 26, 18, 20]
    assert [model.step(1, *row).total for row in rows] == [20, 10, 14, 18, 14, 16]
