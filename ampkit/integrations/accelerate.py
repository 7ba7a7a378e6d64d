"""Accelerate: `use_ampkit(accelerator)` before `prepare`, and the training loop stays as it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, TypeVar

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import AutocastKwargs, DistributedType
from torch import bfloat16, dtype, float16
from torch.nn import Module

from ampkit.engine.weight_cache import WeightCache
from ampkit.integrations._precision import checked
from ampkit.policy.policy import Policy
from ampkit.region.arguments import named_policy
from ampkit.region.autocast import autocast as region_of
from ampkit.scaler.grad_scaler import GradScaler

__all__ = ["use_ampkit"]

A = TypeVar("A", bound=Accelerator)
_DTYPES: dict[str, dtype] = {"fp16": float16, "bf16": bfloat16}
_ELSEWHERE = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


def use_ampkit(
    accelerator: A,
    *,
    policy: Policy | str | None = None,
    scaler: GradScaler | None = None,
    cache: WeightCache | None = None,
) -> A:
    """Let an `Accelerator` cast by ampkit's regions and scale by its `GradScaler`, before `prepare`; returns it.

    Its `AutocastKwargs` and `GradScalerKwargs` apply. `mixed_precision="fp16"` trains on a CPU too, where Accelerate
    itself leaves it out; with "no" the accelerator stays as it is, so that a script runs its float32 baseline.
    `optimizer_step_was_skipped` also sees steps that fused optimizers and `ampkit.optim` skip on the device, at the
    price of waiting for it when asked, so that schedulers stay in step. What a model of transformers wants kept in
    float32 is kept (`Policy.keep_in_fp32`), except under FSDP and torch's own policy.

    Args:
        accelerator: one that has prepared nothing yet.
        policy: what its regions cast; None: the default for its device.
        scaler: in place of one made of `GradScalerKwargs`; in bfloat16 for the steps that it skips (`skip_above`).
        cache: a `WeightCache` that keeps casts between batches.

    After an error the accelerator is as it was.

    Raises:
        ValueError: a `mixed_precision` other than "fp16", "bf16" or "no", a scaler with "no", or the name of no policy.
        RuntimeError: a model or optimizer has been prepared, or DeepSpeed, Megatron or XLA do the casting.
        TypeError: something that is not an `Accelerator`, or a scaler of torch's.

    >>> from accelerate import Accelerator
    >>> accelerator = use_ampkit(Accelerator(cpu=True, mixed_precision="bf16"))
    """
    if not isinstance(accelerator, Accelerator):
        raise TypeError(f"use_ampkit takes an accelerate.Accelerator; got {type(accelerator).__name__}")
    precision = str(accelerator.mixed_precision)
    if accelerator.distributed_type in _ELSEWHERE:
        raise RuntimeError(f"{accelerator.distributed_type} casts and scales by itself: ampkit has no part in it")
    if precision not in (*_DTYPES, "no"):
        raise ValueError(
            f"the accelerator has mixed_precision={precision!r}; expected 'fp16', 'bf16' or 'no'; for FP8, pass "
            f"'bf16', and give use_ampkit a policy.with_rules({{'aten::linear': Rule.FLOAT8_TENSORWISE}})"
        )
    if precision == "no" and scaler is not None:
        raise ValueError(
            "a scaler, but mixed_precision='no', which leaves the accelerator as it is. Pass 'fp16' or 'bf16' to the "
            "Accelerator (fp16=True or bf16=True to TrainingArguments), or no scaler"
        )
    policy = None if policy is None else named_policy(policy, accelerator.device.type)
    if precision == "no":
        return accelerator
    if accelerator._models or accelerator._optimizers:
        raise RuntimeError("the accelerator has prepared models or optimizers: call use_ampkit(accelerator) before")
    accelerator.scaler = _scaler_for(accelerator, scaler)
    accelerator.native_amp = True
    cls = type(accelerator)
    if not issubclass(cls, _Methods):
        accelerator.__class__ = type(cls.__name__, (_Methods, cls), {"__module__": cls.__module__})
    vars(accelerator).update(
        _ampkit_dtype=_DTYPES[precision], _ampkit_cache=cache, _ampkit_policy=policy, _ampkit_autocast_policy=policy
    )
    return accelerator


def _scaler_for(accelerator: Accelerator, scaler: GradScaler | None) -> GradScaler | None:
    """The scaler that was given; else in float16 one made of `GradScalerKwargs`, in bfloat16 what is there by hand."""
    is_float16 = accelerator.mixed_precision == "fp16"
    by_hand: Any = None if is_float16 else accelerator.scaler
    scaler = checked(scaler or by_hand)
    if is_float16 and scaler is None:
        handler = accelerator.scaler_handler
        scaler = GradScaler(accelerator.device.type, **({} if handler is None else handler.to_kwargs()))
    is_sharded = accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2
    if scaler is not None and is_sharded and not scaler.process_group:
        scaler.process_group = dist.group.WORLD
    return scaler


class _Methods(Accelerator):
    """What changes about an accelerator. Never made by itself: accelerators get it as a base class."""

    _ampkit_dtype: dtype
    _ampkit_cache: WeightCache | None
    _ampkit_policy: Policy | None
    _ampkit_autocast_policy: Policy | None      # what the prepared models want kept in float32 is kept by it

    def _region(self, policy: Policy | None, handler: AutocastKwargs | None) -> region_of:
        settings = {} if handler is None else handler.to_kwargs()
        return region_of(self.device.type, self._ampkit_dtype, policy=policy, cache=self._ampkit_cache, **settings)

    def _keeping(self, policy: Policy | None, model: Module) -> Policy | None:
        """A policy that also keeps in float32 what a model wants kept there."""
        plain = policy or Policy.default(self.device.type)
        # FSDP casts the weights of every module itself.
        if plain.base == "torch" or self.distributed_type == DistributedType.FSDP:
            return policy
        kept = plain.keep_in_fp32(model, self._ampkit_dtype)
        return policy if kept is plain else kept

    @contextmanager
    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> Iterator[None]:
        """A region with these settings, or the accelerator's."""
        with self._region(self._ampkit_autocast_policy, autocast_handler or self.autocast_handler):
            yield

    def prepare_model(self, model: Module, *args: Any, **kwargs: Any) -> Module:
        """As Accelerate prepares it, with a region inside of Accelerate's own: the inner one has its way."""
        if not getattr(model, "_is_accelerate_prepared", False):
            region = self._region(self._keeping(self._ampkit_policy, model), self.autocast_handler)
            policy = self._ampkit_autocast_policy = self._keeping(self._ampkit_autocast_policy, model)
            if policy is not None and policy is not self._ampkit_policy:
                policy.modules.ran = True       # regions that run other models are no reason to warn
            forward = model.forward
            # bound again where it was a method: Accelerate's unwrapping takes the function underneath and binds it
            method = getattr(forward, "__func__", None)
            model.forward = region(forward) if method is None else MethodType(region(method), model)
        return super().prepare_model(model, *args, **kwargs)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale gradients before they are clipped, with a scaler in bfloat16 too, where Accelerate does not."""
        if self.scaler is None:
            return
        given = self._optimizers if optimizer is None else optimizer
        for each in given if isinstance(given, list | tuple) else [given]:
            while isinstance(each, AcceleratedOptimizer):
                each = each.optimizer
            self.scaler.unscale_(each)

    def prepare_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate prepares it, and it knows whether its step was skipped."""
        optimizer = super().prepare_optimizer(*args, **kwargs)
        if self.scaler is not None and type(optimizer) is AcceleratedOptimizer:
            optimizer.__class__ = _Optimizer
        return optimizer


class _Optimizer(AcceleratedOptimizer):
    """Asks the scaler whether a step was taken. Accelerate asks whether `step` was called, as fused ones always are."""

    scaler: GradScaler

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step left the parameters alone. Waits for the device where it alone knows."""
        try:
            return not self.scaler.stepped(self.optimizer)
        except RuntimeError:    # there has been no step
            return False
