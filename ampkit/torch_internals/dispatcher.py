"""torch's dispatcher: the two keys of regions, above autograd, guards, and the thread-local store (TLS).

`TORCH_KEY` is for regions with policies that start from torch's list for a device, `KEY` for all others. So operators
that only ampkit's lists name have no entry at `TORCH_KEY`, and take no time there.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ampkit.torch_internals.operators import listed_as
from ampkit.torch_internals.private_names import missing, private, refuse

__all__ = [
    "AUTOCAST_KEYS",
    "KEY",
    "KEY_NAMES",
    "PRE_DISPATCH",
    "TLS_NAME",
    "TORCH_KEY",
    "Exclude",
    "TorchDispatchMode",
    "autocast_key",
    "current",
    "get_in_tls",
    "has_kernel",
    "higher_order_fallthrough",
    "higher_order_ops",
    "is_excluded",
    "is_in_tls",
    "is_included",
    "is_open",
    "keysets",
    "parsed_key",
    "put_in_tls",
    "set_excluded",
    "set_included",
]

TLS_NAME = "ampkit.mode"
AUTOCAST_KEYS = {
    "cpu": "AutocastCPU",
    "cuda": "AutocastCUDA",
    "mps": "AutocastMPS",
    "xpu": "AutocastXPU",
    "hpu": "AutocastHPU",
    "mtia": "AutocastMTIA",
    "maia": "AutocastMAIA",
    "xla": "AutocastXLA",
    "ipu": "AutocastIPU",
    "privateuseone": "AutocastPrivateUse1",
}

Exclude = private("_C._ExcludeDispatchKeyGuard")
get_in_tls = private("_C._get_obj_in_tls")
is_in_tls = private("_C._is_key_in_tls")
is_included = private("_C._dispatch_tls_is_dispatch_key_included")
is_excluded = private("_C._dispatch_tls_is_dispatch_key_excluded")
set_included = private("_C._dispatch_tls_set_dispatch_key_included")
set_excluded = private("_C._dispatch_tls_set_dispatch_key_excluded")
has_kernel = private("_C._dispatch_has_kernel_for_dispatch_key")
higher_order_ops = private("_ops._higher_order_ops")
higher_order_fallthrough = private("_ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS")


def parsed_key(name: str) -> Any:
    """The dispatch key of this name; None, with a note in `missing`, if torch has no such key."""
    parse = private("_C._dispatch_key_parse")
    try:
        return None if parse is refuse else parse(name)
    except RuntimeError:
        missing.append(f"dispatch key {name}")
        return None


def _below(key: Any) -> Any:
    """The set of all keys below `key`; None if torch lacks the key or the function for it."""
    keys_after = private("_C._dispatch_keyset_full_after")
    return None if key is None or keys_after is refuse else keys_after(key)


_KEY_NAME, _TORCH_KEY_NAME = "TESTING_ONLY_GenericMode", "TESTING_ONLY_GenericWrapper"  # the second is below
KEY, TORCH_KEY = parsed_key(_KEY_NAME), parsed_key(_TORCH_KEY_NAME)
KEY_NAMES = {KEY: _KEY_NAME, TORCH_KEY: _TORCH_KEY_NAME}
_BELOW = _below(TORCH_KEY)
PRE_DISPATCH = torch._C.DispatchKey.PreDispatch  # the key of `torch.export`'s tracer, the only one above these


_add_reference = ctypes.pythonapi.Py_IncRef  # the C function: adds 1 to an object's reference count
_add_reference.argtypes, _add_reference.restype = [ctypes.py_object], None


def _owning(stash: Callable[[str, Any], None]) -> Callable[[str, Any], None]:
    """torch's function that stores an object, or a wrapper of it, such that the store owns the object.

    torch 2.11 stores an object without taking a reference, and drops one when the object is replaced: the object would
    be freed while in use. There, each call adds the reference that torch will drop. A probe shows which torch it is.
    """
    probe = object()
    _add_reference(probe)  # the reference that torch 2.11 drops
    before = sys.getrefcount(probe)
    stash("ampkit.probe", probe)
    if sys.getrefcount(probe) > before:
        return stash

    def put(name: str, stored: Any) -> None:
        _add_reference(stored)
        stash(name, stored)

    return put


_stash = private("_C._stash_obj_in_tls")
put_in_tls = _stash if _stash is refuse else _owning(_stash)


@functools.cache
def keysets(device_types: tuple[str, ...]) -> tuple[Any, Any]:
    """Two sets of keys: to exclude while an operator runs on cast arguments, and to redispatch to without casts."""
    excluded = torch._C.DispatchKeySet(KEY) | torch._C.DispatchKeySet(TORCH_KEY)
    for device_type in device_types:
        excluded |= torch._C.DispatchKeySet(autocast_key(device_type))
    return excluded, _BELOW - excluded


def autocast_key(device_type: str) -> Any:
    """The dispatch key of torch's own autocast for a device type."""
    return torch._C._dispatch_key_parse(AUTOCAST_KEYS[listed_as(device_type)])


def current() -> Any:
    """The mode of the innermost open region of this thread, or the mode that autograd handed to it; else None."""
    mode = get_in_tls(TLS_NAME) if is_in_tls(TLS_NAME) else None
    return mode if mode is not None and mode.open else None


def is_open() -> bool:
    """Whether operators of this thread reach a mode: a region is open, and no disabled region is inside it."""
    return any(is_included(key) and not is_excluded(key) for key in KEY_NAMES)
