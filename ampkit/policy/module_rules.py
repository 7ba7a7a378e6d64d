"""Rules for modules: which modules of a model a key of `Policy.for_modules` binds, and which rule a module follows.

Keys are resolved when a model is given, at once. A rule keeps its key as a string, for `Policy.to_dict`, and the
identity of each module that it binds, a string among the module's attributes: wrappers around a bound module change
nothing, copies take the identity along and follow the rule, and a policy keeps no model alive. `policy` checks the
values; `region.module_hooks` enters the regions.
"""

from __future__ import annotations

import difflib
import re
import uuid
import weakref
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch.nn import Module

from ampkit.dtypes import short
from ampkit.policy.module_paths import (
    classes_of,
    has_forward,
    is_container,
    is_scripted,
    named_paths,
    unwrapped,
    was_named,
)
from ampkit.torch_internals.forks import renewed_lock
from ampkit.torch_internals.modules import request_kwargs

__all__ = ["NONE", "BoundRule", "ModuleCheck", "ModuleRules", "describe", "matches", "module_of"]

_CLASS = "class "    # begins a key that names a module class: "class package.module:Name"
_IN_CONTAINER = 1000    # added to the rank of a rule, more than any has
_IDENTITIES = "_ampkit_identities"
_modules: weakref.WeakValueDictionary[str, Module] = weakref.WeakValueDictionary()      # by their own identities
_lock = renewed_lock(__name__, "_lock")


def identity(module: Module) -> str:
    """The identity of a module: random, since pickles take it to other processes. A copy gets one of its own here.

    The copy keeps those that it came with behind its own, and follows the rules for its original where it has none.
    """
    with _lock:
        known = vars(module).get(_IDENTITIES, ())
        if known and _modules.get(known[0]) is module:
            return known[0]
        own = uuid.uuid4().hex
        _modules[own] = module
        vars(module)[_IDENTITIES] = (own, *known)
        return own


def module_of(identity: str) -> Module | None:
    """The module that an identity was made for, if it lives."""
    return _modules.get(identity)


class Bound(NamedTuple):
    """A module that a rule binds."""

    path: str           # at binding; "" is the model itself
    module: str         # its identity
    rank: int           # see `_rank`


class ModuleRule(NamedTuple):
    """A key of `for_modules`, its value, the model that it was given for, and the modules that it binds."""

    key: str            # of a module that was given as a key, its path
    value: Any          # a dtype or a Policy
    model: str          # its identity
    bound: tuple[Bound, ...]

    def check(self) -> BoundRule:
        """What it binds now."""
        model, gone = module_of(self.model), []
        there = None if model is None else set(model.modules())
        for path, known, _ in self.bound:
            module = module_of(known)
            if module is None or (there is not None and module not in there):
                gone.append(path)
        return BoundRule(repr(self.key), self.value, tuple(bound.path for bound in self.bound), tuple(gone))


