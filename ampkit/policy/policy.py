"""Policy: which rule every operator follows in a region, why, and how to change it.

A policy is a stack of layers, later over earlier: torch.amp's list for the device, what ampkit adds to it,
what `register_op` declared for the process, and each `with_rules`; and rules for modules of a model. It is immutable:
`with_rules` and `for_modules` return another one. Policies compare and hash by value; `to_dict` gives plain data.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn import Module

from ampkit.dtypes import PRECISIONS, as_dtype, short
from ampkit.policy import module_rules
from ampkit.policy.kept_modules import kept_modules
from ampkit.policy.linear_layers import linear_layers
from ampkit.policy.op_table import DEFAULT_EXTRA, TORCH, Rule, fold
from ampkit.policy.operator_keys import Operator, candidates, checked_rule, key_name, overloads
from ampkit.torch_internals.dynamo import called_while_tracing, tracing
from ampkit.torch_internals.operators import (
    OpOverload,
    current_device_type,
    is_composite,
    listed_as,
    privateuse1_name,
)

__all__ = ["Explanation", "Policy", "Rule", "register_op"]

_WHY_COMPOSITE = "unlisted; the operators that it decomposes into follow their own rules"
_WHY_UNLISTED = "unlisted; it runs in the dtype of its inputs"

_Layer = Mapping[OpOverload, tuple[Rule, str]]      # the rule of each operator, and why


class Explanation(NamedTuple):
    """The rule of one operator, and where it comes from; `str()` of it is one line."""

    op: str
    rule: Rule
    layer: str      # "torch", "default", "register_op", "with_rules[0]", ... or "unlisted"
    why: str

    def __str__(self) -> str:
        return f"{self.op}: {self.rule.name} (set by {self.layer}): {self.why}"


class RuleTable(dict[OpOverload, Rule]):
    """Every operator with a rule of its own. A subclass, since a plain dict cannot be weakly referenced."""

    handlers: Any = None    # what regions run for these rules; see `engine.generated_handlers`

    def __missing__(self, key: Any) -> Rule:
        what = f"{key.name()!r} has no rule of its own" if isinstance(key, OpOverload) else f"{short(key)} is no key"
        raise KeyError(f"{what}; keys are overloads such as torch.ops.aten.mm.default. policy.rule_for takes any name")


class _Registered:
    """Rules that `register_op` declared for this process, and the number of changes."""

    rules: dict[OpOverload, Rule] = {}
    changes = 0


@dataclasses.dataclass(init=False, repr=False, frozen=True)
class Policy:
    """The rules of a region for one device type: pass it as `autocast(policy=...)`.

    `Policy.default(device_type)` is what a region uses when it is given none; `Policy.torch(device_type)` is
    exactly torch.amp's list.

    >>> policy = Policy.default("cpu").with_rules({"aten::softmax.int": Rule.KEEP})
    >>> print(policy.explain("aten::softmax.int"))
    aten::softmax.int: KEEP (set by with_rules[0]): set by the user
    >>> policy == Policy.from_dict(policy.to_dict())
    True
    """

    base: str               # the lists it starts from: "default" or "torch"
    device_type: str
    overrides: tuple[tuple[tuple[OpOverload, Rule], ...], ...]      # of each `with_rules`, in order, by operator
    modules: module_rules.ModuleRules
    text: str = dataclasses.field(init=False, compare=False)        # all but `modules`, as JSON that `from_dict` reads

    def __init__(       # Dynamo traces it where compiled code makes a policy; the one of dataclasses it cannot
        self,
        base: str,
        device_type: str,
        overrides: tuple[tuple[tuple[OpOverload, Rule], ...], ...] = (),
        modules: module_rules.ModuleRules | None = None,
    ) -> None:
        if not isinstance(base, str) or base not in ("default", "torch"):
            raise ValueError(f"unknown policy base {short(base)}; expected 'default' or 'torch'")
        if device_type == "privateuseone":
            device_type = _privateuse1_name()
        elif not isinstance(device_type, str) or (device_type not in TORCH and device_type != _privateuse1_name()):
            raise ValueError(
                f"no operator lists for device type {short(device_type)}; expected one of {', '.join(map(repr, TORCH))}"
            )
        for name, value in (
            ("base", base), ("device_type", device_type), ("overrides", overrides),
            ("modules", module_rules.NONE if modules is None else modules),
            ("text", _text(base, device_type, overrides)),
        ):
            object.__setattr__(self, name, value)

    @classmethod
    def default(cls, device_type: str) -> Policy:
        """ampkit's own rules: torch.amp's list, with float32 softmax, norms and losses on every device.

        Raises:
            ValueError: a device type that autocast does not know.
        """
        return cls("default", device_type)

    @classmethod
    def torch(cls, device_type: str) -> Policy:
        """Exactly torch.amp's list for `device_type`: losses and gradients equal torch.amp's to the bit.

        Raises:
            ValueError: a device type that autocast does not know.
        """
        return cls("torch", device_type)

    def with_rules(self, rules: Mapping[Operator, Rule | str]) -> Policy:
        """A policy in which the given operators follow other rules.

        A key is an overload (`torch.ops.aten.softmax.int`), a packet (`torch.ops.aten.softmax`: all its overloads
        but the `out=` ones), a name (`"aten::softmax.int"`, `"aten::softmax"`), or a function of torch that ATen has
        under the same name (`torch.softmax`, `functional.gelu`); a value is a `Rule` or its name.

        Raises:
            ValueError: an unknown operator or rule, an operator named twice, or a rule that it cannot follow.
            TypeError: a key that names no operator, or a value that is no rule.
        """
        return dataclasses.replace(self, overrides=(*self.overrides, _checked_layer(rules)))

    def for_modules(self, model: Module, rules: Mapping[Any, Any]) -> Policy:
        """A policy that computes some modules of `model` in another precision, wherever they are called.

        A key is a path pattern relative to `model` (`"blocks.*.attn"`; `*` stands for one name or part of one, `**` for
        any number of names), a module class (`nn.LayerNorm`), or a module itself. A value is a precision or another
        `Policy` for the same device type. Precisions: `torch.float32` or its name casts the module's 16-bit inputs to
        float32 and turns autocast off inside; bfloat16 and float16 are regions of that dtype.

        Keys are resolved now: wrappers put around modules later change nothing, copies of modules follow the rules of
        their originals, and what replaces modules has to come first. No module is kept alive. A module or its path
        beats a pattern with stars, that beats a class, a nearer base class beats a farther one; of modules inside each
        other the innermost with a rule wins, inside one with a policy too.

        Raises:
            ValueError: a key that matches no module or is set already, an unknown name of a dtype, a policy with rules
                for modules, or two patterns that disagree about a module.
            TypeError: something that is no key, or no precision or policy.

        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        >>> policy = Policy.default("cpu").for_modules(model, {"1": torch.float32})
        >>> print(policy.check())
        '1': torch.float32: 1
        """
        if tracing():
            raise RuntimeError("for_modules was called in the function that is compiled; call it outside")
        if not isinstance(model, Module) or not isinstance(rules, Mapping):
            raise TypeError(
                "for_modules takes a model and a dict of its modules to precisions or policies, as in "
                f"for_modules(model, {{'head': torch.float32}}); got {type(model).__name__} and {type(rules).__name__}"
            )
        items = [(key, self._precision(key, value)) for key, value in rules.items()]
        return dataclasses.replace(self, modules=self.modules.extended(model, items))

    def keep_in_fp32(self, model: Module, dtype: torch.dtype | str) -> Policy:
        """A policy that also keeps in float32 what a model of transformers wants kept there, in regions of `dtype`.

        `_keep_in_fp32_modules` of the model, or of models in it, counts in float16, `_keep_in_fp32_modules_strict` in
        bfloat16 too. As in transformers these are regular expressions, looked for in the names of parameters, which are
        those without PEFT; a module becomes float32 if they match every parameter and buffer in it, this policy has no
        rule for it, and its weights are not of 16 bits. `print(policy.check())` shows them; a model that wants nothing
        gets this policy back.

        Raises:
            ValueError: an unknown dtype, or a model whose patterns are no regular expressions.
            TypeError: something that is no model.
        """
        if not isinstance(model, Module):
            raise TypeError(f"keep_in_fp32 takes a model; got {type(model).__name__}")
        found = as_dtype(dtype)
        if not isinstance(found, torch.dtype) or found not in PRECISIONS.values():
            raise ValueError(f"dtype is {short(dtype)}; expected that of the region, torch.float16 or torch.bfloat16")
        modules = kept_modules(model, found, self.modules)
        return self.for_modules(model, dict.fromkeys(modules, torch.float32)) if modules else self

    def check(self, model: Module | None = None) -> module_rules.ModuleCheck:
        """Which modules each rule of `for_modules` binds, by their paths, and which of them are gone.

        `str()` of it is a line for each rule; `.gone` holds the rules with modules that were freed, or that their model
        no longer contains. Such a module has to be bound again: `for_modules` after whatever replaced it.

        With a model, `.layers` has a line for each of its linear layers: the rule that it follows under this policy,
        and why one with an FP8 rule does not run in FP8. Nothing is run.

        Raises:
            TypeError: something that is no model.
        """
        if model is not None and not isinstance(model, Module):
            raise TypeError(f"check takes a model, to list its linear layers, or nothing; got {short(model)}")
        layers = () if model is None else tuple(linear_layers(self, model))
        return module_rules.ModuleCheck(self.modules.check(), layers)

    def _precision(self, key: Any, value: Any) -> torch.dtype | Policy:
        """The checked value of a rule of `for_modules`; `ValueError` naming the key if a module cannot follow it."""
        if isinstance(value, Policy):
            if value.device_type != self.device_type:
                raise ValueError(
                    f"the policy for module {module_rules.describe(key)} is for {value.device_type!r}, "
                    f"not {self.device_type!r}"
                )
            if value.modules:
                raise ValueError(
                    f"the policy for module {module_rules.describe(key)} has rules for modules itself; give those to "
                    "the policy around it, where they hold inside that module too"
                )
            return value
        dtype = as_dtype(value)
        if not isinstance(dtype, torch.dtype) or dtype not in PRECISIONS.values():
            raise ValueError(
                f"{short(value)} is no precision for module {module_rules.describe(key)}; expected torch.float32, "
                f"torch.bfloat16, torch.float16, a name among {', '.join(PRECISIONS)}, or a Policy"
                f"{_rules_in_a_policy(value, self.device_type)}"
            )
        return dtype

    def inside(self, value: Policy) -> Policy:
        """The policy of a module whose rule is a policy: the operators' rules of that one, and these for modules."""
        return _inside(self, value)

    def rule_for(self, op: Operator) -> Rule:
        """The rule `op` follows, as `explain` gives it."""
        return self.explain(op).rule

    def explain(self, op: Operator) -> Explanation:
        """The rule `op` follows, which layer of the policy set it, and why. `str()` of it is one line.

        `op` is a key as in `with_rules`. An unlisted composite follows DECOMPOSE, any other unlisted operator KEEP.

        Raises:
            ValueError: an unknown operator, or one whose overloads follow different rules.

        >>> print(Policy.torch("cpu").explain(torch.nn.functional.linear))
        aten::linear: LOWER (set by torch): matrix units multiply in half precision and accumulate in float32
        """
        answers = [self._explain(one) for one in candidates(op)]
        if len({answer.rule for answer in answers}) > 1:
            said = ", ".join(f"{answer.op} {answer.rule.name}" for answer in answers)
            raise ValueError(f"overloads of {op!s} follow different rules: {said}; ask about one of them")
        return answers[0]

    def _explain(self, found: OpOverload) -> Explanation:
        for name, layer in reversed(self._layers()):
            if found in layer:
                rule, why = layer[found]
                return Explanation(found.name(), rule, name, why)
        if is_composite(found):
            return Explanation(found.name(), Rule.DECOMPOSE, "unlisted", _WHY_COMPOSITE)
        return Explanation(found.name(), Rule.KEEP, "unlisted", _WHY_UNLISTED)

    def rules(self) -> RuleTable:
        """Every operator with a rule of its own, after all layers. Operators that are absent run as they are."""
        return _fold_layers(self, _Registered.changes)

    def to_dict(self) -> dict[str, Any]:
        """The policy as plain dicts, lists and strings, for JSON or a checkpoint; `from_dict` reads it back.

        A module that was given as a key is written by its path.

        Raises:
            ValueError: rules of several models, which one call of `from_dict` cannot bind.
        """
        if len({rule.model for rule in self.modules.rules}) > 1:
            raise ValueError(
                "this policy has rules for modules of several models, and from_dict binds to one; write one policy for "
                "each of them"
            )
        return {
            "base": self.base,
            "device_type": self.device_type,
            "rules": list(map(_as_strings, self.overrides)),
            "modules": [
                [rule.key, value.to_dict() if isinstance(value := rule.value, Policy) else str(value)[len("torch.") :]]
                for rule in self.modules.rules
            ],
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any], model: Module | None = None) -> Policy:
        """The policy that `to_dict` wrote, its module rules bound to `model`; all keys but "base" may be left out.

        Without "device_type" the policy is for the current accelerator, else the CPU. Untrusted data is safe: reading
        it imports nothing and runs no code; module classes are looked up among those of the model.

        Raises:
            TypeError, ValueError: what `to_dict` does not write, module rules without a model, or rules that match none
                of its modules.

        >>> Policy.from_dict({"base": "torch", "device_type": "cpu", "rules": [{"aten::mm": "keep"}]})
        Policy.torch('cpu').with_rules({'aten::mm.default': Rule.KEEP, 'aten::mm.dtype': Rule.KEEP})
        """
        if model is not None and not isinstance(model, Module):
            raise TypeError(f"from_dict binds module rules to a module; got {type(model).__name__}")
        layers, modules = _parts(state)
        kind = state["device_type"] if "device_type" in state else current_device_type()
        policy = cls(state["base"], kind, tuple(map(_checked_layer, layers)))
        if not modules:
            return policy
        if model is None:
            raise ValueError(
                f"this policy has rules for modules, {short(modules[0][0])} among them; give the model that they are "
                "for, Policy.from_dict(state, model). The policy of a module has none"
            )
        items = [
            (key, policy._precision(key, cls.from_dict(value) if isinstance(value, Mapping) else value))
            for key, value in modules
        ]
        return dataclasses.replace(policy, modules=policy.modules.extended(model, items))

    def _layers(self) -> tuple[tuple[str, _Layer], ...]:
        own: list[tuple[str, Iterable[tuple[OpOverload, Rule]]]] = [("register_op", _Registered.rules.items())]
        own += [(f"with_rules[{i}]", layer) for i, layer in enumerate(self.overrides)]
        return (
            *_base_layers(self.base, self.device_type),
            *((name, {op: (rule, "set by the user") for op, rule in layer}) for name, layer in own),
        )

    def __hash__(self) -> int:      # no `cached_property`: its lock, in Python 3.11, may be inherited locked by a fork
        value: int | None = self.__dict__.get("_hash")
        if value is None:
            value = hash((self.base, self.device_type, self.overrides, self.modules))
            object.__setattr__(self, "_hash", value)
        return value

    def __copy__(self) -> Policy:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Policy:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self.modules:
            raise ValueError(
                "a policy with module rules is bound to its model and cannot be pickled; save policy.to_dict(), and "
                "bind again with Policy.from_dict(state, model)"
            )
        return Policy.from_dict, (self.to_dict(),)

    def __repr__(self) -> str:
        text = f"Policy.{self.base}({self.device_type!r})"
        for layer in self.overrides:
            text += ".with_rules({" + ", ".join(f"{key_name(op)!r}: {rule}" for op, rule in layer) + "})"
        rules = ", ".join(f"{rule.key!r}: {rule.value!r}" for rule in self.modules.rules)
        return text + (f".for_modules(model, {{{rules}}})" if rules else "")


