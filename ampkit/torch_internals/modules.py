"""torch's modules: global hooks, the code object of a call, base classes of norms, FSDP's flag on parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.nn.modules import module as _tables
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNorm

__all__ = [
    "CALL",
    "EAGER",
    "TRACED",
    "BatchNorm",
    "InstanceNorm",
    "has_hooks",
    "is_flat",
    "put_hooks",
    "request_kwargs",
    "take_hooks",
]

CALL = Module._call_impl.__code__
EAGER, TRACED = "ampkit", "ampkit.traced"  # keys of the hooks: constant, since torch.compile guards on them


def request_kwargs(module: Module | None) -> None:
    """Have torch pass keyword arguments of `module` to the global pre-hooks with these keys.

    Without such hooks a key in this table has no effect; copies and pickles of the module contain one more string.
    """
    table = None if module is None else vars(module).get("_forward_pre_hooks_with_kwargs")
    if table is not None:  # scripted modules have none
        table[EAGER] = table[TRACED] = True


def has_hooks(key: Any) -> bool:
    """Whether there are hooks with a key: `put_hooks` adds, `take_hooks` removes them. Dynamo traces the three."""
    return key in _tables._global_forward_pre_hooks


def put_hooks(key: Any, before: Callable[..., Any], after: Callable[..., None], *, always: bool = False) -> None:
    """Register `before` and `after` around every forward; with `always`, `after` also runs if the forward raises."""
    _tables._global_forward_pre_hooks[key] = before
    _tables._global_forward_hooks[key] = after
    if always:
        _tables._global_forward_hooks_always_called[key] = True


def take_hooks(key: Any, *, always: bool = False) -> None:
    """Remove the hooks with a key. Other code may have cleared torch's tables meanwhile."""
    _tables._global_forward_pre_hooks.pop(key, None)
    _tables._global_forward_hooks.pop(key, None)
    if always:
        _tables._global_forward_hooks_always_called.pop(key, None)


def is_flat(param: Tensor) -> bool:
    """Whether `FullyShardedDataParallel` has put a parameter, or its elements, into a flat parameter that it shards."""
    return getattr(param, "_fsdp_flattened", False)