class ModuleRules:
    """The rules that `for_modules` has bound: immutable, apart from `ran`; falsy when there are none."""

    __slots__ = ("_classes", "_hash", "_values", "ran", "rules")

    def __init__(self, rules: tuple[ModuleRule, ...] = ()) -> None:
        self.rules = rules
        self.ran = False        # whether a bound module has run in a region
        self._values = _values(rules)
        models = {type(module_of(rule.model)) for rule in rules}
        self._classes = {cls for cls in models if not cls.__module__.startswith(("torch.", "builtins"))}
        self._hash = hash(frozenset(rules))

    def __bool__(self) -> bool:
        return bool(self.rules)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModuleRules) and frozenset(self.rules) == frozenset(other.rules)

    def __hash__(self) -> int:
        return self._hash

    def find(self, module: Module) -> Any:
        """The value for a module; None if no rule binds it, nor what it is a copy of."""
        for known in vars(module).get(_IDENTITIES, ()):
            if known in self._values:
                return self._values[known]
        return None

    def are_gone(self) -> bool:
        """Whether every bound module has been freed."""
        return not any(bound.module in _modules for rule in self.rules for bound in rule.bound)

    def lost(self) -> list[BoundRule]:
        """The rules whose model is there, and none of the modules in it that they bind."""
        found = [rule.check() for rule in self.rules if rule.model in _modules]
        return [rule for rule in found if rule.gone == rule.modules]

    def is_another_model(self, module: Module) -> bool:
        """Whether a module has the class of a bound model, not one of torch, and is neither that model nor a copy."""
        if type(module) not in self._classes:
            return False
        return not any(rule.model in vars(module).get(_IDENTITIES, ()) for rule in self.rules)

    def extended(self, model: Module, items: Iterable[tuple[Any, Any]]) -> ModuleRules:
        """These rules and more, bound to modules of a model.

        Raises `TypeError` for what is no key, `ValueError` for a key that binds no module or is set already, for a
        module whose rules disagree, and for one in a scripted module that follows another rule.
        """
        model = unwrapped(model)
        own, modules = identity(model), list(named_paths(model))
        rules = {(rule.key, rule.model): rule for rule in self.rules}
        scripted = _in_scripted(modules)
        out_of_reach: list[tuple[str, ModuleRule, str, Module]] = []
        for given, value in items:
            key = _path_of(given, model, modules) if isinstance(given, Module) else given
            found = _matched(key, modules)
            if not found:
                raise ValueError(_unmatched(key, model, modules))
            bound = tuple(
                Bound(path, identity(module), rank) for module, (path, rank) in found.items() if module not in scripted
            )
            rule = ModuleRule(class_key(key) if isinstance(key, type) else key, value, own, bound)
            if rules.setdefault((rule.key, own), rule) is not rule:
                raise ValueError(
                    f"module {describe(given)} already has a rule in this policy; give it one, or bind to a policy "
                    "without it"
                )
            out_of_reach += [(found[module][0], rule, *scripted[module]) for module in found if module in scripted]
        extended = ModuleRules(tuple(rules.values()))
        for path, rule, around, module in out_of_reach:
            if not rule.bound or extended.find(module) != rule.value:
                where = repr(around) if around else "the model itself"
                raise ValueError(
                    f"key {rule.key!r} of for_modules matches {path!r}, which TorchScript calls: it is part of the "
                    f"scripted module {where}, which rules can only act on as a whole; give {where} the rule"
                )
        for rule in extended.rules:
            for bound in rule.bound:
                request_kwargs(module_of(bound.module))
        return extended

    def check(self) -> tuple[BoundRule, ...]:
        """What each rule binds now."""
        return tuple(rule.check() for rule in self.rules)


class BoundRule(NamedTuple):
    """One rule: the paths of the modules that it binds, and of those among them that are no longer there."""

    key: str                    # as in code
    value: Any                  # a dtype or a Policy
    modules: tuple[str, ...]    # paths at binding; "" is the model itself
    gone: tuple[str, ...]       # freed, or no longer in the model

    def __str__(self) -> str:
        text = f"{self.key}: {self.value!r}: " + ", ".join(path or "the model itself" for path in self.modules)
        return f"{text}; gone: {', '.join(path or 'the model itself' for path in self.gone)}" if self.gone else text


class ModuleCheck(NamedTuple):
    """The result of `Policy.check`; `str()` of it is a line for each rule, and for each linear layer."""

    rules: tuple[BoundRule, ...]
    layers: tuple[str, ...] = ()        # of the model that `check` was given

    @property
    def gone(self) -> tuple[BoundRule, ...]:
        """The rules with modules that are no longer there: copied, replaced or freed since they were bound."""
        return tuple(rule for rule in self.rules if rule.gone)

    def __str__(self) -> str:
        return "\n".join(map(str, (*self.rules, *self.layers))) or "this policy has no rules for modules"


def class_key(cls: type) -> str:
    """A module class as a string, which is a key too."""
    return f"{_CLASS}{cls.__module__}:{cls.__qualname__}"


def describe(key: Any) -> str:
    """A key as messages show it."""
    if isinstance(key, Module):
        return f"<{type(key).__name__} at {id(key):#x}>"
    return short(class_key(key) if isinstance(key, type) else key)


def _path_of(given: Module, model: Module, modules: Iterable[tuple[str, Module]]) -> str:
    """The first path of a module that was given as a key."""
    for path, module in modules:
        if module is unwrapped(given):
            if "*" in path:
                raise ValueError(f"the path {path!r} of {describe(given)} reads as a pattern; name it without a '*'")
            return path
    raise ValueError(
        f"{describe(given)} is no module of {type(model).__name__}; give for_modules the model that it is part of"
    )


def _in_scripted(modules: Iterable[tuple[str, Module]]) -> dict[Module, tuple[str, Module]]:
    """What scripted modules call, which runs no hooks, with the path and the outermost scripted module around it."""
    found = dict[Module, tuple[str, Module]]()
    for path, module in modules:
        if is_scripted(module) and has_forward(module):
            for inner in module.modules():
                if inner is not module:
                    found.setdefault(inner, (path, module))
    return found


