"""Rules for modules: which modules of a model a key of `Policy.for_modules` binds, and which rule a module follows.

Keys are resolved when a model is given, at once. A rule keeps its key as data, for `Policy.to_dict`, and the identity
of each module that it binds, a string among the module's attributes: wrappers around a bound module change nothing,
copies take the identity along and follow the rule, and a policy keeps no model alive. `policy` checks the values;
`region.module_hooks` enters the regions.
"""

from __future__ import annotations

import difflib
import uuid
import weakref
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch.nn import Module

from ampkit.policy.linear_layers import LinearLayer
from ampkit.policy.module_paths import is_container, named_paths, unwrapped
from ampkit.policy.values import short
from ampkit.torch_internals.forks import renewed_lock
from ampkit.torch_internals.modules import request_kwargs

__all__ = [
    "CLASS", "NONE", "BoundRule", "ModuleCheck", "ModuleRules", "NamedModules", "checked_key", "class_key", "describe",
    "matches", "module_of",
]

CLASS = "class "    # begins a key that names a module class, as written policies do: "class package.module:Name"
_LONGEST = 1000     # characters of a pattern, which is compared with every path of a model
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


def class_key(cls: type) -> str:
    """A module class as a string, which is a key too."""
    return f"{CLASS}{cls.__module__}:{cls.__qualname__}"


class NamedModules:
    """A model's modules by their paths: made once for all rules that are bound to it."""

    def __init__(self, model: Module) -> None:
        self.model = unwrapped(model)
        self.pairs = list(named_paths(self.model))
        self.by_path = dict(self.pairs)
        self.paths = {id(module): path for path, module in reversed(self.pairs)}    # the first of several paths

    def key_of(self, given: Any) -> str | type[Module]:
        """A checked key as rules have it: the first path of a module, the class of a `class_key`, others as they are.

        Raises `ValueError` for a module or a class that the model does not contain.
        """
        if isinstance(given, str) and given.startswith(CLASS) and given not in self.by_path:
            found = {cls for _, module in self.pairs for cls in type(module).__mro__ if class_key(cls) == given}
            if len(found) > 1:
                model = type(self.model).__name__
                raise ValueError(f"the modules of {model} have several classes named {short(given)}")
            if not found:
                raise ValueError(self._no_class(given.removeprefix(CLASS)))
            return found.pop()
        if not isinstance(given, Module):
            return given
        path = self.paths.get(id(unwrapped(given)))
        if path is None:
            raise ValueError(
                f"{describe(given)} is no module of {type(self.model).__name__}; give for_modules the model that it "
                "is part of"
            )
        if "*" in path:
            raise ValueError(f"the path {short(path)} of {describe(given)} reads as a pattern; name it without a '*'")
        return path

    def matching(self, key: str | type[Module]) -> tuple[Bound, ...]:
        """Each module that a key matches, once; `ValueError` with the nearest names if there is none.

        In place of a container, which is never called, its modules: their own rules are nearer to them than this one.
        """
        found = list[tuple[str, Module, int]]()
        ranks = dict[str, int]()    # of what containers hold, by the containers' paths
        for path, module in self.pairs:
            if isinstance(key, type):
                is_match = key in type(module).__mro__
            else:
                is_match = matches(key, path) if "*" in key else key == path
            rank = _rank(key, module) if is_match else ranks.get(path.rpartition(".")[0])
            if rank is None:
                continue
            if is_container(module):
                ranks[path] = rank + _IN_CONTAINER
            else:
                found.append((path, module, rank))
        if not found:
            raise ValueError(self._unmatched(key))
        once = {id(module): Bound(path, identity(module), rank) for path, module, rank in reversed(found)}
        return tuple(reversed(once.values()))

    def _unmatched(self, key: str | type[Module]) -> str:
        model = type(self.model).__name__
        if isinstance(key, type):
            return self._no_class(describe(key))
        paths = [path for path, _ in self.pairs if path]
        nearest = difflib.get_close_matches(key[:80], paths, n=3) or paths[:3]
        return (
            f"the pattern {short(key)} of for_modules matches no module of {model}; nearest: "
            f"{', '.join(nearest) or 'none'}. Paths count from the model that for_modules is given"
        )

    def _no_class(self, name: str) -> str:
        known = ", ".join(dict.fromkeys(type(module).__name__ for _, module in self.pairs))
        return f"no module of {type(self.model).__name__} is a {short(str(name))}; its modules are {known}"


class Bound(NamedTuple):
    """A module that a rule binds."""

    path: str           # at binding; "" is the model itself
    module: str         # its identity
    rank: int           # see `_rank`


