"""Rules for modules: the modules of a model that a key of `Policy.for_modules` binds, and the rule a module follows.

Keys are resolved when `for_modules` is called. A rule keeps its key as a string, for `Policy.to_dict`, and the identity
of each module that it binds, a string among the module's attributes: wrappers around a bound module change nothing,
copies have the same identity and follow the rule, and a policy keeps no model alive. `policy` checks the values;
`region/module_hooks` enters the regions.
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

_CLASS = "class "  # begins a key that names a module class: "class package.module:Name"
_IN_CONTAINER = 1000  # added to the rank of a container's rule for the modules in it; more than any rank
IDENTITIES = "_ampkit_identities"
_modules: weakref.WeakValueDictionary[str, Module] = weakref.WeakValueDictionary()  # by their own identities
_lock = renewed_lock(__name__, "_lock")


def identity(module: Module) -> str:
    """The identity of a module, made if it has none: random, since pickles take it to other processes.

    A copy gets one of its own, before its original's, and follows its original's rules where it has none itself.
    """
    with _lock:
        known = vars(module).get(IDENTITIES, ())
        if known and _modules.get(known[0]) is module:
            return known[0]
        own = uuid.uuid4().hex
        _modules[own] = module
        vars(module)[IDENTITIES] = (own, *known)
        return own


def module_of(identity: str) -> Module | None:
    """The module that an identity was made for, if it lives."""
    return _modules.get(identity)


class Bound(NamedTuple):
    """A module that a rule binds."""

    path: str  # at binding; "" is the model itself
    module: str  # its identity
    rank: int  # see `_rank`


class ModuleRule(NamedTuple):
    """A key of `for_modules`, its value, the model that it was given for, and the modules that it binds."""

    key: str  # for a module that was given as a key, its path
    value: Any  # a dtype or a Policy
    model: str  # its identity
    bound: tuple[Bound, ...]

    def check(self) -> BoundRule:
        """The paths of the modules that it binds, and of those that are gone."""
        model, gone = module_of(self.model), []
        in_model = None if model is None else set(model.modules())
        for path, known, _ in self.bound:
            module = module_of(known)
            if module is None or (in_model is not None and module not in in_model):
                gone.append(path)
        return BoundRule(repr(self.key), self.value, tuple(bound.path for bound in self.bound), tuple(gone))


class ModuleRules:
    """The rules that `for_modules` has bound: immutable, apart from `ran`; falsy when there are none."""

    __slots__ = ("_classes", "_hash", "_values", "ran", "rules")

    def __init__(self, rules: tuple[ModuleRule, ...] = ()) -> None:
        self.rules = rules
        self.ran = False  # whether a bound module has run in a region
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
        """The value of a module's rule; None if no rule binds the module or its original."""
        for known in vars(module).get(IDENTITIES, ()):
            if known in self._values:
                return self._values[known]
        return None

    def are_gone(self) -> bool:
        """Whether every bound module has been freed."""
        return not any(bound.module in _modules for rule in self.rules for bound in rule.bound)

    def lost(self) -> list[BoundRule]:
        """The rules whose model is alive, but no longer contains any of the modules that they bind."""
        checked = [rule.check() for rule in self.rules if rule.model in _modules]
        return [rule for rule in checked if rule.gone == rule.modules]

    def is_another_model(self, module: Module) -> bool:
        """Whether a module has the class of a bound model, not one of torch's, and is neither the model nor a copy."""
        if type(module) not in self._classes:
            return False
        return not any(rule.model in vars(module).get(IDENTITIES, ()) for rule in self.rules)

    def extended(self, model: Module, items: Iterable[tuple[Any, Any]]) -> ModuleRules:
        """These rules and those of `items`, keys and values, bound to modules of a model.

        Raises `TypeError` for something other than a key, `ValueError` for a key that binds no module or is set
        already, for a module whose rules disagree, and for a module in a scripted one that follows another rule.
        """
        model = unwrapped(model)
        own, modules = identity(model), list(named_paths(model))
        rules = {(rule.key, rule.model): rule for rule in self.rules}
        scripted = _in_scripted(modules)
        out_of_reach: list[tuple[str, ModuleRule, str, Module]] = []
        for user_key, value in items:
            key = _path_of(user_key, model, modules) if isinstance(user_key, Module) else user_key
            matched = _matched(key, modules)
            if not matched:
                raise ValueError(_unmatched(key, model, modules))
            bound = tuple(
                Bound(path, identity(module), rank)
                for module, (path, rank) in matched.items()
                if module not in scripted
            )
            rule = ModuleRule(class_key(key) if isinstance(key, type) else key, value, own, bound)
            if rules.setdefault((rule.key, own), rule) is not rule:
                raise ValueError(
                    f"module {describe(user_key)} already has a rule in this policy; give it one, or bind to a policy "
                    "without it"
                )
            out_of_reach += [
                (path, rule, *scripted[module]) for module, (path, _) in matched.items() if module in scripted
            ]
        extended = ModuleRules(tuple(rules.values()))
        for path, rule, scripted_path, module in out_of_reach:
            if not rule.bound or extended.find(module) != rule.value:
                where = repr(scripted_path) if scripted_path else "the model itself"
                raise ValueError(
                    f"key {rule.key!r} of for_modules matches {path!r}, which TorchScript calls: it is part of the "
                    f"scripted module {where}, which rules can only act on as a whole; give {where} the rule"
                )
        for rule in extended.rules:
            for bound in rule.bound:
                request_kwargs(module_of(bound.module))
        return extended

    def check(self) -> tuple[BoundRule, ...]:
        """For each rule, the modules that it binds and those that are gone."""
        return tuple(rule.check() for rule in self.rules)


