"""What regions take of torch's dispatcher: the key above autograd, the guards, and the thread-local store."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

from ampkit.torch_internals.lookup import missing, private, refuse

__all__ = [
    "BELOW", "KEY", "KEY_NAME", "Exclude", "get_in_tls", "has_kernel", "higher_order_fallthrough", "higher_order_ops",
    "is_excluded", "is_in_tls", "is_included", "put_in_tls", "set_excluded", "set_included",
]

KEY_NAME = "TESTING_ONLY_GenericMode"

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


def _keys() -> tuple[Any, Any]:
    """The key and the set of all below it; None for each where torch has no such key."""
    parse, below = private("_C._dispatch_key_parse"), private("_C._dispatch_keyset_full_after")
    if refuse in (parse, below):
        return None, None
    try:
        key = parse(KEY_NAME)
    except RuntimeError:
        missing.append(f"dispatch key {KEY_NAME}")
        return None, None
    return key, below(key)


KEY, BELOW = _keys()


def _owning(stash: Callable[[str, Any], None]) -> Callable[[str, Any], None]:
    """`stash`, which in torch 2.11 drops a reference it never took: there, give it one to drop."""
    probe = object()
    increment = ctypes.pythonapi.Py_IncRef
    increment.argtypes, increment.restype = [ctypes.py_object], None
    increment(probe)        # for the torch that drops one
    before = sys.getrefcount(probe)
    stash("ampkit.probe", probe)
    if sys.getrefcount(probe) > before:
        return stash

    def put(name: str, value: Any) -> None:
        increment(value)
        stash(name, value)

    return put


_stash = private("_C._stash_obj_in_tls")
put_in_tls = _stash if _stash is refuse else _owning(_stash)