def register_op(op: Operator | Any, rule: Rule | str) -> None:
    """Give an operator of your own, or of another library, a rule in every policy of this process.

    `op` is an overload, a packet, a name such as `"mylib::attention"`, or what `torch.library.custom_op` returned.
    `Policy.with_rules` still overrides it. An operator with a dtype from `torch.library.register_autocast` needs no
    call: regions respect it.

    Raises:
        TypeError, ValueError: an unknown operator or rule.
    """
    value = checked_rule(rule, op)
    for found in overloads(getattr(op, "_opoverload", op), value):
        _Registered.rules[found] = value
    _Registered.changes += 1


def registered() -> Mapping[OpOverload, Rule]:
    """The rules that `register_op` declared for this process."""
    return _Registered.rules


def register_changes() -> int:
    """How many times `register_op` has changed the rules of this process."""
    return _Registered.changes


def _rules_in_a_policy(value: Any, device_type: str) -> str:
    """What to write in place of a rule for operators, or of FP8, as a module's precision."""
    name = value.name if isinstance(value, Rule) else value
    is_float8 = isinstance(name, str) and name.lower().startswith(("fp8", "float8"))
    if isinstance(value, torch.dtype):
        is_float8 = value.is_floating_point and value.itemsize == 1
    if not (is_float8 or isinstance(value, Rule)):
        return ""
    rule = value if isinstance(value, Rule) else Rule.FLOAT8_ROWWISE
    return (
        f". A rule{' of FP8' if is_float8 else ''} is for operators, which a Policy lists: "
        f"Policy.default({device_type!r}).with_rules({{'aten::linear': {rule}}})"
    )


