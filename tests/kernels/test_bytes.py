"""The bytes that the kernels touch, counted access by access in the interpreter, are those of the byte model."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from ampkit_kernels import (
    adamw_,
    cast_,
    multiply_,
    nonfinite_counts,
    norm_and_check,
    sgd_,
    unscale_,
    unscale_into_,
)
from benchmarks import byte_model as model
from tests.kernels.helpers import gradients

SIZES = (1, 17, 256, 1025, 3000)


class Meter:
    """Bytes read and written inside the storage of some tensors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from triton.runtime.interpreter import InterpreterBuilder

        self.read = self.written = 0
        self.ranges: list[tuple[int, int]] = []
        load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

        def counted_load(builder, ptrs, mask, *rest):
            self.read += self.bytes_inside(ptrs, mask)
            return load(builder, ptrs, mask, *rest)

        def counted_store(builder, ptrs, value, mask, *rest):
            self.written += self.bytes_inside(ptrs, mask)
            return store(builder, ptrs, value, mask, *rest)

        monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counted_load)
        monkeypatch.setattr(InterpreterBuilder, "create_masked_store", counted_store)

    def watch(self, *lists: Sequence[Tensor]) -> int:
        """Count accesses to these lists from now on; returns the elements of the first."""
        self.read = self.written = 0
        tensors = [t for tensors in lists for t in tensors]
        self.ranges = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors]
        return sum(t.numel() for t in lists[0])

    def bytes_inside(self, ptrs, mask) -> int:
        addresses = ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)]
        width = ptrs.get_element_ty().primitive_bitwidth // 8
        inside = sum(int(((addresses >= start) & (addresses < stop)).sum()) for start, stop in self.ranges)
        return inside * width

    def per_element(self, n: int) -> model.Bytes:
        assert self.read % n == 0
        assert self.written % n == 0
        return model.Bytes(self.read // n, self.written // n)


@pytest.fixture
def meter(interpreted, monkeypatch: pytest.MonkeyPatch) -> Meter:
    return Meter(monkeypatch)


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)


def test_gradient_passes(meter: Meter) -> None:
    grads = gradients(torch.float32, SIZES)
    n = meter.watch(grads)
    unscale_(grads, scalar(0.5), scalar(0.0), impl="triton")
    assert meter.per_element(n) == model.UNSCALE
    meter.watch(grads)
    norm_and_check(grads, scalar(0.5), scalar(0.0), impl="triton")
    assert meter.per_element(n) == model.NORM
    meter.watch(grads)
    multiply_(grads, scalar(0.5), impl="triton")
    assert meter.per_element(n) == model.MULTIPLY
    meter.watch(grads)
    multiply_(grads, scalar(1.0), impl="triton")
    multiply_(grads, scalar(0.5), scalar(1.0), impl="triton")
    assert meter.per_element(n) == model.Bytes(0, 0)
    meter.watch(grads)
    nonfinite_counts(grads, impl="triton")
    assert meter.per_element(n) == model.COUNTS


def test_unscaling_into_other_tensors(meter: Meter) -> None:
    sources = gradients(torch.float16, SIZES)
    masters = [torch.empty(s.shape) for s in sources]
    n = meter.watch(sources, masters)
    unscale_into_(sources, masters, scalar(0.5), scalar(0.0), impl="triton")
    assert meter.per_element(n) == model.UNSCALE_INTO


def test_cast(meter: Meter) -> None:
    sources = gradients(torch.float32, SIZES)
    copies = [s.half() for s in sources]
    n = meter.watch(sources, copies)
    cast_(sources, copies, impl="triton")
    assert meter.per_element(n) == model.CAST_TO_HALF


@pytest.mark.parametrize(
    ("amsgrad", "copy", "want"),
    [
        (False, False, model.ADAMW),
        (True, False, model.ADAMW_AMSGRAD),
        (False, True, model.ADAMW_WITH_HALF_COPY),
    ],
)
def test_adamw(meter: Meter, amsgrad: bool, copy: bool, want: model.Bytes) -> None:
    lists = [gradients(torch.float32, SIZES) for _ in range(5)]
    copies = [p.half() for p in lists[0]] if copy else None
    steps = [torch.zeros(()) for _ in SIZES]
    options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "amsgrad": amsgrad}
    for v in (*lists[3], *lists[4]):
        v.abs_()
    n = meter.watch(*lists, copies or [])
    adamw_(
        *lists, steps, multiplier=scalar(0.5), found_inf=scalar(0.0), copies=copies, impl="triton", **options
    )
    assert meter.per_element(n) == want
    meter.watch(*lists, copies or [])
    adamw_(
        *lists, steps, multiplier=scalar(0.5), found_inf=scalar(1.0), copies=copies, impl="triton", **options
    )
    assert meter.per_element(n) == model.Bytes(0, 0)


@pytest.mark.parametrize(("momentum", "want"), [(0.9, model.SGD_MOMENTUM), (0.0, model.SGD_PLAIN)])
def test_sgd(meter: Meter, momentum: float, want: model.Bytes) -> None:
    params, grads, buffers = (gradients(torch.float32, SIZES) for _ in range(3))
    n = meter.watch(params, grads, buffers)
    sgd_(params, grads, buffers, lr=0.1, momentum=momentum, impl="triton")
    assert meter.per_element(n) == want


def test_whole_jobs_add_up_to_the_figures_that_the_documentation_states() -> None:
    assert {job: cost.total for job, cost in model.OURS.items()} == {
        "unscale": 8, "unscale into float32": 6, "unscale + clip": 12, "unscale + clip, factor 1": 4,
        "clip + AdamW": 32, "AdamW step": 28, "SGD step": 20, "cast to half": 6,
    }
    assert {job: cost.total for job, cost in model.TORCH.items()} == {
        "unscale": 8, "unscale into float32": 14, "unscale + clip": 20, "unscale + clip, factor 1": 20,
        "clip + AdamW": 48, "AdamW step": 28, "SGD step": 20, "cast to half": 6,
    }