class ModuleRule(NamedTuple):
    """A key of `for_modules`, its value, the model that it was given for, and the modules that it binds."""

    key: str | type[Module]                     # the path of a module that was given as a key
    value: Any                                  # a dtype or a Policy
    model: str                                  # its identity
    bound: tuple[Bound, ...]

    def key_text(self) -> str:
        """The key in code and messages."""
        return describe(self.key) if isinstance(self.key, type) else repr(self.key)


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
        found = [_checked(rule) for rule in self.rules if rule.model in _modules]
        return [rule for rule in found if rule.gone == rule.modules]

    def is_another_model(self, module: Module) -> bool:
        """Whether a module has the class of a bound model, not one of torch, and is neither that model nor a copy."""
        if type(module) not in self._classes:
            return False
        return not any(rule.model in vars(module).get(_IDENTITIES, ()) for rule in self.rules)

    def extended(self, modules: NamedModules, items: Iterable[tuple[Any, Any]]) -> ModuleRules:
        """These rules and more, bound to modules of a model.

        Raises `ValueError` for a key that binds no module or is set already, and for a module whose rules disagree.
        """
        model = identity(modules.model)
        known = {(rule.key, rule.model) for rule in self.rules}
        rules = list(self.rules)
        for given, value in items:
            key = modules.key_of(given)
            if (key, model) in known:
                raise ValueError(f"module {describe(given)} already has a rule in this policy")
            known.add((key, model))
            rules.append(ModuleRule(key, value, model, modules.matching(key)))
        extended = ModuleRules(tuple(rules))
        for rule in extended.rules:
            for bound in rule.bound:
                request_kwargs(module_of(bound.module))
        return extended

    def check(self) -> tuple[BoundRule, ...]:
        """What each rule binds now."""
        return tuple(map(_checked, self.rules))

    def describe(self) -> str:
        """As in code, for `repr`; a model is shown with its address."""
        text, by_model = "", dict[str, list[ModuleRule]]()
        for rule in self.rules:
            by_model.setdefault(rule.model, []).append(rule)
        for model, rules in by_model.items():
            shown = ", ".join(f"{rule.key_text()}: {rule.value!r}" for rule in rules)
            text += f".for_modules({_shown(module_of(model))}, {{{shown}}})"
        return text


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
    layers: tuple[LinearLayer, ...] = ()        # of the model that `check` was given

    @property
    def gone(self) -> tuple[BoundRule, ...]:
        """The rules with modules that are no longer there: copied, replaced or freed since they were bound."""
        return tuple(rule for rule in self.rules if rule.gone)

    def __str__(self) -> str:
        return "\n".join(map(str, (*self.rules, *self.layers))) or "this policy has no rules for modules"


def checked_key(key: Any) -> Any:
    """A path pattern ("" is the model itself), a module class or a module; `TypeError` or `ValueError` for others."""
    if isinstance(key, Module) or (isinstance(key, type) and issubclass(key, Module)):
        return key
    if not isinstance(key, str):
        raise TypeError(f"a key of for_modules is a path pattern, a module class or a module, got {short(key)}")
    if len(key) > _LONGEST or (key and "" in key.split(".")):
        raise ValueError(
            f"{short(key)} is no module path pattern; expected names and '*' joined by dots, like 'blocks.*.attn', of "
            f"{_LONGEST} characters at most"
        )
    return key


def describe(key: Any) -> str:
    """A key as messages show it."""
    if isinstance(key, type):
        return f"{key.__module__}.{key.__qualname__}"
    return _shown(key) if isinstance(key, Module) else short(key)


def _shown(module: Module | None) -> str:
    return "<a module that is gone>" if module is None else f"<{type(module).__name__} at {id(module):#x}>"


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


def _rank(key: str | type[Module], module: Module) -> int:
    """How near a key is to a module that it matches: a path 0, a pattern with stars 1, classes by their distance.

    A rule keeps it: the class of a module may change, as that of `nn.LazyLinear` does at its first call.
    """
    if isinstance(key, type):
        return 2 + type(module).__mro__.index(key)
    return int("*" in key)


def _values(rules: Iterable[ModuleRule]) -> Mapping[str, Any]:
    """The value of each bound module's nearest rule, by identity; `ValueError` where two are as near."""
    nearest: dict[str, tuple[int, ModuleRule]] = {}
    for rule in rules:
        for path, module, rank in rule.bound:
            other = nearest.get(module)
            if other is None or rank < other[0]:
                nearest[module] = rank, rule
            elif rank == other[0] and rule.value != other[1].value:
                raise ValueError(
                    f"module {path!r} matches two rules that disagree: {other[1].key_text()}: {other[1].value!r} and "
                    f"{rule.key_text()}: {rule.value!r}; make one of them narrower, or give the module itself as a key"
                )
    return {module: rule.value for module, (_, rule) in nearest.items()}


def _checked(rule: ModuleRule) -> BoundRule:
    model = module_of(rule.model)
    there = None if model is None else {id(module) for module in model.modules()}
    gone = []
    for path, known, _ in rule.bound:
        module = module_of(known)
        if module is None or (there is not None and id(module) not in there):
            gone.append(path)
    return BoundRule(rule.key_text(), rule.value, tuple(bound.path for bound in rule.bound), tuple(gone))


NONE = ModuleRules()
