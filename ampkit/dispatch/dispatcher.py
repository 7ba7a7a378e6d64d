"""The dispatcher: how torch's dispatcher calls ampkit for the operators of open regions.

A `TorchDispatchMode` usually runs at the key `Python`, below autograd: a cast made there is not differentiated, and
`linear` arrives as `t` and `addmm`. Regions use keys above autograd, functorch and torch's own autocast, so that their
casts are differentiated, vmapped and traced as if the user had written them. The keys are `TESTING_ONLY_GenericMode`
(`KEY`) and `TESTING_ONLY_GenericWrapper` (`TORCH_KEY`), which torch defines and no build of it uses. A region includes
one of them in the thread's keys. `TORCH_KEY` is for policies that start from torch's list: the operators that only
ampkit's list names have no stub there, and take no time.

`install` registers a *dispatch stub* at a key for each operator with a rule, once per process. Operators without a stub
fall through.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.library import Library

from ampkit.forks import process_lock
from ampkit.torch_private import (
    DispatchKeySet,
    OpOverload,
    dispatch_key,
    dynamo_skip,
    forward_ad,
    functorch_level,
    get_in_tls,
    has_kernel,
    higher_order_fallthrough,
    higher_order_ops,
    is_excluded,
    is_included,
    keys_below,
    listed_as,
)

__all__ = [
    "AUTOCAST_KEYS",
    "KEY",
    "OPERATORS",
    "TLS_NAME",
    "TORCH_KEY",
    "Exit",
    "autocast_key",
    "current_mode",
    "in_forward_ad",
    "install",
    "is_ahead",
    "is_open",
    "keys_ahead",
    "keysets",
    "transforms",
]

TLS_NAME = "ampkit.mode"  # of the mode in torch's thread-local store
AUTOCAST_KEYS = {
    "cpu": "AutocastCPU",
    "cuda": "AutocastCUDA",
    "mps": "AutocastMPS",
    "xpu": "AutocastXPU",
    "hpu": "AutocastHPU",
    "mtia": "AutocastMTIA",
    "xla": "AutocastXLA",
    "privateuseone": "AutocastPrivateUse1",
}
KEY, TORCH_KEY = dispatch_key("TESTING_ONLY_GenericMode"), dispatch_key("TESTING_ONLY_GenericWrapper")
KEY_NAMES = {KEY: "TESTING_ONLY_GenericMode", TORCH_KEY: "TESTING_ONLY_GenericWrapper"}
_BELOW = keys_below(TORCH_KEY)
_PRE_DISPATCH = dispatch_key("PreDispatch")  # of the tracer of `torch.export`, the only key above these two

OPERATORS: dict[str, OpOverload] = {}  # operators with a stub, by name: "aten::linear"
_installed: set[tuple[OpOverload, Any]] = set()  # operator and key of each stub
_libraries: dict[str, Library] = {}  # by the operators' namespace


class Exit:
    """Whether this process has begun to exit.

    torch then removes all registrations of libraries, and operators call no Python function any more. Regions that
    are entered after that, as in `__del__` of a global, set only torch's own autocast state.
    """

    begun = False


weakref.finalize(Exit, setattr, Exit, "begun", True)  # when torch removes the functions of its libraries


def current_mode() -> Any:
    """Return the `AutocastMode` of this thread's innermost region, or the one that autograd handed to it, or None."""
    try:
        mode = get_in_tls(TLS_NAME)
    except RuntimeError:  # no region was entered in this thread
        return None
    return mode if mode.open else None


def is_open() -> bool:
    """Whether operators of this thread reach a mode: a region is open, and no disabled region is inside it."""
    return any(is_included(key) and not is_excluded(key) for key in KEY_NAMES)


def autocast_key(device_type: str) -> Any:
    """Return the dispatch key of torch's own autocast for a device type."""
    return dispatch_key(AUTOCAST_KEYS[listed_as(device_type)])


@functools.cache
def keysets(device_types: tuple[str, ...]) -> tuple[Any, Any]:
    """Two sets of keys: to exclude while an operator runs on cast arguments, and to redispatch to without casts."""
    excluded = DispatchKeySet(KEY) | DispatchKeySet(TORCH_KEY)
    for device_type in device_types:
        excluded |= DispatchKeySet(autocast_key(device_type))
    return excluded, _BELOW - excluded


