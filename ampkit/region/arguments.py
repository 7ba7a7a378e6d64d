"""Checks the arguments of `autocast` and makes the immutable description of a region, `RegionSpec`.

Errors and warnings are of the types that torch's autocast has.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ampkit.dtypes import SIXTEEN_BIT, as_dtype, short
from ampkit.policy.policy import Policy
from ampkit.policy.rules import Rule
from ampkit.policy.torch_lists import TORCH
from ampkit.torch_private import called_while_tracing, current_device_type, privateuse1_name
from ampkit.user_code import warn_user


class RegionSpec(NamedTuple):
    """A region that can be entered any number of times. Compared by identity: each `autocast` object has its own."""

    device_type: str  # as torch's autocast calls it
    dtype: torch.dtype
    enabled: bool
    cache_enabled: bool
    policy: Policy | None = None  # None: the enclosing region's, or the default
    device: str | None = None  # as the user wrote it: "cuda:0"
    of_module: bool = False  # entered by a rule of `Policy.for_modules`, around one module

    def __str__(self) -> str:
        more = "" if self.policy is None else f", policy={self.policy!r}"
        return f"autocast({self.device or self.device_type!r}, {self.dtype}, enabled={self.enabled}{more})"

    def text(self) -> str:
        """Return the region as one constant, for graphs. Dynamo traces this."""
        policy_text = "" if self.policy is None else self.policy.text
        return region_text(
            self.device_type, self.enabled, self.dtype, self.cache_enabled, policy_text, of_module=self.of_module
        )

    @classmethod
    def from_text(cls, text: str) -> RegionSpec:
        """Return the region of a `text`. Its arguments were checked when the user made it."""
        device_type, enabled, dtype, cache_enabled, of_module, policy = text.split("|", 5)
        return cls(
            device_type,
            getattr(torch, dtype.removeprefix("torch.")),
            enabled == "True",
            cache_enabled == "True",
            Policy.from_text(policy) if policy else None,
            of_module=of_module == "True",
        )


def region_text(
    device_type: str,
    enabled: bool,
    dtype: torch.dtype,
    cache_enabled: bool,
    policy_text: str,
    *,
    of_module: bool = False,
) -> str:
    """Return the text that `RegionSpec.from_text` reads; a `policy_text` of "" inherits the policy."""
    return f"{device_type}|{enabled}|{dtype}|{cache_enabled}|{of_module}|{policy_text}"


# Device types that need no parsing, looked up once, since every region names one.
_KINDS = frozenset(kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(kind))
_PASSING = ("torch.", "contextlib", "functools")  # modules between the user's line and this one
_warned: set[str] = set()  # names of devices
# Makes a `RegionSpec` of one tuple of all its fields: `RegionSpec(...)` calls a Python function, `__new__`.
_new_tuple = tuple.__new__
# Looked up in torch, whose module has a `__getattr__`, they would take ten times as long.
_dtype_of, _cache_flag, _dtype = torch.get_autocast_dtype, torch.is_autocast_cache_enabled, torch.dtype


class _PoliciesNamed(dict[str, Policy]):
    """Policies of one name by device type, one object each: a region compares the policy of its last mode by identity.

    Made when first looked up, since the backend `privateuseone` may be renamed at any time.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __missing__(self, device_type: str) -> Policy:
        return self.setdefault(device_type, Policy(self.name, device_type))


DEFAULT_POLICIES, TORCH_POLICIES = _PoliciesNamed("default"), _PoliciesNamed("torch")


def autocast_device_type(device_type: Any) -> str:
    """Return the device type in a string such as "cuda" or "cuda:0", in the form torch's autocast uses.

    None is the current accelerator, or the CPU without one. Raises `ValueError` if `device_type` is not a string,
    `RuntimeError` if the device has no autocast.
    """
    if device_type is None:
        device_type = current_device_type()
    if not isinstance(device_type, str):
        raise ValueError(
            f"device_type is {short(device_type)} of type {type(device_type).__name__}; expected a string such as "
            f"'cuda'{_hint(device_type)}"
        )
    if device_type in _KINDS:
        return device_type
    try:
        kind = torch.device(device_type).type
    except RuntimeError:
        raise RuntimeError(
            f"device_type is {short(device_type)}, which is not a device string; expected one such as 'cuda', 'cuda:0' "
            f"or 'cpu'{_hint(as_dtype(device_type))}"
        ) from None
    if not _has_autocast(kind) or (kind not in TORCH and kind != privateuse1_name()):
        raise RuntimeError(f"device_type {device_type!r} has no autocast in torch; expected one such as 'cuda'")
    return kind


def _hint(device_type: Any) -> str:
    """Return advice for an error message about a `device_type` that belongs to another argument."""
    if isinstance(device_type, bool):
        return ". Pass enabled by keyword: autocast('cuda', enabled=False)"
    if isinstance(device_type, torch.dtype):
        return f". The dtype is the second argument: autocast('cuda', {device_type})"
    if isinstance(device_type, torch.device):
        return f". Pass the type of a torch.device: {device_type.type!r}"
    if isinstance(device_type, Policy):
        return f". Pass the policy by keyword: autocast({device_type.device_type!r}, policy=policy)"
    if callable(device_type):
        return ". A decorator needs its arguments: @autocast('cuda')"
    return ""


@called_while_tracing  # Dynamo traces torch's function, a builtin, only since torch 2.12
def _has_autocast(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind)


