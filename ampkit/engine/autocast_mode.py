"""The mode of an open region, whose `__torch_dispatch__` is the general, slow path: nearly all calls go elsewhere.

An entry (`registration`) calls a generated handler (`generated_handlers`) for nearly every operator, and this mode only
for unusual arguments, schemas and rules, for several device types, and while calls are recorded. `_follow` is the
one place that has every rule: read it for what a rule means, and `generated_handlers` for what usually runs.

A `TorchDispatchMode` usually sits at the dispatch key `Python`, below autograd: a cast made there is not
differentiated, and `linear` arrives as `t` + `addmm`. This mode is at a key above autograd, above functorch and above
torch's own autocast: it sees an operator first and before decomposition, and its casts are differentiated, vmapped and
traced as if the user had written them. The key is `TESTING_ONLY_GenericMode`, or `TESTING_ONLY_GenericWrapper` for
policies that start from torch's list: torch defines both, and no build of torch uses them. It is included only while a
region is open.

The mode does not need torch's autocast keys excluded, so the region's state *is* torch's own autocast state:
`torch.is_autocast_enabled(...)`, `torch.autocast(enabled=False)` in a library, activation checkpointing and operators
with `register_autocast` all see it. docs/architecture.md has the design.

The mode is kept in torch's thread-local store, which autograd hands to its worker threads: backward meets the mode of
the thread that called backward, as with torch.amp.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ampkit.engine import casting, float8_products, float32_output, policy_mark, recurrent
from ampkit.engine.generated_handlers import handlers_for
from ampkit.engine.registration import install
from ampkit.engine.weight_cache import RegionCache, WeightCache
from ampkit.policy.float8_recipes import RECIPES
from ampkit.policy.policy import Policy, RuleTable, register_changes
from ampkit.policy.rules import Rule
from ampkit.torch_internals.dispatcher import (
    KEY,
    TORCH_KEY,
    Exclude,
    TorchDispatchMode,
    keysets,
)
from ampkit.torch_internals.dynamo import dynamo_skip
from ampkit.torch_internals.operators import OpOverload

_NO_ARGUMENTS: Mapping[str, Any] = {}

# Used for every operator that comes here: looking them up through their modules would take longer than the calls.
_enabled, _dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype
_LOWER, _DECOMPOSE = Rule.LOWER, Rule.DECOMPOSE

_Call = tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]  # function, arguments, keyword arguments

# Rule tables whose operators have entries at a key, by the table's `id` and the key.
_installed: weakref.WeakValueDictionary[tuple[int, Any], RuleTable] = weakref.WeakValueDictionary()


class AutocastMode(TorchDispatchMode):
    """The policies of an open region, one per device type, with its handlers, weight cache and dispatch key.

    Its rules never change, so regions with the same policies and cache share a mode. Whether a device's autocast is
    enabled, and its dtype, are read from torch at every operator, so a `torch.autocast` region inside, of any library,
    is respected.
    `region/stack` puts the mode at its key; a `with` statement would put it below autograd.
    """

    def __init__(self, policies: tuple[tuple[str, Policy], ...], cache: WeightCache | RegionCache | None) -> None:
        super().__init__()
        self.record: Any = None  # the record that calls are added to, if any: `region/recording`
        self.closed_copy: AutocastMode | None = None
        self.policies = policies
        self.policy = policies[0][1] if len(policies) == 1 else None  # regions compare it by identity
        self.cache = cache
        self.states: dict[Any, Any] = {}  # of forwards under `custom_fwd`: `region/custom_function`
        self.open = True
        self.changes = register_changes()
        self.lookup = None if cache is None else cache.cast
        self.weights = casting.without_cache if cache is None else cache.weights_outside_transforms
        self.tables = tuple((device, policy.rules()) for device, policy in policies)
        # Transforms of `torch.func` decompose some operators. torch's list applies after them, as in torch.amp;
        # ampkit's applies before them, so that `vmap` over models equals the loop over models.
        self.as_torch = {policy.base for _, policy in policies} == {"torch"}
        self.key = TORCH_KEY if self.as_torch else KEY
        self.handlers = handlers_for(self.tables, self.key)
        self.has_module_rules = any(policy.modules for _, policy in policies)
        self.mark = policy_mark.mark_of(policies)
        self.excluded_keys, self.redispatch_keys = keysets(tuple(device for device, _ in policies))
        for _, table in self.tables:
            if _installed.get((id(table), self.key)) is not table:
                install(table, self.key)
                _installed[id(table), self.key] = table

    def closed(self) -> AutocastMode:
        """The mode that stays in TLS after the outermost region is left, made once.

        Backward of `torch.cond` and other higher-order operators recomputes the forward under the dispatch keys that
        it saw, the mode's key among them, wherever backward is called.
        """
        # No `cached_property`: in Python 3.11 all instances share its lock, which a forked child may inherit locked.
        self.closed_copy = mode = AutocastMode(self.policies, None)
        mode.open = False
        return mode

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch would wrap `__torch_dispatch__` in a call of its own. The handlers are marked instead.
        return False

    @dynamo_skip
    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Follow the rule for `func`: call it with this mode's key and torch's autocast keys excluded.

        Returns NotImplemented if no active rule names `func`; the caller then redispatches it below the mode's key.
        """
        call = self.prepare(func, args, _NO_ARGUMENTS if kwargs is None else kwargs)
        if call is None:
            return NotImplemented
        run, args, kwargs = call
        with Exclude(self.excluded_keys):
            return run(*args, **kwargs)

    def prepare(self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Call | None:
        """The call to make in place of `op(*args, **kwargs)`; None if no active rule names `op`."""
        if len(self.tables) == 1:
            device, table = self.tables[0]
            rule = table.get(op)
            if rule is None or rule is _DECOMPOSE or not _enabled(device):
                return None
            return self._follow(rule, op, args, kwargs, device)
        call: _Call | None = None
        for device, table in self.tables:
            rule = table.get(op)
            if rule is None or rule is _DECOMPOSE or not _enabled(device):
                continue
            if any(tensor.device.type == device for tensor in casting.tensors((*args, *kwargs.values()))):
                call = self._follow(rule, op, args, kwargs, device)
                _, args, kwargs = call
        return call

    def _follow(
        self, rule: Rule, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: str
    ) -> _Call:
        """The call to make under a rule, on cast arguments: every rule in one place."""
        if rule is _LOWER or rule is Rule.LOWER_FLOAT32_OUT:
            cast = casting.cast_to(device, _dtype_of(device))
            if kwargs:
                kwargs = cast.kwargs(kwargs, self.lookup)
            args = cast.args(args, self.lookup)
            if op in recurrent.LAYERS:
                recurrent.flatten_weights(op, args)
            if rule is not _LOWER:
                return functools.partial(float32_output.product, op, cast), args, kwargs
        elif rule is Rule.FLOAT32:
            cast = casting.cast_to(device, torch.float32)
            kwargs, args = cast.kwargs(kwargs), cast.args(args)
        elif rule is Rule.FLOAT32_DTYPE_ARG:
            op, args, kwargs = casting.with_float32_dtype(op, args, kwargs, device)
        elif rule is Rule.PROMOTE:
            dtype = casting.widest_dtype(args, device)
            if kwargs:
                dtype = casting.widest_dtype(kwargs.values(), device, dtype)
            # All eligible tensors share any other dtype: there is nothing to cast, except in a region in float32.
            if dtype is torch.float32 or (dtype is not None and _dtype_of(device) is torch.float32):
                cast = casting.cast_to(device, torch.float32)
                kwargs, args = cast.kwargs(kwargs), cast.args(args)
        elif rule is Rule.BANNED and any(
            casting.is_eligible(tensor, device) for tensor in casting.tensors((*args, *kwargs.values()))
        ):
            raise RuntimeError(_banned_message(op))
        elif rule in RECIPES:
            if float8_products.why_not(op, args, kwargs, device):
                return self._follow(_LOWER, op, args, kwargs, device)
            product = float8_products.Product(rule, op, device, _dtype_of(device), self.cache)
            return product, product.prepared(args), kwargs
        return op._op, args, kwargs


def _banned_message(op: OpOverload) -> str:
    if op.name() == "aten::binary_cross_entropy":
        replacement = "binary_cross_entropy_with_logits (or BCEWithLogitsLoss) on the values before the sigmoid"
    else:
        replacement = "an operator that is safe in low precision"
    return (
        f"operator '{op.name()}' is unsafe under autocast: its low-precision input has lost digits that it needs. "
        f"Use {replacement}; or call it in `with autocast(enabled=False)` on .float() inputs; or let it run in "
        f"float32: autocast(policy=Policy.default(device_type).with_rules({{{op.name()!r}: Rule.FLOAT32}}))"
    )
