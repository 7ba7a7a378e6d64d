"""What regions use of torch's dispatcher: two keys above autograd, guards, and the thread-local store (TLS).

`TORCH_KEY` is for regions that start from torch's list for a device, `KEY` for all others. So operators that only
ampkit's lists name have no kernel at `TORCH_KEY`, and cost nothing there.
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
    "AUTOCAST_KEYS", "KEY", "KEY_NAMES", "PRE_DISPATCH", "TLS_NAME", "TORCH_KEY", "Exclude", "TorchDispatchMode",
    "autocast_key",
    "current", "get_in_tls", "has_kernel", "higher_order_fallthrough", "higher_order_ops", "is_excluded", "is_in_tls",
    "is_included", "is_open", "keysets", "parsed_key", "put_in_tls", "set_excluded", "set_included",
]

TLS_NAME = "ampkit.mode"
AUTOCAST_KEYS = {
    "cpu": "AutocastCPU", "cuda": "AutocastCUDA", "mps": "AutocastMPS", "xpu": "AutocastXPU", "hpu": "AutocastHPU",
    "mtia": "AutocastMTIA", "maia": "AutocastMAIA", "xla": "AutocastXLA", "ipu": "AutocastIPU",
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
    """The dispatch key of this name; None, and noted as missing, if torch has no such key."""
    parse = private("_C._dispatch_key_parse")
    try:
        return None if parse is refuse else parse(name)
    except RuntimeError:
        missing.append(f"dispatch key {name}")
        return None


def _below(key: Any) -> Any:
    """The set of all keys below `key`; None without a key, or without torch's function for it."""
    after = private("_C._dispatch_keyset_full_after")
    return None if key is None or after is refuse else after(key)


_KEY_NAME, _TORCH_KEY_NAME = "TESTING_ONLY_GenericMode", "TESTING_ONLY_GenericWrapper"     # the second is below
KEY, TORCH_KEY = parsed_key(_KEY_NAME), parsed_key(_TORCH_KEY_NAME)
KEY_NAMES = {KEY: _KEY_NAME, TORCH_KEY: _TORCH_KEY_NAME}
_BELOW = _below(TORCH_KEY)
PRE_DISPATCH = torch._C.DispatchKey.PreDispatch      # of `torch.export`'s tracer, the one key above these


_add_reference = ctypes.pythonapi.Py_IncRef      # the C function: adds 1 to an object's reference count
_add_reference.argtypes, _add_reference.restype = [ctypes.py_object], None


def _owning(stash: Callable[[str, Any], None]) -> Callable[[str, Any], None]:
    """`stash` in a form that owns what it stores, whether torch's function takes a reference or not.

    torch 2.11 stores an object without taking a reference, and drops one when the object is replaced: the object would
    be freed while in use. There, each call adds the reference that torch is going to drop. Which torch it is shows on a
    probe.
    """
    probe = object()
    _add_reference(probe)       # the one that torch 2.11 drops
    before = sys.getrefcount(probe)
    stash("ampkit.probe", probe)
    if sys.getrefcount(probe) > before:
        return stash

    def put(name: str, value: Any) -> None:
        _add_reference(value)
        stash(name, value)

    return put


_stash = private("_C._stash_obj_in_tls")
put_in_tls = _stash if _stash is refuse else _owning(_stash)


@functools.cache
def keysets(device_types: tuple[str, ...]) -> tuple[Any, Any]:
    """The keys to exclude while an operator runs on cast arguments, and those to redispatch to without casts."""
    excluded = torch._C.DispatchKeySet(KEY) | torch._C.DispatchKeySet(TORCH_KEY)
    for device_type in device_types:
        excluded |= torch._C.DispatchKeySet(autocast_key(device_type))
    return excluded, _BELOW - excluded


def autocast_key(device_type: str) -> Any:
    """The dispatch key of torch's own autocast for a device type."""
    return torch._C._dispatch_key_parse(AUTOCAST_KEYS[listed_as(device_type)])


def current() -> Any:
    """The mode of the innermost region open in this thread, or handed to it by autograd."""
    mode = get_in_tls(TLS_NAME) if is_in_tls(TLS_NAME) else None
    return mode if mode is not None and mode.open else None


def is_open() -> bool:
    """Whether operators reach the mode here: a region is open, and no disabled one is inside it."""
    return any(is_included(key) and not is_excluded(key) for key in KEY_NAMES)
