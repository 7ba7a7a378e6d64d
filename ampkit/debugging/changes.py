"""Changes that may fix a finding, and recommendations if none does.

A change has the code that a user writes for it, and a context that runs a training as if that code were there. The
second part of the file selects the changes for a finding, and the recommendation for the user's own code. The third
enters regions with another policy.
"""

from __future__ import annotations

import functools
import gc
import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from ampkit.containers import map_tensors
from ampkit.debugging.checks.causes import advice_for
from ampkit.debugging.finding import Finding, Fix, Place
from ampkit.debugging.observe.autograd_graph import leaves_from
from ampkit.debugging.observe.call_sites import ModuleCalls, find_caller
from ampkit.debugging.observe.operator_properties import tensors_in
from ampkit.debugging.torch_private import current_node
from ampkit.dtypes import SIXTEEN_BIT
from ampkit.gradients.collect import parameters as parameters_of
from ampkit.matmul.float8_recipes import RECIPES
from ampkit.policy.module_paths import named_paths, unwrapped
from ampkit.policy.module_rules import ModuleRules
from ampkit.policy.policy import Policy
from ampkit.policy.rules import Rule
from ampkit.region.arguments import TORCH_POLICIES, RegionSpec
from ampkit.region.autocast import autocast
from ampkit.region.stack import thread

Region = Literal["ampkit", "torch", "none"]  # the kind of region that the user's step runs in
RULES = {f"fp8_{rule.value.removeprefix('float8_')}": rule for rule in Rule if rule.value.startswith("float8_")}
_SCALE = 2.0**12
_LARGE_GRADIENT = 100.0  # clipped before a smaller learning rate is tried
# Names of functions whose arguments `LineChange` does not cast: they write to them, or to attributes of theirs.
_WRITES = re.compile(r".*[^_]_|__(get|set|delete|setitem|iadd|isub|imul|itruediv)__|batch_norm")


@dataclass
class PolicyChange:
    """Regions whose policy computes some modules, or everything, in higher precision.

    The higher precision is the policy without its FP8 rules. For a policy that has none it is float32.
    """

    modules: Sequence[str] | None = ()  # paths; None: everything
    against: str = ""  # name of an FP8 rule for linear layers, which is tested in addition to the policy
    float32: bool = False  # the higher precision is float32 for a policy with FP8 rules as well
    policy: Policy | None = None  # tested instead of the policies of the regions
    model: Module | None = None  # has the modules; None: all models of this process that have modules at these paths
    first: RegionSpec | None = None  # the program's first region, as it was written
    _made: dict[Policy, Policy] = field(default_factory=dict, init=False)  # once: regions are entered in each step

    @property
    def code(self) -> str:
        """The code that a user writes."""
        given = self.policy or (None if self.first is None else self.first.policy)
        device_type = self.tested().device_type
        named = "torch" if given == TORCH_POLICIES[device_type] else "" if given is not None else "default"
        start = f'Policy.{named}("{device_type}")' if named else "policy"
        rules = f'.with_rules({{"aten::linear": {RULES[self.against]}}})' if self.against else ""
        shown = repr(self._precision(self.tested())).replace("'", '"')
        modules = ", ".join(f'"{path}": {shown}' for path in self.modules or ())
        return f"policy = {start}{rules}.for_modules(model, {{{modules}}})"

    def around(self) -> AbstractContextManager[None]:
        """Return a context in which a training runs as if the code were there."""
        return replaced_regions(self._changed)

    def tested(self) -> Policy:
        """Return the policy of the first region without the change."""
        return self._tested(self.first) if self.first is not None else Policy.default("cpu")

    def changed_policy(self, policy: Policy) -> Policy:
        """Return a policy with the change. Raises `ValueError` if it has a rule for one of the modules already."""
        if not self.modules:
            return without_float8(policy) if self.modules is None else policy
        precision = self._precision(policy)
        for model in [self.model] if self.model is not None else _models_with(self.modules):
            policy = policy.for_modules(model, dict.fromkeys(self.modules, precision))
        return policy

    def is_possible(self) -> bool:
        """Return whether the modules exist, and the policy has no rule of its own for one of them."""
        with suppress(ValueError):
            return self.changed_policy(self.tested()) != self.tested()
        return False

    def leaves(self, models: Iterable[Module]) -> list[str]:
        """Return paths of modules without children that can be changed, the ones with the fewest parameters first."""
        named = [(path, each) for model in models for path, each in named_paths(model) if path]
        leaves = [(path, each) for path, each in named if not [*each.children()]]
        leaves.sort(key=lambda leaf: sum(p.numel() for p in leaf[1].parameters()))
        return [path for path, _ in leaves if replace(self, modules=(path,)).is_possible()]

    @property
    def _is_float8(self) -> bool:  # FP8 is compared with 16 bits; otherwise 16 bits with float32
        return not self.float32 and without_float8(self.tested()) != self.tested()

    def _precision(self, policy: Policy) -> Any:
        return replace(without_float8(policy), modules=ModuleRules()) if self._is_float8 else torch.float32

    def _tested(self, spec: RegionSpec) -> Policy:
        return _with_rule(self.policy or spec.policy or Policy.default(spec.device_type), self.against)

    def _changed(self, spec: RegionSpec) -> RegionSpec:
        if self.policy is not None and self.policy.device_type != spec.device_type:
            return spec
        if self.first is None and spec.enabled:
            self.first = spec
        if self.modules is None and not self._is_float8:
            return spec._replace(enabled=False)
        if spec.policy is None and any(entry.spec.device_type == spec.device_type for entry in thread.regions):
            return spec  # it has the policy of the region around it
        given = spec.policy or Policy.default(spec.device_type)
        if given not in self._made:
            self._made[given] = self.changed_policy(self._tested(spec))
        return spec._replace(policy=self._made[given])