def _matched(key: Any, modules: Iterable[tuple[str, Module]]) -> dict[Module, tuple[str, int]]:
    """Each module that a key matches, with the path at which the key is nearest to it, and its rank.

    In place of a container, which is never called, its modules: their own rules are nearer to them than this one.
    """
    found = dict[Module, tuple[str, int]]()
    ranks = dict[str, int]()        # of what containers hold, by the containers' paths
    for path, module in modules:
        rank = _rank(key, path, module)
        if rank is None:
            rank = ranks.get(path.rpartition(".")[0])
        if rank is not None and is_container(module):
            ranks[path] = rank + _IN_CONTAINER
        elif rank is not None and (module not in found or rank < found[module][1]):
            found[module] = path, rank
    return found


def _rank(key: Any, path: str, module: Module) -> int | None:
    """How near a key is to a module: a path 0, a pattern with stars 1, classes by their distance; None if it is not.

    A rule keeps it: the class of a module may change, as that of `nn.LazyLinear` does at its first call.
    """
    if isinstance(key, str) and not key.startswith(_CLASS):
        is_match = matches(key, path) if "*" in key else key == path
        return int("*" in key) if is_match else None
    if not isinstance(key, str) and not (isinstance(key, type) and issubclass(key, Module)):
        raise TypeError(f"a key of for_modules is a path pattern, a module class or a module, got {short(key)}")
    if was_named(module, re.split("[:.]", key)[-1] if isinstance(key, str) else key.__name__):
        return 2
    return next((2 + n for n, cls in enumerate(classes_of(module)) if key in (cls, class_key(cls))), None)


def _unmatched(key: Any, model: Module, modules: Iterable[tuple[str, Module]]) -> str:
    name = type(model).__name__
    if isinstance(key, type) or key.startswith(_CLASS):
        known = ", ".join(dict.fromkeys(type(module).__name__ for _, module in modules))
        return f"no module of {name} is a {describe(key)}; its modules are {known}"
    paths = [path for path, _ in modules if path]
    owner, _, last = key.rpartition(".")
    if any(path == owner and last in {*module._parameters.keys(), *module._buffers.keys()} for path, module in modules):
        where = repr(owner) if owner else "the model itself"
        return f"{short(key)} is a tensor of {where}, and for_modules has rules for modules: give {where} as the key"
    if any(key == type(module).__name__ for _, module in modules):
        return f"{short(key)} is the name of a class; as a key of for_modules give the class itself, without quotes"
    nearest = difflib.get_close_matches(key[:80], paths, n=3) or paths[:3]
    return (
        f"the pattern {short(key)} of for_modules matches no module of {name}; nearest: "
        f"{', '.join(nearest) or 'none'}. Paths count from the model that for_modules is given"
    )


def matches(pattern: str, path: str) -> bool:
    """Whether a path matches: `*` is a name or part of one, `**` any number of names; no pattern matches "".

    One pass over the pattern: as a regular expression, patterns with many stars would backtrack exponentially.
    """
    if path == "":
        return False
    names = path.split(".")
    *parts, last = pattern.replace("[", "[[]").replace("?", "[?]").split(".")      # a star alone is special here
    used = [0]      # how many names the pattern may have used up so far, in order
    for part in parts:
        if part == "**":
            used = list(range(used[0], len(names)))
        else:
            used = [n + 1 for n in used if n + 1 < len(names) and fnmatchcase(names[n], part)]
        if not used:
            return False
    return last == "**" or (used[-1] == len(names) - 1 and fnmatchcase(names[-1], last))


def _values(rules: Iterable[ModuleRule]) -> Mapping[str, Any]:
    """The value of each bound module's nearest rule, by identity; `ValueError` where two are as near."""
    found: dict[str, list[tuple[int, str, ModuleRule]]] = {}
    for rule in rules:
        for path, module, rank in rule.bound:
            found.setdefault(module, []).append((rank, path, rule))
    nearest: dict[str, Any] = {}
    for module, matching in found.items():      # all of them first: a nearer rule may come after two that disagree
        least = min(rank for rank, _, _ in matching)
        (path, first), *others = [(path, rule) for rank, path, rule in matching if rank == least]
        for _, other in others:
            if other.value != first.value:
                advice = (
                    "make one of them narrower, or give the module itself as a key" if least
                    else "they name one module, which follows one rule: give it one"
                )
                raise ValueError(
                    f"module {path!r} matches two rules that disagree: {first.key!r}: {first.value!r} and "
                    f"{other.key!r}: {other.value!r}; {advice}"
                )
        nearest[module] = first.value
    return nearest


NONE = ModuleRules()
