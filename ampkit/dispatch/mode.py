"""The mode of an open region: the object in thread-local state from which its operators take their rules.

A mode has the region's policies, one per device type, the handlers of their operators, and the cache of weight casts.
Its rules never change, so regions of a thread with the same policies share a mode. Whether autocast is enabled for a
device, and its dtype, are torch's own autocast state, which is read at every operator: so a `torch.autocast` region
inside, of any library, is respected, as are checkpoints and operators with `register_autocast`.

`call_by_rule` is the one place that has every rule; `handlers` has faster forms of the common ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ampkit.dispatch import casting, dynamo_guard, recurrent
from ampkit.dispatch.dispatcher import KEY, TORCH_KEY, install, keysets, transforms
from ampkit.dispatch.handlers import GENERAL_HANDLERS, handlers_for
from ampkit.dispatch.weight_cache import WeightCasts
from ampkit.policy.policy import Policy
from ampkit.policy.rules import PRODUCT_RULES, Rule
from ampkit.torch_private import Exclude, OpOverload, TorchDispatchMode, dynamo_skip

__all__ = ["AutocastMode", "Call", "Observer", "call_by_rule", "observers"]

Call = tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]  # function, arguments, keyword arguments
# Called with the mode, an operator, the arguments as they were given, the call to make, and the casts in it that were
# cached.
Observer = Callable[["AutocastMode", OpOverload, tuple[Any, ...], Mapping[str, Any], Call, list[Any]], None]
observers: list[Observer] = []  # the last one observes the calls of regions that are entered now
_enabled, _dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype


class AutocastMode(TorchDispatchMode):
    """The state that an open region puts into the thread.

    torch's own mode stack is below autograd, so `region.stack` does not push the mode there: see `dispatcher`.

    Args:
        policies: pairs of a device type and its policy.
        cache: the casts of weights; None: no cast is kept.
        observer: a function that is called before each operator call that follows a rule.
        is_open: False for the mode that remains in the thread after the outermost region ends.
    """

    def __init__(
        self,
        policies: tuple[tuple[str, Policy], ...],
        cache: WeightCasts | None,
        observer: Observer | None = None,
        *,
        is_open: bool = True,
    ) -> None:
        super().__init__()
        self.policies, self.cache, self.observer, self.open = policies, cache, observer, is_open
        self.tables = tuple((device_type, policy.rules()) for device_type, policy in policies)
        # Transforms of `torch.func` decompose some operators. torch's list applies after them, as in torch.amp;
        # ampkit's applies before them, so that `vmap` over models equals the loop over models.
        self.as_torch = all(policy.base == "torch" for _, policy in policies)
        self.key = TORCH_KEY if self.as_torch else KEY
        self.tag = dynamo_guard.tag_of(policies)
        self.tag_without_casts = dynamo_guard.tag_of(policies, casts=False)
        self.excluded_keys, self.redispatch_keys = keysets(tuple(device_type for device_type, _ in policies))
        for _, table in self.tables:
            install(table, self.key)
        is_plain = len(self.tables) == 1 and observer is None
        self.handlers = handlers_for(*self.tables[0], self.key) if is_plain else GENERAL_HANDLERS
        self.with_module_rules = frozenset(device_type for device_type, policy in policies if policy.modules)
        # This mode remains in the thread after the outermost region ends: backward of `torch.cond` and other
        # higher-order operators recomputes the forward under the dispatch keys of the forward, the region's key
        # included, wherever backward is called.
        self.closed = AutocastMode(policies, None, is_open=False) if is_open else self

    def policy_for(self, device_type: str) -> Policy | None:
        """Return the policy for a device type, if there is one."""
        return next((policy for known, policy in self.policies if known == device_type), None)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch would wrap `__torch_dispatch__` in a call of its own. The handlers are marked instead.
        return False

    @dynamo_skip
    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call an operator by its rule, below the region's key and torch's autocast keys.

        Returns NotImplemented if no active rule names the operator; the caller then calls it without casts.
        """
        call = self.prepare(func, args, kwargs or {})
        if call is None:
            return NotImplemented
        run, args, kwargs = call
        with Exclude(self.excluded_keys):
            return run(*args, **kwargs)

    def prepare(self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
        """Return the call to make instead of `op(*args, **kwargs)`; None if no active rule names `op`."""
        if self.observer is None:
            return self._prepare(op, args, kwargs)
        reused: list[Any] = []
        if self.cache is not None:
            self.cache.reused = reused
        try:
            call = self._prepare(op, args, kwargs)
        finally:
            if self.cache is not None:
                self.cache.reused = None
        if call is not None:
            self.observer(self, op, args, kwargs, call, reused)
        return call

    def _prepare(self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
        call: Call | None = None
        cache = None if transforms() else self.cache  # a cast made inside a transform of `torch.func` is part of it
        for device_type, table in self.tables:
            rule = table.get(op)
            if rule is None or rule is Rule.DECOMPOSE or not _enabled(device_type):
                continue
            if len(self.tables) == 1 or any(
                tensor.device.type == device_type for tensor in casting.tensors((*args, *kwargs.values()))
            ):
                call = call_by_rule(rule, op, args, kwargs, device_type, cache)
                _, args, kwargs = call
        return call


def call_by_rule(
    rule: Rule,
    op: OpOverload,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    device_type: str,
    cache: WeightCasts | None,
) -> Call:
    """Return the call that a rule makes of `op(*args, **kwargs)` in a region for a device type.

    Raises:
        RuntimeError: the rule is BANNED, and the operator has arguments that the region may cast.
    """
    if rule is Rule.LOWER:
        cast = casting.cast_to(device_type, _dtype_of(device_type))
        kwargs, args = cast.kwargs(kwargs, cache), cast.args(args, cache)
        if op in recurrent.LAYERS:
            recurrent.flatten_weights(op, args)
    elif rule is Rule.FLOAT32:
        cast = casting.cast_to(device_type, torch.float32)
        kwargs, args = cast.kwargs(kwargs), cast.args(args)
    elif rule is Rule.FLOAT32_DTYPE_ARG:
        op, args, kwargs = casting.with_float32_dtype(op, args, kwargs, device_type)
    elif rule is Rule.PROMOTE:
        dtype = casting.widest_dtype((*args, *kwargs.values()), device_type)
        # All eligible tensors share any other dtype: there is nothing to cast, except in a region in float32.
        if dtype is torch.float32 or (dtype is not None and _dtype_of(device_type) is torch.float32):
            cast = casting.cast_to(device_type, torch.float32)
            kwargs, args = cast.kwargs(kwargs), cast.args(args)
    elif rule is Rule.BANNED:
        if any(casting.is_eligible(tensor, device_type) for tensor in casting.tensors((*args, *kwargs.values()))):
            raise RuntimeError(_banned_message(op))
    elif rule is not Rule.KEEP:
        call = PRODUCT_RULES[rule].prepare(rule, op, args, kwargs, device_type, cache)
        return call or call_by_rule(Rule.LOWER, op, args, kwargs, device_type, cache)
    return op._op, args, kwargs


def _banned_message(op: OpOverload) -> str:
    if op.name() == "aten::binary_cross_entropy":
        replacement = "binary_cross_entropy_with_logits (or BCEWithLogitsLoss) on the values before the sigmoid"
    else:
        replacement = "an operator that is safe in low precision"
    return (
        f"operator '{op.name()}' is unsafe under autocast: its 16-bit input is not precise enough. "
        f"Use {replacement}; or call it in `with autocast(enabled=False)` on .float() inputs; or let it run in "
        f"float32: autocast(policy=Policy.default(device_type).with_rules({{{op.name()!r}: Rule.FLOAT32}}))"
    )