def checked_spec(
    device_type: Any,
    dtype: Any = None,
    enabled: Any = True,
    cache_enabled: Any = None,
    policy: Any = None,
    *,
    of_module: bool = False,
) -> RegionSpec:
    """Return the region that the arguments of `autocast` describe; for None the enclosing region's settings apply.

    If device or dtype are not available, the region is disabled, with a warning at the line of the caller's caller.
    """
    device = device_type if device_type is not None else current_device_type()
    kind = device if type(device) is str and device in _KINDS else autocast_device_type(device)
    if dtype is None:
        dtype = _dtype_of(kind)
    elif not isinstance(dtype, _dtype):
        dtype = _named_dtype(dtype)
    if not isinstance(enabled, bool):
        raise TypeError(f"enabled is {short(enabled)}; expected True or False")
    if enabled and not (kind == "cpu" and dtype in SIXTEEN_BIT):
        enabled = _available(device, kind, dtype)
    if cache_enabled is None:
        cache_enabled = _cache_flag()
    elif not isinstance(cache_enabled, bool):
        raise TypeError(f"cache_enabled is {short(cache_enabled)}; expected True or False")
    if policy is not None and (not isinstance(policy, Policy) or policy.device_type != kind):
        policy = named_policy(policy, kind)
    return _new_tuple(RegionSpec, (kind, dtype, enabled, cache_enabled, policy, device, of_module))


def _named_dtype(name: Any) -> torch.dtype:
    """Return the dtype of this name. Raises `ValueError` for another name, `TypeError` for anything else."""
    dtype = as_dtype(name)
    if isinstance(dtype, torch.dtype):
        return dtype
    raise (ValueError if isinstance(name, str) else TypeError)(
        f"dtype is {short(name)}; expected a torch.dtype such as torch.bfloat16, one of 'bfloat16', 'float16' and "
        "'float32', or None"
    )


def named_policy(policy: Any, kind: str) -> Policy:
    """Return the policy of this name for a device type; a `Policy` for it is returned unchanged.

    Raises `ValueError` for another name, `TypeError` for anything else.
    """
    if isinstance(policy, str) and policy in ("default", "torch"):
        return (DEFAULT_POLICIES if policy == "default" else TORCH_POLICIES)[kind]
    if isinstance(policy, Policy) and policy.device_type == kind:
        return policy
    raise (ValueError if isinstance(policy, str) else TypeError)(
        f"policy is {short(policy)}; expected a Policy for {kind!r}, such as Policy.default({kind!r}), 'default' or "
        f"'torch'{_rules_hint(policy, kind)}"
    )


def _rules_hint(policy: Any, kind: str) -> str:
    is_rules = isinstance(policy, Mapping | Rule)
    return f". A policy is made of rules by Policy.default({kind!r}).with_rules({{operator: rule}})" if is_rules else ""


def _available(device: str, kind: str, dtype: torch.dtype) -> bool:
    """Whether autocast is available for the device and dtype. Warns if not, as torch does."""
    if kind == "cuda" and ":" not in device:
        if torch.cuda.amp.common.amp_definitely_not_available():
            warnings.warn("CUDA is not available: autocast for it is disabled.", stacklevel=4)
            return False
        if dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
            _check_bfloat16()
        return True
    if kind == "cuda":
        return True
    supported = SIXTEEN_BIT if kind != privateuse1_name() else _supported_by_backend()
    if dtype not in supported:
        instead = (
            "To compute in float32, decorate a function with amp.float_function, or use autocast(enabled=False) and "
            ".float() inputs."
        )
        if dtype.is_floating_point and dtype.itemsize == 1:
            instead = (
                "Select 8-bit formats for operators by rules, in a 16-bit region: "
                f"autocast({kind!r}, policy=Policy.default({kind!r}).with_rules({{operator: rule}}))."
            )
        warnings.warn(
            f"autocast for {kind} supports {' or '.join(map(str, supported))}, not {dtype}: it is disabled. {instead}",
            stacklevel=4,
        )
        return False
    return True


def emulates_bfloat16() -> bool:
    """Whether the current CUDA device emulates bfloat16, as a V100 or T4 does: correct and very slow."""
    return (
        torch.cuda.is_available()
        and torch.cuda.is_bf16_supported()
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    )


def _check_bfloat16() -> None:
    """Warn once about a CUDA device that emulates bfloat16; raise for one that cannot compute it at all."""
    name = torch.cuda.get_device_name()
    if not emulates_bfloat16():
        raise RuntimeError(f"{name} does not support bfloat16; use autocast('cuda', torch.float16) with a GradScaler")
    if name not in _warned:
        _warned.add(name)
        warn_user(
            f"{name} emulates bfloat16, which is several times slower than float32; use autocast('cuda', "
            "torch.float16) with a GradScaler",
            _PASSING,
        )


def _supported_by_backend() -> Sequence[torch.dtype]:
    """Return the dtypes that the autocast of the backend `privateuseone` supports."""
    name = privateuse1_name()
    module = getattr(torch, name, None)
    if module is None or not hasattr(module, "get_amp_supported_dtype"):
        raise RuntimeError(
            f"the backend {name!r} has not registered the dtypes that its autocast supports: it must register a module "
            "that has get_amp_supported_dtype() with torch._register_device_module"
        )
    return module.get_amp_supported_dtype()
