"""Stepping an optimizer that unscales and skips by itself, on the device.

The contract is torch's (`_step_supports_amp_scaling`, kept by `fused=True` optimizers): the scaler sets
`optimizer.grad_scale` and `optimizer.found_inf`, 0-d tensors, calls `step`, and deletes both. ampkit.optim adds
`_step_supports_grad_multiplier`: `optimizer.grad_multiplier` replaces `grad_scale` by a factor that also clips.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ampkit.gradients.transfer import moved
from ampkit.torch_internals.optimizers import skip_compilation

_MISSING = object()


def is_amp_aware(optimizer: Any) -> bool:
    """Whether the optimizer's `step` reads `found_inf` on the device."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def takes_multiplier(optimizer: Any) -> bool:
    """Whether the optimizer multiplies gradients by `grad_multiplier` on the fly."""
    return is_amp_aware(optimizer) and bool(getattr(optimizer, "_step_supports_grad_multiplier", False))


def takes_grad_scaler_argument(optimizer: Any) -> bool:
    """Whether `step` takes the scaler itself, the contract that torch has deprecated."""
    return "grad_scaler" in inspect.signature(optimizer.step).parameters


@contextmanager
def attributes(optimizer: Any, **values: Tensor | None) -> Iterator[None]:
    """Set attributes for one step. They are gone after it; if it raises, the previous ones are put back."""
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
    """Keep fused SGD's momentum sound when its very first step is skipped.

    torch allocates the buffers uninitialised, the kernel returns early, and the next step takes the garbage for
    momentum. Buffers born in a skipped step are zeroed on the device; where dampening makes a zero buffer differ from
    none at all, they are removed again, at the price of one host read in that one step.
    """
    newborn = list(_without_momentum(optimizer))
    yield
    if not newborn:
        return
    with torch.no_grad():
        if any(group["dampening"] != 0 for group, _ in newborn) and bool(found_inf != 0):
            for _, param in newborn:
                optimizer.state[param]["momentum_buffer"] = None
            return
        for _, param in newborn:
            buffer = optimizer.state[param]["momentum_buffer"]
            local = buffer.to_local() if hasattr(buffer, "to_local") else buffer
            local.masked_fill_(moved(found_inf != 0, local.device), 0.0)


def _without_momentum(optimizer: Any) -> Iterator[tuple[dict[str, Any], Tensor]]:
    if not isinstance(optimizer, torch.optim.SGD) or takes_multiplier(optimizer):
        return  # ampkit.optim.SGD keeps its first momentum sound by itself
    for group in optimizer.param_groups:
        if not group.get("fused") or not group["momentum"]:
            continue
        for param in group["params"]:
            if param.grad is not None and optimizer.state.get(param, {}).get("momentum_buffer") is None:
                yield group, param


@skip_compilation
def run(
    optimizer: Any,
    step: Callable[[], Any],
    found_inf: Tensor,
    grad_scale: Tensor | None,
    multiplier: Tensor | None,
) -> Any:
    """Call `step` with the device scalars in place; returns what it returns."""
    values: dict[str, Tensor | None] = {"grad_scale": grad_scale, "found_inf": found_inf}
    if multiplier is not None:
        values["grad_multiplier"] = multiplier
    with attributes(optimizer, **values), sound_first_momentum(optimizer, found_inf):
        return step()