@functools.cache  # regions are entered in each step
def _with_rule(policy: Policy, against: str) -> Policy:
    return policy.with_rules({"aten::linear": RULES[against]}) if against else policy


def _models_with(paths: Iterable[str]) -> list[Module]:
    """Return the outermost modules of this process that have modules at these paths."""
    modules = [each for each in gc.get_objects() if isinstance(each, Module)]
    having = [each for each in modules if set(paths) <= {path for path, _ in named_paths(each) if path}]
    inside = {inner for each in having for inner in each.modules() if inner is not each}
    return [each for each in having if each not in inside and unwrapped(each) is each]


class LineChange(TorchFunctionMode):
    """Lines of the user's code that compute in float32, and make no 16-bit tensors; with a region or without.

    Without `lines`, all code.
    """

    def __init__(self, device: str, region: Region, lines: Iterable[Iterable[Any]] | None = None) -> None:
        super().__init__()
        self.device = device
        self.region: Region = region
        self.lines = None if lines is None else tuple(tuple(line) for line in lines)

    @property
    def code(self) -> str:
        """The code that a user writes."""
        if self.lines is None:
            return "everything in float32"
        where = " and ".join(f"{file}:{line}" for file, line in self.lines)
        if self.region == "none":
            return f"compute {where} in float32: .float() on its tensors, and no cast to 16 bits there"
        name = "autocast" if self.region == "ampkit" else "torch.autocast"
        return f'with {name}("{self.device}", enabled=False): around {where}, with .float() on its tensors'

    @contextmanager
    def around(self) -> Iterator[None]:
        """Return a context in which a training runs as if the code were there."""
        set_default = torch.set_default_dtype
        with ExitStack() as stack:
            if self.lines is None:
                stack.enter_context(replaced_regions(lambda spec: spec._replace(enabled=False)))
                set_widened = _replaced(torch, set_default_dtype=lambda dtype: set_default(_widened(dtype)))
                stack.enter_context(set_widened)
            stack.enter_context(self)
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward:
            gradient = kwargs.pop("gradient", None)
            with self:  # for hooks and custom functions
                return torch.autograd.backward(args[0], *(args[1:] or (gradient,)), **kwargs)
        if self.lines is not None and find_caller(1).line() not in self.lines:
            return self._call(func, args, kwargs)
        if _WRITES.fullmatch(getattr(func, "__name__", "")):
            return self._call(func, args, kwargs)
        if func in (Tensor.half, Tensor.bfloat16):
            func = Tensor.float
        args, kwargs = _widened(args), _widened(kwargs)
        region: AbstractContextManager[Any] = nullcontext()
        if torch.is_autocast_enabled(self.device):
            region = (autocast if self.region == "ampkit" else torch.autocast)(self.device, enabled=False)
        with region:
            return func(*args, **kwargs)

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function outside of the lines; if it refuses float32 next to 16 bits, again with float32 cast back."""
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            dtypes = {tensor.dtype for tensor in tensors_in((args, kwargs))}
            low = next((dtype for dtype in SIXTEEN_BIT if dtype in dtypes), None)
            if low is None or torch.float32 not in dtypes:
                raise

            def lowered(tensor: Tensor) -> Tensor:
                return tensor.to(low) if tensor.dtype is torch.float32 else tensor

            return func(*map_tensors(args, lowered), **map_tensors(kwargs, lowered))


def _widened(value: Any) -> Any:
    """Return arguments with 16-bit tensors, and 16-bit dtypes, in float32."""

    def widened_dtype(leaf: Any) -> Any:
        return torch.float32 if isinstance(leaf, torch.dtype) and leaf in SIXTEEN_BIT else leaf

    return map_tensors(value, lambda tensor: tensor.float() if tensor.dtype in SIXTEEN_BIT else tensor, widened_dtype)


@contextmanager
def _replaced(owner: Any, **functions: Any) -> Iterator[None]:
    """Context in which an object has other functions."""
    before = {name: getattr(owner, name) for name in functions}
    for name, function in functions.items():
        setattr(owner, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(owner, name, function)


@dataclass(frozen=True)
class LossScale:
    """Backward with a constant loss scale, whose gradients are unscaled after it: the effect of a scaler."""

    code = "scaler = ampkit.GradScaler(); scaler.scale(loss).backward(), scaler.step(optimizer), scaler.update()"

    def around(self) -> AbstractContextManager[None]:
        """Return a context in which a training runs as if the code were there."""
        inner = torch.autograd.backward

        def scaled(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
            if not isinstance(tensors, Tensor) or grad_tensors is not None:
                inner(tensors, grad_tensors, *args, **kwargs)
                return
            leaves = leaves_from([tensors.grad_fn])
            _scale_gradients(leaves, _SCALE)  # from earlier micro-batches
            inner(tensors, torch.full_like(tensors, _SCALE), *args, **kwargs)
            _scale_gradients(leaves, 1 / _SCALE)

        return _replaced(torch.autograd, backward=scaled)


@torch.no_grad()
def _scale_gradients(leaves: Iterable[Tensor], factor: float) -> None:
    for leaf in leaves:
        if leaf.grad is not None:
            leaf.grad.mul_(factor)


@dataclass(frozen=True)
class NoCache:
    """Regions that cast a weight each time, and keep no cast."""

    code = "torch.autocast(..., cache_enabled=False)"

    @contextmanager
    def around(self) -> Iterator[None]:
        """Return a context in which a training runs as if the code were there."""
        set_enabled, before = torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled()
        try:
            with _replaced(torch, set_autocast_cache_enabled=lambda enabled: set_enabled(False)):
                set_enabled(False)
                yield
        finally:
            set_enabled(before)


@dataclass(frozen=True)
class LearningRate:
    """Optimizers whose learning rate is `factor` times theirs."""

    factor: float

    @property
    def code(self) -> str:
        """The code that a user writes."""
        return f"a learning rate {self.factor:g} times as large"

    @contextmanager
    def around(self) -> Iterator[None]:
        """Return a context in which a training runs as if the code were there."""
        before: dict[Any, list[Any]] = {}

        def starts(optimizer: Any, args: Any, kwargs: Any) -> None:
            before[optimizer] = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * self.factor

        def ended(optimizer: Any, args: Any, kwargs: Any) -> None:
            for group, rate in zip(optimizer.param_groups, before[optimizer], strict=True):
                group["lr"] = rate

        with register_optimizer_step_pre_hook(starts), register_optimizer_step_post_hook(ended):
            yield


@dataclass(frozen=True)
class Clipping:
    """Gradients whose norm is clipped before each step of an optimizer."""

    code = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) before the step"

    def around(self) -> AbstractContextManager[Any]:
        """Return a context in which a training runs as if the code were there."""

        def starts(optimizer: Any, args: Any, kwargs: Any) -> None:
            torch.nn.utils.clip_grad_norm_(parameters_of(optimizer), 1.0)

        return register_optimizer_step_pre_hook(starts)


Change = PolicyChange | LineChange | LossScale | NoCache | LearningRate | Clipping


# --- the changes and the recommendation for a finding


def changes_for(finding: Finding, modules: ModuleCalls) -> Iterator[Change]:
    """Yield changes that may fix a finding, the likeliest first; none if float16 and bfloat16 did not cause it.

    `modules` has the model, and the kind and the policy of the regions that its modules ran in.
    """
    if finding.check in ("nonfinite", "data"):
        yield from _changes_for_nonfinite(finding, modules)
    elif finding.kind == "underflow" and finding.place.phase != "forward":
        yield LossScale()
    elif finding.kind == "stale cast":
        yield NoCache()
    elif finding.kind == "divergence":
        explodes = (finding.cause.value or 0.0) > _LARGE_GRADIENT
        rates = [*map(LearningRate, (0.1, 0.01, 0.001))]
        yield from (Clipping(), *rates) if explodes else (*rates, Clipping())
    elif finding.kind in ("stagnating sum", "rounded", "underflow"):
        yield from _changes_of_lines(finding, modules, [finding.producer or finding.place, finding.place])


def _changes_for_nonfinite(finding: Finding, modules: ModuleCalls) -> Iterator[Change]:
    place, sources, cause = finding.place, finding.rounding_sources, finding.cause
    if cause.kind in ("arrived", "received", "constant", "uninitialized") or cause.is_exact:
        return  # no precision helps
    dtypes = [source.dtype for source in sources] or [place.dtype, *(each.dtype for each in finding.inputs)]
    if place.phase == "optimizer" or not {"float16", "bfloat16"} & {*dtypes}:
        return
    path = sources[0].module if sources else place.module
    if path in changeable_paths(modules) and (change := module_change(modules, finding.device, [path])).is_possible():
        yield change
    yield from _changes_of_lines(finding, modules, sources or (place,))


def changeable_paths(modules: ModuleCalls) -> set[str]:
    """Return the paths of modules that a policy can change; none without a model or an ampkit region."""
    model = modules.model if modules.region == "ampkit" else None
    return set() if model is None else {path for path, _ in named_paths(model) if path}


def module_change(modules: ModuleCalls, device: str, paths: Sequence[str]) -> PolicyChange:
    """Return the change that computes modules in float32."""
    first = RegionSpec(device, torch.float32, True, True, modules.policy)
    return PolicyChange(paths, float32=True, model=modules.model, first=first)


def _changes_of_lines(finding: Finding, modules: ModuleCalls, places: Iterable[Place]) -> Iterator[LineChange]:
    """Yield the changes of the first line, and of all lines."""
    lines = list(dict.fromkeys(place.site for place in places if place.line))
    for count in sorted({1, len(lines)}) if lines else ():
        yield LineChange(finding.device, modules.region, lines[:count])


def recommendation(finding: Finding, modules: ModuleCalls) -> Fix:
    """Return an untested fix: the check's, the first change, or one for the user's own code."""
    if finding.fix.code or finding.check not in ("nonfinite", "data"):
        return finding.fix
    # No precision helps for undefined results unless a call was found that rounds, nor for results that do no harm, and
    # float32 may hide wrong data.
    is_undefined = finding.kind in ("undefined", "from inf") or finding.cause.is_of_data
    is_undefined |= finding.kind == "overflow" and finding.cause.is_number  # two masks
    is_undefined |= finding.check == "nonfinite" and finding.grade == "note"
    change = None if is_undefined else next(changes_for(finding, modules), None)
    return Fix(change.code if change is not None else advice(finding))


_ADVICE = {  # by kind of cause
    "received": "see the report of the rank that sent it",
    "constant": (
        "for a mask write a finite number, such as -1e4, or leave the element out of the sum; else do not write inf or "
        "NaN where nothing masks it"
    ),
    "uninitialized": "write to the memory before it is read",
    "unknown": "check its inputs",
}


def advice(finding: Finding) -> str:
    """Return a recommendation for the user's own code, for inf or NaN that no change fixes."""
    place, cause = finding.place, finding.cause
    if cause.kind == "arrived":
        name = repr(finding.parameter) if finding.parameter else "the data"
        return f"check the code that wrote {name} before this step"
    if cause.kind == "constant" and "nan" in finding.nonfinite:
        return "do not write NaN where nothing masks it; if it marks missing data, filter these rows before the model"
    if cause.kind in _ADVICE:
        return _ADVICE[cause.kind]
    if cause.is_of_data:
        return "check these rows of the data: filter or normalize them, or keep them in float32 if they are right"
    if cause.kind == "overflow" and place.op == "aten::_to_copy":
        limit = f"torch.finfo(torch.{place.dtype}).max"
        return f"keep it in float32, or clamp it before the cast: x.clamp(-m, m) with m = {limit}"
    if place.phase == "optimizer" and cause.kind in ("rounded", "overflow"):
        return "eps=1e-4 in the optimizer, or float32 masters: ampkit.FP16Optimizer(optimizer)"
    why, general = advice_for(place.op, place.backward_of)
    value, limit = cause.value, cause.limit
    if place.phase == "backward" and cause.kind == "overflow" and value and limit and not (finding.scale or why):
        divisor = 2.0 ** math.ceil(math.log2(value / limit))
        return f"(loss / {divisor:g}).backward()    # makes gradients {divisor:g} times smaller"
    if cause.is_number and cause.kind == "overflow":
        return "one mask: torch.where(a & b, 0.0, -1e4) of the two conditions, or clamp the sum: .clamp(min=-1e4)"
    if cause.is_number:
        return "write a number that the dtype can represent: in float16 at least 6e-8, and at most 1 - 5e-4"
    if cause.kind == "overflow" and not finding.inputs:
        return "make these numbers in float32"
    if cause.kind == "overflow" and value and limit and not why:
        if value <= torch.finfo(torch.float32).max and place.dtype in ("float16", "bfloat16"):
            return "keep the result in float32 until it is small again, or make the inputs of this line smaller"
        return "make its inputs smaller before this line: normalize, divide or clamp them"
    if cause.kind == "from inf" and finding.producer is not None and "softmax" not in place.op:
        if cause.is_minus_inf:
            return "write torch.finfo(dtype).min instead of -inf"
        writer = "{}:{}".format(*finding.producer.site)
        return f"do not let inf into the input: check or filter the values written at {writer}"
    return general


