"""The contract of `step` between a scaler and optimizers that unscale and skip on the device.

It is torch's, for optimizers with `_step_supports_amp_scaling` (with `fused=True`): the scaler sets the 0-d
tensors `optimizer.grad_scale` and `optimizer.found_inf`, calls `step`, and deletes both. ampkit.optim adds
`_step_supports_grad_multiplier`, for optimizers with `max_grad_norm`: a scaler that has taken the norm sets
`optimizer.grad_norm`, which remains, and `optimizer.grad_multiplier`, the factor that unscales and clips.
The scaler's side is `max_grad_norm` and `run`, the optimizer's `StepScalars.of`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampkit.gradients.collect import host_value_or_none, local_tensor, moved
from ampkit.torch_private import dynamo_skip, skip_compilation

_MISSING = object()


class StepScalars(NamedTuple):
    """The 0-d tensors that a scaler sets on an optimizer for one step; each may be None.

    Args:
        found_inf: if nonzero, the step changes nothing.
        grad_scale: gradients are to be divided by it.
        grad_multiplier: gradients are to be multiplied by it, in optimizers with `_step_supports_grad_multiplier`.
    """

    found_inf: Tensor | None
    grad_scale: Tensor | None
    grad_multiplier: Tensor | None

    @classmethod
    def of(cls, optimizer: Any) -> StepScalars:
        """Return the scalars that a scaler has set on the optimizer."""
        return cls(
            getattr(optimizer, "found_inf", None),
            getattr(optimizer, "grad_scale", None),
            getattr(optimizer, "grad_multiplier", None),
        )

    def on(self, device: torch.device) -> StepScalars:
        """Return the scalars on `device`; synchronizes only to copy them from a device to the CPU."""
        if self.found_inf is self.grad_scale is self.grad_multiplier is None:
            return self
        return StepScalars(*[None if scalar is None else moved(scalar, device) for scalar in self])

    def skips_on_host(self) -> bool:
        """Whether the host can see, without waiting, that this step is skipped."""
        return self.found_inf is not None and (host_value_or_none(self.found_inf) or 0.0) != 0.0

    def inverse_scale(self) -> Tensor | None:
        """1 / grad_scale as torch.amp computes it: a float64 reciprocal, rounded to float32."""
        return None if self.grad_scale is None else self.grad_scale.double().reciprocal().float()

    def factor_on_host(self) -> float:
        """Return the factor for CPU gradients; the scalars are on the CPU. A FakeTensor counts as 1."""
        factor = 1.0
        for scalar in (self.grad_multiplier, self.inverse_scale()):
            value = None if scalar is None else host_value_or_none(scalar)
            factor *= 1.0 if value is None else value
        return factor


def is_amp_aware(optimizer: Any) -> bool:
    """Whether the optimizer's `step` reads `found_inf` on the device."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def max_grad_norm(optimizer: Any) -> float | None:
    """Return the norm to which the optimizer's step clips; None if it does not clip."""
    return optimizer.max_grad_norm if getattr(optimizer, "_step_supports_grad_multiplier", False) else None


def mark_step_called(optimizer: Any) -> None:
    """Tell torch's learning rate schedulers that `step` was called, though it was skipped. Otherwise they warn."""
    if hasattr(getattr(optimizer, "step", None), "_wrapped_by_lr_sched"):
        optimizer._opt_called = True


@contextmanager
def attributes(optimizer: Any, **values: Tensor | None) -> Iterator[None]:
    """Set attributes for one step and delete them after it; if the step raises, restore the previous ones."""
    before = {name: getattr(optimizer, name, _MISSING) for name in values}
    for name, value in values.items():
        setattr(optimizer, name, value)
    try:
        yield
    except BaseException:
        for name, value in before.items():
            if value is _MISSING:
                delattr(optimizer, name)
            else:
                setattr(optimizer, name, value)
        raise
    for name in values:
        delattr(optimizer, name)


@contextmanager
def sound_first_momentum(optimizer: Any, found_inf: Tensor) -> Iterator[None]:
    """Zero the momentum that torch's fused SGD allocates in a step that it skips, on the device.

    torch leaves it uninitialized, and the next step would read it. ampkit.optim.SGD does not do that.
    """
    without_momentum = [
        param
        for group in optimizer.param_groups
        if isinstance(optimizer, torch.optim.SGD)
        and group.get("fused")
        and group["momentum"]
        and not getattr(optimizer, "_step_supports_grad_multiplier", False)
        for param in group["params"]
        if param.grad is not None and optimizer.state.get(param, {}).get("momentum_buffer") is None
    ]
    yield
    with torch.no_grad():
        for param in without_momentum:
            buffer = optimizer.state[param]["momentum_buffer"]
            local = local_tensor(buffer)
            local.masked_fill_(moved(found_inf != 0, local.device), 0.0)


@dynamo_skip  # otherwise it would be compiled by itself after a graph break
def run(
    optimizer: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    found_inf: Tensor,
    grad_scale: Tensor | None,
    grad_multiplier: Tensor | None = None,
    grad_norm: Tensor | None = None,
) -> Any:
    """Set the scalars on the optimizer, call its `step`, delete them but the norm, and return the result of `step`."""
    values: dict[str, Tensor | None] = {"grad_scale": grad_scale, "found_inf": found_inf}
    if grad_multiplier is not None:
        values["grad_multiplier"] = grad_multiplier
        optimizer.grad_norm = grad_norm
    with attributes(optimizer, **values), sound_first_momentum(optimizer, found_inf):
        return optimizer.step(*args, **kwargs)


run_uncompiled = skip_compilation(run)
"""`run`, for code that Dynamo traces."""
