"""What `initialize` refuses, with what to do instead. Nothing here changes anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import Module
from torch.optim import Optimizer

from ampkit.containers import REAL_FLOATS
from ampkit.gradients.masters import masters_of
from ampkit.whole_model._boundary import refuse_bounded

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
_NAMES_SHOWN = 4


def as_list(value: Any, cls: type, name: str, what: str) -> list[Any]:
    """One object or a list or tuple of them, as a list. Raises `TypeError` for anything else."""
    items = list(value) if isinstance(value, list | tuple) else [value]
    for item in items:
        if not isinstance(item, cls):
            raise TypeError(f"{name} holds a {type(item).__name__}; expected {what}, or a list of them")
    if len({id(item) for item in items}) != len(items):
        raise ValueError(f"{name} holds one object twice; expected each once")
    return items


def bare_optimizers(value: Any) -> list[Optimizer]:
    """One optimizer or a list of them, without what wraps them.

    A wrapper in the manner of Apex's LARC is no `Optimizer` itself: it holds one as `optim` or `optimizer`, shares its
    parameter groups, changes gradients in its `step` and calls the other's.
    """
    items = list(value) if isinstance(value, list | tuple) else [value]
    what = "a torch.optim.Optimizer, or an object that holds one as `optim` and shares its param_groups"
    return as_list([_bare(item) for item in items], Optimizer, "optimizers", what)


def _bare(item: Any) -> Any:
    if isinstance(item, Optimizer):
        return item
    inner = getattr(item, "optim", None) or getattr(item, "optimizer", None)
    shares = isinstance(inner, Optimizer) and getattr(item, "param_groups", None) is inner.param_groups
    return inner if shares else item


def check_model(model: Module, *, casts_model: bool) -> None:
    """Refuse a model that is wrapped, halved or initialised already, or sharded before it is to be halved."""
    name = type(model).__name__
    if isinstance(model, _WRAPPERS) or name == "FullyShardedDataParallel":
        raise RuntimeError(
            f"the model is wrapped in {name} already; call amp.initialize on the bare model first, and wrap what "
            f"it returns: {name}(model, ...)"
        )
    if casts_model and any("FSDPModule" in [base.__name__ for base in type(m).__mro__] for m in model.modules()):
        raise RuntimeError(
            f"this {name} is sharded by fully_shard, which keeps float32 shards and casts them itself; use opt_level "
            f"'O1', or fully_shard's MixedPrecisionPolicy with ampkit.GradScaler"
        )
    refuse_bounded(model)
    # float64 buffers are no sign of a float64 model: .double() would have converted its parameters too.
    for kind, tensors, allowed in (
        ("parameter", model.named_parameters(), (torch.float32,)),
        ("buffer", model.named_buffers(), (torch.float32, torch.float64)),
    ):
        for path, tensor in tensors:
            if tensor.dtype in REAL_FLOATS and tensor.dtype not in allowed:
                raise RuntimeError(
                    f"{kind} {path} is {tensor.dtype}; expected a float32 model at every opt_level: leave out "
                    f".half(), .bfloat16() or .double() (or call model.float()), and let opt_level convert it"
                )


def check_optimizers(models: Sequence[Module], optimizers: Sequence[Optimizer]) -> None:
    """Refuse an optimizer of another model, and trainable parameters that no optimizer has."""
    for optimizer in optimizers:
        if masters_of(optimizer) is not None:
            raise RuntimeError(
                f"this {type(optimizer).__name__} has master weights already; pass initialize a bare optimizer, and "
                f"let opt_level 'O2' make them"
            )
    theirs = [{id(param) for param in model.parameters()} for model in models]
    every = set[int]().union(*theirs)
    held: set[int] = set()
    for optimizer in optimizers:
        params = {id(param) for group in optimizer.param_groups for param in group["params"]}
        if not params & every:
            raise RuntimeError(
                f"{type(optimizer).__name__} holds no parameter of the models given; make the optimizer from the model "
                f"that is passed along with it, after anything that replaces its parameters"
            )
        held |= params
    for model, params in zip(models, theirs, strict=True):
        if not params & held:
            continue        # a model for inference only
        missing = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]
        if missing:
            more = "" if len(missing) <= _NAMES_SHOWN else f" and {len(missing) - _NAMES_SHOWN} more"
            raise RuntimeError(
                f"parameters {', '.join(missing[:_NAMES_SHOWN])}{more} of this {type(model).__name__} require "
                f"gradients, but no optimizer has them; add them to one, or freeze them with requires_grad_(False), "
                f"which also saves computing their gradients"
            )
