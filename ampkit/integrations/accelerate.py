"""Accelerate: `use_ampkit(accelerator)`, before `prepare`; the training loop is unchanged."""

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

from ampkit.integrations._precision_plugin import checked_scaler
from ampkit.integrations.keep_in_fp32 import keep_in_fp32
from ampkit.policy.policy import Policy
from ampkit.region.arguments import named_policy
from ampkit.region.autocast import autocast as region_type
from ampkit.scaler.grad_scaler import GradScaler

__all__ = ["use_ampkit"]

A = TypeVar("A", bound=Accelerator)
_DTYPES: dict[str, dtype] = {"fp16": float16, "bf16": bfloat16}
_CAST_THEMSELVES = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


def use_ampkit(
    accelerator: A,
    *,
    policy: Policy | str | None = None,
    scaler: GradScaler | None = None,
) -> A:
    """Use ampkit's regions and `GradScaler` in an `Accelerator`. Call it before `prepare`.

    Its `AutocastKwargs` and `GradScalerKwargs` apply. `mixed_precision="fp16"` also trains on a CPU, where Accelerate
    itself does not; with "no", for a float32 baseline, the accelerator is unchanged. `optimizer_step_was_skipped` also
    counts steps that fused optimizers and `ampkit.optim` skip on the device; reading it then synchronizes. Modules that
    a model declares to be kept in float32 are kept (`keep_in_fp32`), except under FSDP and torch's own policy.

    Args:
        accelerator: an accelerator that has prepared nothing yet.
        policy: the policy of its regions, or its name; None: the default for its device.
        scaler: the scaler; None: in float16 one made of `GradScalerKwargs`, in bfloat16 `accelerator.scaler` if set.

    Returns:
        `accelerator`.

    Raises:
        TypeError: `accelerator` is not an `Accelerator`, or `scaler` not an `ampkit.GradScaler`.
        ValueError: `mixed_precision` is not "fp16", "bf16" or "no", a scaler with "no", or an unknown policy.
        RuntimeError: a model or optimizer has been prepared, or DeepSpeed, Megatron or XLA cast for the accelerator.

    >>> from accelerate import Accelerator
    >>> accelerator = use_ampkit(Accelerator(cpu=True, mixed_precision="bf16"))
    """
    if not isinstance(accelerator, Accelerator):
        raise TypeError(f"use_ampkit takes an accelerate.Accelerator; got {type(accelerator).__name__}")
    precision = str(accelerator.mixed_precision)
    if accelerator.distributed_type in _CAST_THEMSELVES:
        raise RuntimeError(f"{accelerator.distributed_type} casts and scales by itself; ampkit cannot be used with it")
    if precision not in (*_DTYPES, "no"):
        raise ValueError(
            f"the accelerator has mixed_precision={precision!r}; expected 'fp16', 'bf16' or 'no'; for FP8, pass "
            f"'bf16', and give use_ampkit a policy.with_rules({{'aten::linear': Rule.FLOAT8_TENSORWISE}})"
        )
    if precision == "no" and scaler is not None:
        raise ValueError(
            "got a scaler with mixed_precision='no', which leaves the accelerator unchanged; pass 'fp16' or 'bf16' to "
            "the Accelerator (fp16=True or bf16=True to TrainingArguments), or no scaler"
        )
    policy = None if policy is None else named_policy(policy, accelerator.device.type)
    if precision == "no":
        return accelerator
    if accelerator._models or accelerator._optimizers:
        raise RuntimeError("the accelerator has prepared models or optimizers: call use_ampkit(accelerator) first")
    accelerator.scaler = _scaler_for(accelerator, scaler)
    accelerator.native_amp = True
    cls = type(accelerator)
    if not issubclass(cls, _Methods):
        accelerator.__class__ = type(cls.__name__, (_Methods, cls), {"__module__": cls.__module__})
    vars(accelerator).update(_ampkit_dtype=_DTYPES[precision], _ampkit_policy=policy, _ampkit_autocast_policy=policy)
    return accelerator


