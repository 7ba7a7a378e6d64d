"""Regions as if they had been written with another policy: for changes that a tool tries, and for rehearsals."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ampkit.debugging.torch_private import current_node
from ampkit.matmul.float8_recipes import RECIPES
from ampkit.policy.module_rules import ModuleRules
from ampkit.policy.policy import Policy
from ampkit.region.arguments import TORCH_POLICIES, RegionSpec
from ampkit.region.autocast import autocast
from ampkit.region.stack import thread


@contextmanager
def replaced_regions(replace: Callable[[RegionSpec], RegionSpec]) -> Iterator[None]:
    """A context in which each region that is entered is the one that `replace` makes of it, in all threads.

    Regions of modules with rules are entered as the policy of the new region says. In place of a `torch.autocast` an
    ampkit region is entered, by torch's lists.
    """
    enter, leave = autocast.__enter__, autocast.__exit__
    given: dict[int, list[RegionSpec]] = {}  # by region, innermost last: one object may be entered again while open

    def entered(region: autocast) -> autocast:
        spec = region.spec
        region.spec = replace(spec)
        try:
            enter(region)
        except BaseException:
            region.spec = spec
            raise
        given.setdefault(id(region), []).append(spec)
        return region

    def left(region: autocast, *error: Any) -> Any:
        try:
            return leave(region, *error)
        finally:
            if given.get(id(region)):
                region.spec = given[id(region)].pop()

    with _methods(autocast, entered, left), _torch_regions(entered, left):
        yield


@contextmanager
def _torch_regions(entered: Callable[..., autocast], left: Callable[..., Any]) -> Iterator[None]:
    """A context in which `torch.autocast` enters ampkit regions."""
    enter, leave = torch.autocast.__enter__, torch.autocast.__exit__
    of_thread = threading.local()  # `open`: torch's regions and those in their place, innermost last

    def torch_entered(region: Any) -> Any:
        of_thread.open = opened = getattr(of_thread, "open", [])
        if current_node() is not None or len(thread.regions) != len(opened):
            return enter(region)  # in a recompute, or inside of an ampkit region, which has the policy
        policy = TORCH_POLICIES[region.device]
        own = autocast(region.device, region.fast_dtype, region._enabled, region._cache_enabled, policy=policy)
        opened.append((region, entered(own)))
        return region

    def torch_left(region: Any, *error: Any) -> Any:
        opened = getattr(of_thread, "open", [])
        return left(opened.pop()[1], *error) if opened and opened[-1][0] is region else leave(region, *error)

    with _methods(torch.autocast, torch_entered, torch_left):
        yield


@contextmanager
def _methods(owner: Any, enter: Callable[..., Any], leave: Callable[..., Any]) -> Iterator[None]:
    before = owner.__enter__, owner.__exit__
    owner.__enter__, owner.__exit__ = enter, leave
    try:
        yield
    finally:
        owner.__enter__, owner.__exit__ = before


def policy_of(spec: RegionSpec) -> Policy:
    """The policy of a region, for one that does not inherit it."""
    return spec.policy or Policy.default(spec.device_type)


def inherits(spec: RegionSpec) -> bool:
    """Whether a region that is entered now has the policy of a region around it."""
    return spec.policy is None and any(entry.spec.device_type == spec.device_type for entry in thread.regions)


def has_float8(policy: Policy) -> bool:
    """Whether a policy computes operators in FP8, in all modules or in some."""
    return any(rule in RECIPES for layer in policy.overrides for _, rule in layer) or any(
        isinstance(rule.value, Policy) and has_float8(rule.value) for rule in policy.modules.rules
    )


def without_float8(policy: Policy) -> Policy:
    """The policy without its FP8 rules, and without those in its modules' policies."""
    layers = (tuple(item for item in layer if item[1] not in RECIPES) for layer in policy.overrides)
    rules = (
        rule._replace(value=without_float8(rule.value)) if isinstance(rule.value, Policy) else rule
        for rule in policy.modules.rules
    )
    return dataclasses.replace(policy, overrides=tuple(filter(None, layers)), modules=ModuleRules(tuple(rules)))


def wider(policy: Policy, *, float8: bool) -> Any:
    """What keeps a module precise: with `float8` the policy without its rules of FP8, for a module; else float32."""
    return dataclasses.replace(without_float8(policy), modules=ModuleRules()) if float8 else torch.float32


def code_of(policy: Policy | None, device_type: str, paths: Iterable[str], value: Any, rules: str = "") -> str:
    """The code that gives modules of a region's policy one value; `policy` is the one that the user passes, if any."""
    named = "torch" if policy == TORCH_POLICIES[device_type] else "" if policy is not None else "default"
    start = f'Policy.{named}("{device_type}")' if named else "policy"
    shown = repr(value).replace("'", '"')
    modules = ", ".join(f'"{path}": {shown}' for path in paths)
    return f"policy = {start}{rules}.for_modules(model, {{{modules}}})"
