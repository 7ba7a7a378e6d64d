"""Unscaling an optimizer's gradients, checking them for inf and NaN, clipping them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ampkit.gradients import amp_optimizers, clipping, kernels, ranks
from ampkit.gradients.collect import Gradients, collect, parameters, summed_duplicates
from ampkit.gradients.masters import take_master_gradients
from ampkit.gradients.transfer import moved
from ampkit.scaler import overflow
from ampkit.scaler.iteration import Iteration
from ampkit.scaler.live_scale import LiveScale
from ampkit.scaler.optimizer_record import OptimizerRecord
from ampkit.scaler.shared_gradients import Part
from ampkit.torch_internals.fsdp import is_flat

Flags = dict[torch.device, Tensor]
"""For each device that holds gradients 0.0, or 1.0 where one is not finite."""


class Unscaling:
    """Unscales and checks gradients under a scale. `process_group` are ranks that must skip together."""

    def __init__(
        self, live: LiveScale, iteration: Iteration, *, process_group: Any = None, allow_fp16: bool = False
    ) -> None:
        self._live = live
        self._iteration = iteration
        self.process_group = process_group
        self.allow_fp16 = allow_fp16
        self._flat: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    def inverse_scale(self) -> Tensor:
        """1 / scale, noted in the iteration."""
        return self.inverse_and_flag()[0]

    def inverse_and_flag(self) -> tuple[Tensor, Tensor]:
        """`inverse_scale`, and a clear flag on its device."""
        inv_scale, flag, used = self._live.inverse_and_flag()
        if used is not None:
            self._iteration.scale_used = used
        self._iteration.inv_scale = inv_scale
        return inv_scale, flag

    def unscale_(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, *, allow_fp16: bool) -> Flags:
        """Multiply gradients by `inv_scale`, in place; returns a flag per device, `found_inf` for its own device.

        Gradients that another optimizer has unscaled are not unscaled again. Never syncs.
        """
        take_master_gradients(optimizer)
        scales_losses = self._live.strategy.scales_losses
        found: Flags = {}
        groups: list[Any] = []
        with torch.set_grad_enabled(False):  # torch.no_grad() at half its cost
            for params, owner in self._split(optimizer):
                factor = inv_scale if scales_losses else None
                if owner is not None:
                    if owner.stage is OptState.UNSCALED:
                        self.apply_pending_clip_factor_(owner)
                    factor = owner.residual_inv_scale
                gradients = self._collect(optimizer, params, allow_fp16)
                groups += gradients.groups
                for device, tensors in gradients.by_device.items():
                    if device not in found:
                        found[device] = moved(found_inf, device)
                    if factor is None:  # unscaled before: only look
                        kernels.norm_and_check(tensors, torch.ones_like(found[device]), found[device])
                    else:
                        kernels.unscale_(tensors, moved(factor, device), found[device])
                if gradients.duplicated:
                    _check_sums(gradients, None, found)
                self._mark(optimizer, gradients.originals)
        self.agree(optimizer, found, groups)
        return found

    def look(self, optimizer: Any, inv_scale: Tensor, flag: Tensor | None = None) -> Flags:
        """Flags by device for gradients that would be multiplied by `inv_scale`; nothing is written. Never syncs.

        `flag` is a clear one on the device of `inv_scale`.
        """
        take_master_gradients(optimizer)
        gradients = collect(parameters(optimizer))
        found: Flags = {}
        _add_flags(found, gradients, inv_scale, flag)
        with torch.set_grad_enabled(False):
            for device, tensors in gradients.by_device.items():
                kernels.norm_and_check(tensors, moved(inv_scale, device), found[device])
            if gradients.duplicated:
                _check_sums(gradients, inv_scale, found)
        self._mark(optimizer, gradients.originals)
        self.agree(optimizer, found, gradients.groups)
        return found

    def check_unscaled(self, optimizer: Any) -> None:
        """Check gradients that were never scaled for inf and NaN."""
        record = self._iteration.record_of(optimizer)
        record.found_inf_per_device = self.look(optimizer, torch.ones_like(self._live.tensor))
        record.stage = OptState.UNSCALED

    def clip_norm_(
        self,
        optimizer: Any,
        record: OptimizerRecord,
        parts: Sequence[clipping.Part],
        max_norm: float | Tensor,
        norm_type: float,
        process_group: Any,
    ) -> list[Tensor]:
        """Unscale unless that is done, check, and clip; returns the unscaled norm of each part that is clipped.

        Raises:
            RuntimeError: FSDP1 shards without a `process_group`. Nothing has changed then.
        """
        if process_group is None and ranks.several() and self._is_flat(optimizer):
            raise clipping.refusal_of_flat_shards()
        self.apply_pending_clip_factor_(record)
        ready = record.stage is OptState.READY
        if ready:
            inv_scale, flag = self.inverse_and_flag()
        else:
            inv_scale, flag = torch.ones_like(self._live.tensor), None
        gradients = [self._collect(optimizer, params, self.allow_fp16, coalesce=True) for params, _ in parts]
        found = {} if ready else record.found_inf_per_device
        for part in gradients:
            _add_flags(found, part, inv_scale, flag)
        across = () if process_group is None else (process_group,)
        norms, factors = [], []
        for part, (_, clips) in zip(gradients, parts, strict=True):
            norm, factor = clipping.norm_and_factor(
                part, inv_scale, found, norm_type, max_norm if clips else None, across
            )
            norms.append(norm)
            factors.append(factor)
        self.agree(optimizer, found, [group for part in gradients for group in part.groups])
        record.found_inf_per_device = found
        record.stage = OptState.UNSCALED
        for part, factor in zip(gradients, factors, strict=True):
            if len(parts) == 1 and amp_optimizers.takes_multiplier(optimizer):
                record.pending_clip_factor = factor.float()
            else:
                clipping.multiply_(part, factor, found)
        self._mark(optimizer, [grad for part in gradients for grad in part.originals])
        return [norm for norm, (_, clips) in zip(norms, parts, strict=True) if clips]

    def apply_pending_clip_factor_(self, record: OptimizerRecord) -> None:
        """Apply now the factor that clipping had left for the optimizer's `step`."""
        factor, record.pending_clip_factor = record.pending_clip_factor, None
        if factor is None:
            return
        take_master_gradients(record.optimizer)
        gradients = collect(parameters(record.optimizer))
        clipping.multiply_(gradients, factor, record.found_inf_per_device)
        self._mark(record.optimizer, gradients.originals)

    def has_shared(self, optimizer: Any) -> bool:
        """Whether gradients of this optimizer have been unscaled this iteration for another one."""
        if len(self._iteration.records) < 2:
            return False
        take_master_gradients(optimizer)
        return len(self._split(optimizer)) > 1

    def agree(self, optimizer: Any, found: Flags, groups: Sequence[Any]) -> None:
        """Make flags the same on all ranks that must skip together."""
        also = self.process_group
        if also is None and ranks.several() and self._is_flat(optimizer):
            also = ranks.everyone()     # flat parameters do not say which ranks have the other parts
        if not groups and also is None:
            return
        everyone = [*dict.fromkeys(groups)]
        if also is not None and also not in everyone:
            everyone.append(also)
        record = self._iteration.record_of(optimizer)
        record.groups = everyone
        scale = self._live.on(next(iter(found), torch.device("cpu")))
        record.scale_range = ranks.agree(found, everyone, scale)
        if record.scale_range is not None and self._live.scale is not None:
            self._live.ledger.note_scales(record.scale_range)

    def _is_flat(self, optimizer: Any) -> bool:
        """Whether the optimizer holds FSDP1 shards; looked up once per optimizer."""
        flat = self._flat.get(optimizer)
        if flat is None:
            flat = self._flat[optimizer] = any(map(is_flat, parameters(optimizer)))
        return flat

    def _split(self, optimizer: Any) -> Sequence[Part]:
        records = self._iteration.records
        params = parameters(optimizer)
        return ((params, None),) if len(records) < 2 else self._iteration.shared.split(optimizer, params, records)

    def _collect(
        self, optimizer: Any, params: Sequence[Tensor], allow_fp16: bool, *, coalesce: bool = False
    ) -> Gradients:
        return collect(params, None if allow_fp16 else lambda: overflow.fp16_refusal(optimizer), coalesce=coalesce)

    def _mark(self, optimizer: Any, grads: Sequence[Tensor]) -> None:
        # Without a record of the scaler's, gradients were unscaled by a direct call: there is nothing to share.
        record = self._iteration.records.get(id(optimizer))
        if record is not None:
            self._iteration.shared.mark(record, grads, self._iteration.keep_versions)


def _check_sums(gradients: Gradients, factor: Tensor | None, found: Mapping[torch.device, Tensor]) -> None:
    """Check the sums over repeated indices of sparse gradients, times `factor`."""
    for values in summed_duplicates(gradients.duplicated):
        flag = found[values.device]
        by = torch.ones_like(flag) if factor is None else moved(factor, flag.device)
        kernels.norm_and_check([values], by, flag)


def _add_flags(found: Flags, gradients: Gradients, scalar: Tensor, clear: Tensor | None) -> None:
    """Give every device that holds gradients a clear flag: `clear` where there is one, else shaped like `scalar`."""
    for device in gradients.by_device:
        if device not in found:
            found[device] = moved(torch.zeros_like(scalar) if clear is None else clear, device)