class BoundRule(NamedTuple):
    """A rule: the paths of the modules that it binds, and of those among them that are gone."""

    key: str  # as in code
    value: Any  # a dtype or a Policy
    modules: tuple[str, ...]  # paths at binding; "" is the model itself
    gone: tuple[str, ...]  # freed, or no longer in the model

    def __str__(self) -> str:
        text = f"{self.key}: {self.value!r}: " + ", ".join(path or "the model itself" for path in self.modules)
        return f"{text}; gone: {', '.join(path or 'the model itself' for path in self.gone)}" if self.gone else text


class ModuleCheck(NamedTuple):
    """The result of `Policy.check`; `str()` of it is a line for each rule, and for each linear layer."""

    rules: tuple[BoundRule, ...]
    layers: tuple[str, ...] = ()  # of the model that `check` was given

    @property
    def gone(self) -> tuple[BoundRule, ...]:
        """The rules with modules that were freed, or that their model no longer contains."""
        return tuple(rule for rule in self.rules if rule.gone)

    def __str__(self) -> str:
        return "\n".join(map(str, (*self.rules, *self.layers))) or "this policy has no rules for modules"


def class_key(cls: type) -> str:
    """A module class as a string that is a key, too."""
    return f"{_CLASS}{cls.__module__}:{cls.__qualname__}"


def describe(key: Any) -> str:
    """A key as messages show it."""
    if isinstance(key, Module):
        return f"<{type(key).__name__} at {id(key):#x}>"
    return short(class_key(key) if isinstance(key, type) else key)


def _path_of(key: Module, model: Module, modules: Iterable[tuple[str, Module]]) -> str:
    """The first path of a module that was given as a key."""
    path = next((path for path, module in modules if module is unwrapped(key)), None)
    if path is None:
        raise ValueError(
            f"{describe(key)} is not a module of {type(model).__name__}; give for_modules the model that contains it"
        )
    if "*" in path:
        raise ValueError(f"the path {path!r} of {describe(key)} reads as a pattern; name it without a '*'")
    return path


def _in_scripted(modules: Iterable[tuple[str, Module]]) -> dict[Module, tuple[str, Module]]:
    """The modules that scripted ones call, without hooks, each with the outermost scripted module and its path."""
    inside = dict[Module, tuple[str, Module]]()
    for path, module in modules:
        if is_scripted(module) and has_forward(module):
            for inner in module.modules():
                if inner is not module:
                    inside.setdefault(inner, (path, module))
    return inside


def _matched(key: Any, modules: Iterable[tuple[str, Module]]) -> dict[Module, tuple[str, int]]:
    """Each module that a key matches, with the path at which the key is nearest to it, and its rank.

    A container is never called: a key that matches one matches its modules, with a rank behind their own rules.
    """
    matched = dict[Module, tuple[str, int]]()
    ranks = dict[str, int]()  # of the modules in containers, by the containers' paths
    for path, module in modules:
        rank = _rank(key, path, module)
        if rank is None:
            rank = ranks.get(path.rpartition(".")[0])
        if rank is not None and is_container(module):
            ranks[path] = rank + _IN_CONTAINER
        elif rank is not None and (module not in matched or rank < matched[module][1]):
            matched[module] = path, rank
    return matched


def _rank(key: Any, path: str, module: Module) -> int | None:
    """How near a key is to a module: a path 0, a pattern with stars 1, classes by distance; None if it does not match.

    A rule keeps the rank: the class of a module may change, as that of `nn.LazyLinear` does at its first call.
    """
    if isinstance(key, str) and not key.startswith(_CLASS):
        if "*" in key:
            return 1 if matches(key, path) else None
        return 0 if key == path else None
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
    *parts, last = pattern.replace("[", "[[]").replace("?", "[?]").split(".")  # a star alone is special here
    used = [0]  # how many names the pattern may have used up so far, in order
    for part in parts:
        if part == "**":
            used = list(range(used[0], len(names)))
        else:
            used = [n + 1 for n in used if n + 1 < len(names) and fnmatchcase(names[n], part)]
        if not used:
            return False
    return last == "**" or (used[-1] == len(names) - 1 and fnmatchcase(names[-1], last))


def _values(rules: Iterable[ModuleRule]) -> Mapping[str, Any]:
    """The value of each bound module's nearest rule, by identity; `ValueError` where two are equally near."""
    binding: dict[str, list[tuple[int, str, ModuleRule]]] = {}
    for rule in rules:
        for path, module, rank in rule.bound:
            binding.setdefault(module, []).append((rank, path, rule))
    nearest: dict[str, Any] = {}
    for module, matching in binding.items():  # after the first loop: a nearer rule may follow two that disagree
        least = min(rank for rank, _, _ in matching)
        (path, first), *others = [(path, rule) for rank, path, rule in matching if rank == least]
        for _, other in others:
            if other.value != first.value:
                advice = (
                    "make one of them narrower, or give the module itself as a key"
                    if least
                    else "they name one module, which follows one rule: give it one"
                )
                raise ValueError(
                    f"module {path!r} matches two rules that disagree: {first.key!r}: {first.value!r} and "
                    f"{other.key!r}: {other.value!r}; {advice}"
                )
        nearest[module] = first.value
    return nearest


NONE = ModuleRules()
