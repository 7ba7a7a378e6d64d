"""`Policy`: which rule every operator follows in a region, why, and how to change it.

A policy is a stack of layers, later over earlier: torch.amp's list for the device, ampkit's additions to it, the rules
that `register_op` declared for the process, and each `with_rules`; and rules for modules of a model. It is immutable:
`with_rules` and `for_modules` return another policy. Policies compare and hash by value; `to_dict` gives plain data.
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

_Layer = Mapping[OpOverload, tuple[Rule, str]]  # the rule of each operator, and the reason


class Explanation(NamedTuple):
    """The rule of one operator, and the layer that set it; its `str()` is one line."""

    op: str
    rule: Rule
    layer: str  # "torch", "default", "register_op", "with_rules[0]", ... or "unlisted"
    why: str

    def __str__(self) -> str:
        return f"{self.op}: {self.rule.name} (set by {self.layer}): {self.why}"


class RuleTable(dict[OpOverload, Rule]):
    """Every operator with a rule of its own. A subclass, since a plain dict cannot be weakly referenced."""

    handlers: Any = None  # the functions that regions run for these rules: `engine.generated_handlers`

    def __missing__(self, key: Any) -> Rule:
        is_operator = isinstance(key, OpOverload)
        fault = f"{key.name()!r} has no rule of its own" if is_operator else f"{short(key)} is not a key"
        raise KeyError(f"{fault}; keys are overloads such as torch.ops.aten.mm.default. policy.rule_for takes any name")


class _Registered:
    """The rules that `register_op` declared for this process, and how many calls of it there were."""

    rules: dict[OpOverload, Rule] = {}
    changes = 0


@dataclasses.dataclass(init=False, repr=False, frozen=True)
class Policy:
    """The rules of a region for one device type: pass it as `autocast(policy=...)`.

    `Policy.default(device_type)` is the policy of a region that is given none; `Policy.torch(device_type)` is exactly
    torch.amp's list. Policies never synchronize with the device.

    Args:
        base: The lists to start from: "default" or "torch".
        device_type: The device type of the regions, such as "cuda".
        overrides: For each `with_rules`, in order, pairs of an operator and its rule.
        modules: The rules that `for_modules` has bound; None means no such rules.

    Raises:
        ValueError: An unknown base or device type.

    >>> policy = Policy.default("cpu").with_rules({"aten::softmax.int": Rule.KEEP})
    >>> print(policy.explain("aten::softmax.int"))
    aten::softmax.int: KEEP (set by with_rules[0]): set by the user
    >>> policy == Policy.from_dict(policy.to_dict())
    True
    """

    base: str
    device_type: str
    overrides: tuple[tuple[tuple[OpOverload, Rule], ...], ...]
    modules: module_rules.ModuleRules
    text: str = dataclasses.field(init=False, compare=False)  # all but `modules`, as JSON that `from_dict` reads

    def __init__(  # Dynamo traces it where compiled code makes a policy; it cannot trace the one of dataclasses
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
            ("base", base),
            ("device_type", device_type),
            ("overrides", overrides),
            ("modules", module_rules.NONE if modules is None else modules),
            ("text", _text(base, device_type, overrides)),
        ):
            object.__setattr__(self, name, value)

    @classmethod
    def default(cls, device_type: str) -> Policy:
        """Make a policy of ampkit's rules: torch.amp's list, with float32 softmax, norms and losses on every device.

        Args:
            device_type: The device type of the regions: "cpu", "cuda", "mps", "xpu" or another that autocast knows.

        Returns:
            The policy that a region has if it is given none.

        Raises:
            ValueError: A device type that autocast does not know.
        """
        return cls("default", device_type)

    @classmethod
    def torch(cls, device_type: str) -> Policy:
        """Make a policy of exactly torch.amp's list: losses and gradients equal torch.amp's to the bit.

        Args:
            device_type: The device type of the regions, as for `default`.

        Returns:
            The policy, from torch's ATen/autocast_mode.h for the running version.

        Raises:
            ValueError: A device type that autocast does not know.
        """
        return cls("torch", device_type)

    def with_rules(self, rules: Mapping[Operator, Rule | str]) -> Policy:
        """Give operators other rules.

        Args:
            rules: A dict of operators to rules. A key is an overload (`torch.ops.aten.softmax.int`), a packet
                (`torch.ops.aten.softmax`: all its overloads but the `out=` ones), a name (`"aten::softmax.int"`,
                `"aten::softmax"`), a function of torch that ATen has under the same name (`torch.softmax`,
                `functional.gelu`), or the result of `torch.library.custom_op`. A value is a `Rule` or its name.

        Returns:
            This policy with one more layer on top.

        Raises:
            ValueError: An unknown operator or rule, an operator named twice, or a rule that it cannot follow.
            TypeError: A key that names no operator, or a value that is not a rule.
        """
        return dataclasses.replace(self, overrides=(*self.overrides, _checked_layer(rules)))

    def for_modules(self, model: Module, rules: Mapping[Any, Any]) -> Policy:
        """Compute some modules of a model in another precision, wherever they are called.

        Keys are resolved now: wrappers put around modules later change nothing, and copies of modules follow the rules
        of their originals; replace modules before this call. No module is kept alive. A module or its path
        takes precedence over a pattern with stars, a pattern over a class, and a nearer base class over a farther one.
        Of nested modules with rules the innermost one's rule applies, also inside a module with a policy.

        Args:
            model: The model that the keys refer to.
            rules: A dict of modules to precisions. A key is a path pattern relative to `model` (`"blocks.*.attn"`; `*`
                stands for one name or part of one, `**` for any number of names), a module class (`nn.LayerNorm`), or
                a module itself. A value is a dtype, its name, or another `Policy` for the same device type.
                `torch.float32` casts the module's 16-bit inputs to float32 and disables autocast inside; bfloat16 and
                float16 are regions of that dtype.

        Returns:
            This policy with the rules bound to the modules.

        Raises:
            ValueError: A key that matches no module or is set already, an unknown name of a dtype, a policy with rules
                for modules, or two patterns that disagree about a module.
            TypeError: Something other than a key, a precision or a policy.
            RuntimeError: A call inside a function that is being compiled.

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
        """Keep in float32 the modules that a model of transformers asks for, in regions of `dtype`.

        `_keep_in_fp32_modules` of the model, or of models in it, applies in float16, `_keep_in_fp32_modules_strict` in
        bfloat16 too. As in transformers these are regular expressions, searched for in the names of parameters (without
        PEFT's parts). A module becomes float32 if they match every parameter and buffer in it, this policy has no rule
        for it, and its weights are not of 16 bits. `print(policy.check())` shows these modules.

        Args:
            model: The model, whose modules may have these attributes.
            dtype: The dtype of the regions: float16 or bfloat16, or its name.

        Returns:
            A policy with rules for these modules; this policy itself if there are none.

        Raises:
            ValueError: An unknown dtype, or patterns that are not regular expressions.
            TypeError: Something other than a model.
        """
        if not isinstance(model, Module):
            raise TypeError(f"keep_in_fp32 takes a model; got {type(model).__name__}")
        region_dtype = as_dtype(dtype)
        if not isinstance(region_dtype, torch.dtype) or region_dtype not in PRECISIONS.values():
            raise ValueError(f"dtype is {short(dtype)}; expected the region's, torch.float16 or torch.bfloat16")
        modules = kept_modules(model, region_dtype, self.modules)
        return self.for_modules(model, dict.fromkeys(modules, torch.float32)) if modules else self

    def check(self, model: Module | None = None) -> module_rules.ModuleCheck:
        """List the modules that each rule of `for_modules` binds, by their paths, and those that are gone.

        A rule whose module is gone has to be bound again: call `for_modules` after the module was replaced. Runs
        nothing.

        Args:
            model: A model whose linear layers are listed too; None lists no layers.

        Returns:
            The check, of which `print` shows a line for each rule. `.gone` holds the rules with modules that were freed
            or that their model no longer contains. `.layers` has a line for each linear layer of `model`: the rule that
            it follows under this policy, and why a layer with an FP8 rule does not run in FP8.

        Raises:
            TypeError: Something other than a model.
        """
        if model is not None and not isinstance(model, Module):
            raise TypeError(f"check takes a model, to list its linear layers, or nothing; got {short(model)}")
        layers = () if model is None else tuple(linear_layers(self, model))
        return module_rules.ModuleCheck(self.modules.check(), layers)

    def _precision(self, key: Any, value: Any) -> torch.dtype | Policy:
        """The checked value of a rule of `for_modules`; `ValueError`, with the key, if a module cannot follow it."""
        if isinstance(value, Policy):
            if value.device_type != self.device_type:
                raise ValueError(
                    f"the policy for module {module_rules.describe(key)} is for {value.device_type!r}, "
                    f"not {self.device_type!r}"
                )
            if value.modules:
                raise ValueError(
                    f"the policy for module {module_rules.describe(key)} has rules for modules itself; give them to "
                    "the policy around it, where they apply inside that module too"
                )
            return value
        dtype = as_dtype(value)
        if not isinstance(dtype, torch.dtype) or dtype not in PRECISIONS.values():
            raise ValueError(
                f"{short(value)} is not a precision for module {module_rules.describe(key)}; expected torch.float32, "
                f"torch.bfloat16, torch.float16, a name among {', '.join(PRECISIONS)}, or a Policy"
                f"{_rules_in_a_policy(value, self.device_type)}"
            )
        return dtype

    def inside(self, value: Policy) -> Policy:
        """Combine this policy's rules for modules with the operators' rules of the policy that is a module's rule.

        Args:
            value: The value of a rule of `for_modules`.

        Returns:
            The policy of the module's region.
        """
        return _inside(self, value)

    def rule_for(self, op: Operator) -> Rule:
        """Find the rule that an operator follows.

        Args:
            op: An operator, in any form that is a key of `with_rules`.

        Returns:
            The rule, as `explain` gives it.

        Raises:
            ValueError, TypeError: As `explain`.
        """
        return self.explain(op).rule

    def explain(self, op: Operator) -> Explanation:
        """Find the rule that an operator follows, the layer of the policy that set it, and the reason.

        Args:
            op: An operator, in any form that is a key of `with_rules`.

        Returns:
            The explanation; its `str()` is one line. An unlisted composite follows DECOMPOSE, any other unlisted
            operator KEEP.

        Raises:
            ValueError: An unknown operator, or one whose overloads follow different rules.
            TypeError: Something that names no operator.

        >>> print(Policy.torch("cpu").explain(torch.nn.functional.linear))
        aten::linear: LOWER (set by torch): matrix units multiply in half precision and accumulate in float32
        """
        explanations = [self._explain(overload) for overload in candidates(op)]
        if len({explanation.rule for explanation in explanations}) > 1:
            rules = ", ".join(f"{explanation.op} {explanation.rule.name}" for explanation in explanations)
            raise ValueError(f"overloads of {op!s} follow different rules: {rules}; ask about one of them")
        return explanations[0]

    def _explain(self, op: OpOverload) -> Explanation:
        for name, layer in reversed(self._layers()):
            if op in layer:
                rule, why = layer[op]
                return Explanation(op.name(), rule, name, why)
        if is_composite(op):
            return Explanation(op.name(), Rule.DECOMPOSE, "unlisted", _WHY_COMPOSITE)
        return Explanation(op.name(), Rule.KEEP, "unlisted", _WHY_UNLISTED)

    def rules(self) -> RuleTable:
        """Fold all layers into one table.

        Returns:
            Every operator with a rule of its own. Operators that are absent run as they are.
        """
        return _fold_layers(self, _Registered.changes)

    def to_dict(self) -> dict[str, Any]:
        """Write the policy as plain dicts, lists and strings, for JSON or a checkpoint.

        Returns:
            The state that `from_dict` reads. A module that was given as a key is written by its path.

        Raises:
            ValueError: Rules of several models, which one call of `from_dict` cannot bind.
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
        """Read a policy that `to_dict` wrote, and bind its module rules.

        Untrusted data is safe: reading it imports nothing and runs no code; module classes are looked up among those of
        the model.

        Args:
            state: The state; all keys but "base" may be absent. Without "device_type" the policy is for the current
                accelerator, else the CPU.
            model: The model to bind module rules to; None for a policy without such rules.

        Returns:
            The policy, equal to the written one if the model is the same.

        Raises:
            TypeError, ValueError: A state that `to_dict` does not write, module rules without a model, or rules that
                match none of its modules.

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

    def __hash__(self) -> int:  # no `cached_property`: its lock, in Python 3.11, may be inherited locked by a fork
        known: int | None = self.__dict__.get("_hash")
        if known is None:
            known = hash((self.base, self.device_type, self.overrides, self.modules))
            object.__setattr__(self, "_hash", known)
        return known

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

    `Policy.with_rules` still overrides it. An operator with a dtype from `torch.library.register_autocast` needs no
    call: regions respect it. Never synchronizes with the device.

    Args:
        op: An overload, a packet, a name such as `"mylib::attention"`, or the result of `torch.library.custom_op`.
        rule: A `Rule` or its name.

    Raises:
        TypeError, ValueError: An unknown operator or rule, or a rule that the operator cannot follow.
    """
    checked = checked_rule(rule, op)
    for overload in overloads(op, checked):
        _Registered.rules[overload] = checked
    _Registered.changes += 1


def registered() -> Mapping[OpOverload, Rule]:
    """The rules that `register_op` declared for this process."""
    return _Registered.rules


def register_changes() -> int:
    """How many times `register_op` has been called in this process."""
    return _Registered.changes


def _rules_in_a_policy(value: Any, device_type: str) -> str:
    """The advice for an operator's rule, or for FP8, that was given as the precision of a module; "" for others."""
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

    The operators, modules and values in them are checked later, when the policy is made.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"a written policy is a dict, as to_dict gives it; got {short(state)}")
    unknown = sorted(set(state) - {"base", "device_type", "rules", "modules"}, key=repr)
    if "base" not in state or unknown:
        faults = ["'base' is missing"] if "base" not in state else []
        if unknown:
            faults.append(f"unknown keys {short(unknown)}")
        raise ValueError(
            f"not a policy: {'; '.join(faults)}; expected 'base' and, with defaults, 'device_type', 'rules' and "
            "'modules'"
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
    return '{"base": "' + base + '", "device_type": "' + device_type + '"}'  # Dynamo traces no JSON


def _checked_layer(rules: Any) -> tuple[tuple[OpOverload, Rule], ...]:
    """The layer that `with_rules` adds: every operator that its keys name, in the order of the operators' names."""
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
    """The table of a policy after this many `register_op` calls; equal policies share it."""
    return RuleTable({op: rule for _, layer in policy._layers() for op, (rule, _) in layer.items()})


def torch_rules(device_type: str) -> dict[OpOverload, Rule]:
    """The rules of torch.amp's own list for a device type, without those that `register_op` adds."""
    return {op: rule for _, layer in _base_layers("torch", device_type) for op, (rule, _) in layer.items()}


@functools.cache
def _base_layers(base: str, device_type: str) -> tuple[tuple[str, _Layer], ...]:
    """torch.amp's layer for a device and, under the default base, ampkit's on top; folded once."""
    listed = listed_as(device_type)
    torch_layer = "torch", fold(TORCH[listed])
    return (torch_layer,) if base == "torch" else (torch_layer, ("default", fold(DEFAULT_EXTRA[listed])))


@called_while_tracing
def _privateuse1_name() -> str:
    return privateuse1_name()