def install(ops: Iterable[OpOverload], key: Any) -> None:
    """Register a stub at `key` for each operator that has none there yet."""
    missing = [op for op in ops if (op, key) not in _installed]
    if not missing or Exit.begun:
        return
    with process_lock():
        if not _libraries:
            _libraries["_"] = _fallthrough_library()
        for op in missing:
            if (op, key) not in _installed:
                _install_stub(op, key)


def _install_stub(op: OpOverload, key: Any) -> None:
    name = op.name()
    if op.namespace not in _libraries:
        _libraries[op.namespace] = Library(op.namespace, "IMPL")
    if OPERATORS.setdefault(name, op) is op and not isinstance(op._get_dispatch, functools.partial):
        op._get_dispatch = functools.partial(_get_dispatch, op, op._get_dispatch)
    if not has_kernel(name, KEY_NAMES[key]):  # a child that was forked in this function has the stub already
        _libraries[op.namespace].impl(op, _stub(name), KEY_NAMES[key], with_keyset=True)
    _installed.add((op, key))


def _stub(name: str) -> Callable[..., Any]:
    @dynamo_skip
    def stub(keys: Any, *args: Any, **kwargs: Any) -> Any:
        mode = get_in_tls(TLS_NAME)
        return mode.handlers[name](mode, keys, args, kwargs)

    return stub


def _fallthrough_library() -> Library:
    """Make both keys fall through for operators without a stub."""
    library = Library("_", "IMPL")
    for key, name in KEY_NAMES.items():
        try:
            library.fallback(torch.library.fallthrough_kernel, name)
        except RuntimeError as error:
            raise RuntimeError(
                f"the dispatch key {name} that ampkit needs for itself is taken: by another copy of ampkit, imported "
                "again or reloaded in this process, or by another library. Start a new process and import ampkit once"
            ) from error
        for op in higher_order_ops.values():  # `torch.cond` and similar dispatch in Python, without fallbacks
            op.fallthrough(key)
        if key not in higher_order_fallthrough:
            higher_order_fallthrough.append(key)
    return library


# `torch.export` traces by a Python mode at the one key above the regions' keys. `OpOverload._get_dispatch` looks its
# handler up at every call. For operators with a stub, that handler gets the call on cast arguments.


@dynamo_skip
def _get_dispatch(op: OpOverload, look_up: Callable[[Any], Any], key: Any) -> Any:
    handler = look_up(key)
    if key == _PRE_DISPATCH and callable(handler):
        return functools.partial(_cast_before_tracer, op, handler)
    return handler


@dynamo_skip
def _cast_before_tracer(op: OpOverload, tracer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    mode = current_mode() if is_open() else None
    result = NotImplemented if mode is None else mode.__torch_dispatch__(op, (), args, kwargs)
    return tracer(*args, **kwargs) if result is NotImplemented else result


# Transforms of `torch.func` decompose some operators before they reach torch's autocast.

_FRONT = dispatch_key("FuncTorchDynamicLayerFrontMode")
_AHEAD = (_FRONT, dispatch_key("FuncTorchBatched"), dispatch_key("BatchedNestedTensor"))
_RANDOM = "FuncTorchVmapMode"  # the key of `vmap`'s randomness, where only operators that draw random numbers are


def transforms() -> bool:
    """Whether `torch.func` transforms operators that are called now: not inside, once the innermost has run."""
    return functorch_level() is not None and not is_excluded(_FRONT)


def in_forward_ad() -> bool:
    """Whether a level of forward-mode AD is open, in which tensors may have tangents."""
    return forward_ad._current_level >= 0


def keys_ahead(op: OpOverload) -> tuple[Any, ...]:
    """Return the dispatch keys at which a call of `op` is transformed before it reaches torch's autocast."""
    return (*_AHEAD, dispatch_key(_RANDOM)) if has_kernel(op.name(), _RANDOM) else _AHEAD


def is_ahead(keyset: Any, keys: tuple[Any, ...]) -> bool:
    """Whether a call with these dispatch keys is transformed at one of `keys`."""
    return functorch_level() is not None and any(map(keyset.has, keys))
