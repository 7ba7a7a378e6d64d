"""Rounding losses of FP8 in recorded calls, for each module, product and operand; on the device until they are read."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampkit.text_tables import table
from ampkit.torch_internals.float8_matmul import is_eager
from ampkit_kernels import Quantized, Scaling

__all__ = ["Float8Loss", "Float8Losses", "Float8Notes"]

_HEADER = ("module", "GEMM", "operand", "shape", "scaling", "amax", "to 0", "at end", "SNR dB")


class Float8Loss(NamedTuple):
    """The rounding loss of one operand of one product, summed over all calls of a module."""

    module: str  # its path, or the line of the call
    gemm: str  # "output", "input gradient" or "weight gradient"
    operand: str  # "input", "weight" or "gradient"
    shape: tuple[int, ...]
    scaling: str  # "row e4m3 2^n"
    amax: float  # the largest magnitude before the cast; inf or NaN if an element is
    to_zero: float  # share of the elements that the cast rounded to 0
    at_end: float  # share of the elements at FP8's largest magnitude
    snr: float  # signal to noise in decibels: 10 log10 of sum(x^2) / sum(error^2)

    def cells(self) -> tuple[str, ...]:
        """The cells of a row of the table."""
        shape = " x ".join(map(str, self.shape))
        shares = (f"{100 * share:.2f}%" for share in (self.to_zero, self.at_end))
        return self.module, self.gemm, self.operand, shape, self.scaling, f"{self.amax:.3g}", *shares, f"{self.snr:.1f}"


class Float8Losses(tuple[Float8Loss, ...]):
    """The losses of a record; prints as a table."""

    def __str__(self) -> str:
        if not self:
            return "no product of FP8 was recorded; those of compiled code and of DTensors are left out"
        return "\n".join(table([_HEADER, *(loss.cells() for loss in self)], {"amax", "to 0", "at end", "SNR dB"}))


class Float8Notes:
    """Collects the losses of a record."""

    def __init__(self) -> None:
        self._sums: dict[tuple[Any, ...], tuple[int, Tensor, Tensor]] = {}  # number of elements, amax, four sums

    def note(
        self, module: str, gemm: str, operand: str, tensor: Tensor, form: Quantized, scaling: Scaling, transposed: bool
    ) -> None:
        """Add one operand; never synchronizes. Traced, fake and distributed tensors are left out."""
        if not is_eager(tensor):
            return
        with torch.no_grad():
            exact = tensor.reshape(-1, tensor.shape[-1]).float()
            exact = exact.t() if transposed else exact
            data = form.data.float()
            sums = torch.stack(
                [
                    ((data == 0) & (exact != 0)).sum().double(),
                    (data.abs() == torch.finfo(scaling.dtype).max).sum().double(),
                    exact.double().square().sum(),
                    (data / form.scale - exact).double().square().sum(),
                ]
            )
            key = module, gemm, operand, tuple(form.data.shape), str(scaling)
            n, amax, earlier_sums = self._sums.get(key, (0, sums.new_zeros(()), sums.new_zeros(4)))
            amax = torch.maximum(amax, exact.abs().amax().double())
            self._sums[key] = n + exact.numel(), amax, earlier_sums + sums

    def losses(self) -> Float8Losses:
        """The losses so far. Reads them from the device, which synchronizes."""
        rows = []
        for key, (n, amax, sums) in self._sums.items():
            to_zero, at_end, _signal, noise = sums.tolist()
            snr = (10 * (sums[2] / sums[3]).log10()).item() if noise else math.inf
            rows.append(Float8Loss._make((*key, amax.item(), to_zero / n, at_end / n, snr)))
        return Float8Losses(rows)