def _parts(state: Any) -> tuple[Any, Any]:
    """The layers and the module rules of a policy that `to_dict` wrote; `TypeError` or `ValueError` for another form.

    Operators, modules and values in them are checked where a policy is made of them.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"a written policy is a dict, as to_dict gives it; got {short(state)}")
    unknown = sorted(set(state) - {"base", "device_type", "rules", "modules"}, key=repr)
    if "base" not in state or unknown:
        missing = "" if "base" in state else "'base' is missing; "
        raise ValueError(
            f"not a policy: {missing}{f'unknown keys {short(unknown)}; ' if unknown else ''}expected 'base' and, with "
            "defaults, 'device_type', 'rules' and 'modules'"
        )
    layers, modules = state.get("rules", ()), state.get("modules", ())
    for key, value in (("rules", layers), ("modules", modules)):
        if not isinstance(value, (list, tuple)):
            raise TypeError(f"{key!r} of a written policy is a list, got {short(value)}")
    for item in modules:
        if not isinstance(item, (list, tuple)) or len(item) != 2:
            raise TypeError(f"a module rule of a written policy is a list of a module and its rule, got {short(item)}")
    return layers, modules


def _as_strings(layer: Iterable[tuple[OpOverload, Rule]]) -> dict[str, str]:
    return {key_name(op): rule.value for op, rule in layer}


def _text(base: str, device_type: str, overrides: Iterable[Any]) -> str:
    """The operator rules as JSON that `from_dict` reads, for graphs, which hold constants alone."""
    if overrides:
        return json.dumps({"base": base, "device_type": device_type, "rules": list(map(_as_strings, overrides))})
    return '{"base": "' + base + '", "device_type": "' + device_type + '"}'     # Dynamo traces no JSON


def _checked_layer(rules: Any) -> tuple[tuple[OpOverload, Rule], ...]:
    """The layer that `with_rules` adds: every operator that its keys mean, in order of its name."""
    if not isinstance(rules, Mapping):
        raise TypeError(f"with_rules takes a dict of operator to Rule, got {type(rules).__name__}")
    layer: dict[OpOverload, Rule] = {}
    for key, value in rules.items():
        rule = checked_rule(value, key)
        for op in overloads(key, rule):
            if op in layer:
                raise ValueError(f"operator '{op.name()}' is named twice, as {layer[op].name} and as {rule.name}")
            layer[op] = rule
    return tuple(sorted(layer.items(), key=lambda item: item[0].name()))


@functools.lru_cache(maxsize=64)
def _inside(policy: Policy, value: Policy) -> Policy:
    return Policy(value.base, value.device_type, value.overrides, policy.modules)


@functools.lru_cache(maxsize=64)
def _fold_layers(policy: Policy, changes: int) -> RuleTable:
    """The table of a policy after so many `register_op` calls; equal policies share one."""
    return RuleTable({op: rule for _, layer in policy._layers() for op, (rule, _) in layer.items()})


@functools.cache
def _base_layers(base: str, device_type: str) -> tuple[tuple[str, _Layer], ...]:
    """torch.amp's layer for a device and, under the default base, ampkit's on top; folded once."""
    listed = listed_as(device_type)
    torchs = "torch", fold(TORCH[listed])
    return (torchs,) if base == "torch" else (torchs, ("default", fold(DEFAULT_EXTRA[listed])))


@called_while_tracing
def _privateuse1_name() -> str:
    return privateuse1_name()
