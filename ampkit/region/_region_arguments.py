"""The arguments of a region: which device types, dtypes and flags make sense, and what is said when one does not.

Messages and warnings follow torch's where torch has them.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ampkit.region.autocast import autocast


# Strings that are what they name: asked of torch once, as every region gives one.
_KINDS = frozenset(kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(kind))


def current_device_type() -> str:
    """The type of the accelerator in use, else "cpu"."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def device_kind(device_type: Any) -> str:
    """The device type in a string such as "cuda" or "cuda:0", in the form torch's autocast uses.

    None is the current accelerator, else CPU. Raises `ValueError` for what is no string, `RuntimeError` for a device
    without autocast.
    """
    if device_type is None:
        device_type = current_device_type()
    if not isinstance(device_type, str):
        raise ValueError(
            f"device_type is {device_type!r} of type {type(device_type).__name__}; expected a string such as 'cuda'"
        )
    if device_type in _KINDS:
        return device_type
    kind = torch.device(device_type).type
    if kind == torch._C._get_privateuse1_backend_name():
        kind = "privateuseone"
    if not _has_autocast(kind):
        raise RuntimeError(f"device_type {device_type!r} has no autocast in torch; expected one such as 'cuda'")
    return kind


def _has_autocast(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind)


# For Dynamo to call rather than trace: torch's function is a builtin that it knows in torch 2.12 and not before.
_has_autocast._dynamo_marked_constant = True  # type: ignore[attr-defined]


def checked_dtype(dtype: Any) -> torch.dtype:
    """`dtype` if it is one; `TypeError` if not."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype is {dtype!r}; expected a torch.dtype such as torch.bfloat16, or None")
    return dtype


def checked_flag(name: str, value: Any) -> bool:
    """`value` if it is a bool; `TypeError` naming the argument if not."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; expected True or False")
    return value


def available(region: autocast, kind: str) -> bool:
    """Whether an enabled region can be had; warns as torch does where it cannot."""
    if kind == "cuda" and ":" not in region.device:
        if torch.cuda.amp.common.amp_definitely_not_available():
            warnings.warn("CUDA is not available: autocast for it is disabled.", stacklevel=3)
            return False
        if region.fast_dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported():
            raise RuntimeError(
                f"{torch.cuda.get_device_name()} does not support bfloat16; use autocast('cuda', torch.float16)"
            )
        return True
    if kind == "cuda":
        return True
    supported = _supported_dtypes(kind)
    if region.fast_dtype not in supported:
        warnings.warn(
            f"autocast for {kind} takes {' or '.join(map(str, supported))}, not {region.fast_dtype}: it is disabled. "
            "For a region in float32, use ampkit.float32_region().",
            stacklevel=3,
        )
        return False
    return True


def _supported_dtypes(kind: str) -> list[torch.dtype]:
    if kind != "privateuseone":
        return [torch.bfloat16, torch.float16]
    name = torch._C._get_privateuse1_backend_name()
    module = getattr(torch, name, None)
    if module is None or not hasattr(module, "get_amp_supported_dtype"):
        raise RuntimeError(
            f"the backend {name!r} has not told torch which dtypes its autocast takes: it must register a module with "
            "torch._register_device_module that has get_amp_supported_dtype()"
        )
    return module.get_amp_supported_dtype()