# --- regions as if they had been written with another policy


@contextmanager
def replaced_regions(changed: Callable[[RegionSpec], RegionSpec]) -> Iterator[None]:
    """Context in which each region that is entered is the one that `changed` returns for it, in all threads.

    Regions of modules with rules follow the policy of the new region. An ampkit region with torch's lists is entered
    instead of a `torch.autocast`.
    """
    enter, leave = autocast.__enter__, autocast.__exit__
    given: dict[int, list[RegionSpec]] = {}  # by region, innermost last: one object may be entered again while open

    def entered(region: autocast) -> autocast:
        specs = given.setdefault(id(region), [])
        specs.append(region.spec)
        try:
            region.spec = changed(specs[0])
            return enter(region)
        except BaseException:
            region.spec = specs.pop()
            raise

    def left(region: autocast, *error: Any) -> Any:
        try:
            return leave(region, *error)
        finally:
            if given.get(id(region)):
                region.spec = given[id(region)].pop()

    torch_enter, torch_leave = torch.autocast.__enter__, torch.autocast.__exit__
    of_thread = threading.local()  # `open`: torch's regions and their replacements, innermost last

    def torch_entered(region: Any) -> Any:
        of_thread.open = opened = getattr(of_thread, "open", [])
        if current_node() is not None or len(thread.regions) != len(opened):
            return torch_enter(region)  # in a recompute, or inside of an ampkit region, which has the policy
        policy = TORCH_POLICIES[region.device]
        own = autocast(region.device, region.fast_dtype, region._enabled, region._cache_enabled, policy=policy)
        opened.append((region, entered(own)))
        return region

    def torch_left(region: Any, *error: Any) -> Any:
        opened = getattr(of_thread, "open", [])
        is_replaced = opened and opened[-1][0] is region
        return left(opened.pop()[1], *error) if is_replaced else torch_leave(region, *error)

    with (
        _replaced(autocast, __enter__=entered, __exit__=left),
        _replaced(torch.autocast, __enter__=torch_entered, __exit__=torch_left),
    ):
        yield


@functools.cache
def without_float8(policy: Policy) -> Policy:
    """Return the policy without its FP8 rules, and without FP8 rules in its modules' policies."""
    layers = (tuple(item for item in layer if item[1] not in RECIPES) for layer in policy.overrides)
    rules = (
        rule._replace(value=without_float8(rule.value)) if isinstance(rule.value, Policy) else rule
        for rule in policy.modules.rules
    )
    return replace(policy, overrides=tuple(filter(None, layers)), modules=ModuleRules(tuple(rules)))