def _scaler_for(accelerator: Accelerator, scaler: GradScaler | None) -> GradScaler | None:
    """Return `scaler`, or in float16 one made of `GradScalerKwargs`, in bfloat16 the one that the user has set."""
    is_float16 = accelerator.mixed_precision == "fp16"
    set_by_user: Any = None if is_float16 else accelerator.scaler
    scaler = checked_scaler(scaler or set_by_user)
    if is_float16 and scaler is None:
        handler = accelerator.scaler_handler
        scaler = GradScaler(accelerator.device.type, **({} if handler is None else handler.to_kwargs()))
    is_sharded = accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2
    if scaler is not None and is_sharded and not scaler.process_group:
        scaler.process_group = dist.group.WORLD
    return scaler


class _Methods(Accelerator):
    """The methods that `use_ampkit` replaces. Never instantiated itself: accelerators get it as a base class."""

    _ampkit_dtype: dtype
    _ampkit_policy: Policy | None
    _ampkit_autocast_policy: Policy | None  # `_ampkit_policy`, with the float32 rules of the prepared models

    def _region(self, policy: Policy | None, handler: AutocastKwargs | None) -> region_type:
        settings = {} if handler is None else handler.to_kwargs()
        return region_type(self.device.type, self._ampkit_dtype, policy=policy, **settings)

    def _keeping(self, policy: Policy | None, model: Module) -> Policy | None:
        """Return the policy with float32 rules for the modules that a model declares to be kept in float32."""
        base_policy = policy or Policy.default(self.device.type)
        # FSDP casts the weights of every module itself.
        if base_policy.base == "torch" or self.distributed_type == DistributedType.FSDP:
            return policy
        keeping = keep_in_fp32(base_policy, model, self._ampkit_dtype)
        return policy if keeping is base_policy else keeping

    @contextmanager
    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> Iterator[None]:
        """Open a region with these settings, or the accelerator's."""
        with self._region(self._ampkit_autocast_policy, autocast_handler or self.autocast_handler):
            yield

    def prepare_model(self, model: Module, *args: Any, **kwargs: Any) -> Module:
        """Prepare as Accelerate does, with a region inside of Accelerate's own: the inner one decides the casts."""
        if not getattr(model, "_is_accelerate_prepared", False):
            region = self._region(self._keeping(self._ampkit_policy, model), self.autocast_handler)
            self._ampkit_autocast_policy = self._keeping(self._ampkit_autocast_policy, model)
            forward = model.forward
            # If it was a method, it remains one: Accelerate's unwrapping takes the function of the method and binds it.
            method = getattr(forward, "__func__", None)
            model.forward = region(forward) if method is None else MethodType(region(method), model)
        return super().prepare_model(model, *args, **kwargs)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale gradients before they are clipped. Unlike Accelerate, do so with any scaler, for bfloat16 as well."""
        if self.scaler is None:
            return
        optimizers = self._optimizers if optimizer is None else optimizer
        for inner in optimizers if isinstance(optimizers, list | tuple) else [optimizers]:
            while isinstance(inner, AcceleratedOptimizer):
                inner = inner.optimizer
            self.scaler.unscale_(inner)

    def prepare_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare as Accelerate does, with the scaler's `step_was_skipped`."""
        optimizer = super().prepare_optimizer(*args, **kwargs)
        if self.scaler is not None and type(optimizer) is AcceleratedOptimizer:
            optimizer.__class__ = _Optimizer
        return optimizer


class _Optimizer(AcceleratedOptimizer):
    """Reads skipped steps from the scaler. Accelerate notes whether `step` ran, and a fused one always runs."""

    scaler: GradScaler

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped. Synchronizes if the device decided that."""
        try:
            return not self.scaler.stepped(self.optimizer)
        except RuntimeError:  # there has been no step
            return False
