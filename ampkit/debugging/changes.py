"""Changes that may fix a finding, and recommendations if none does.

A change has the code that a user writes for it, and a context that runs a step as if that code were there. The second
part of the file selects the changes for a finding, and the recommendation for the user's own code. The third enters
regions with another policy, for changes and rehearsals.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from ampkit.containers import map_tensors
from ampkit.debugging.checks.causes import advice_for
from ampkit.debugging.finding import Finding, Fix, Place
from ampkit.debugging.observe.call_sites import find_caller
from ampkit.debugging.observe.operator_properties import tensors_in
from ampkit.debugging.torch_private import current_node
from ampkit.dtypes import SIXTEEN_BIT
from ampkit.gradients.collect import parameters as parameters_of
from ampkit.matmul.float8_recipes import RECIPES
from ampkit.policy.module_paths import named_paths
from ampkit.policy.module_rules import ModuleRules
from ampkit.policy.policy import Policy
from ampkit.region.arguments import TORCH_POLICIES, RegionSpec
from ampkit.region.autocast import autocast
from ampkit.region.stack import thread

Region = Literal["ampkit", "torch", "none"]  # the kind of region that the user's step runs in
_SCALE = 2.0**12
_LARGE_GRADIENT = 100.0  # clipped before a smaller learning rate is tried
_NOT_CAST = frozenset(
    {  # functions whose arguments `LineChange` does not cast
        "batch_norm",
        "__get__",
        "__set__",
        "__delete__",
        "__setitem__",
        "__iadd__",
        "__isub__",
        "__imul__",
        "__itruediv__",
    }
)


@dataclass(frozen=True)
class PolicyChange:
    """Modules that compute more precisely by a policy: in float32, or without its FP8 rules."""

    device: str
    model: Module
    modules: tuple[str, ...] = ()
    policy: Policy | None = None  # that the step's regions were given
    float8: bool = False  # the modules compute in FP8

    @property
    def code(self) -> str:
        """The code that a user writes."""
        return code_of(self.policy, self.device, self.modules, wider(self._default(), float8=self.float8))

    def around(self) -> AbstractContextManager[Any]:
        """Return a context in which the step runs as if the code were there."""

        def changed(spec: RegionSpec) -> RegionSpec:
            if spec.device_type != self.device or inherits(spec):
                return spec
            return spec._replace(policy=self._changed(policy_of(spec)))

        return replaced_regions(changed)

    def is_possible(self) -> bool:
        """Return whether the step's policy has no rule of its own for one of the modules."""
        try:
            self._changed(self._default())
        except ValueError:
            return False
        return True

    def _default(self) -> Policy:
        return self.policy or Policy.default(self.device)

    def _changed(self, policy: Policy) -> Policy:
        return policy.for_modules(self.model, dict.fromkeys(self.modules, wider(policy, float8=self.float8)))


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

    def around(self) -> AbstractContextManager[Any]:
        """Return a context in which the step runs as if the code were there."""
        return self if self.lines is not None else self._everywhere()

    @contextmanager
    def _everywhere(self) -> Iterator[None]:
        set_default_dtype = torch.set_default_dtype
        torch.set_default_dtype = lambda dtype: set_default_dtype(_widened(dtype))
        try:
            with replaced_regions(lambda spec: spec._replace(enabled=False)), self:
                yield
        finally:
            torch.set_default_dtype = set_default_dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is Tensor.backward:
            gradient = kwargs.pop("gradient", None)
            with self:  # for hooks and custom functions
                return torch.autograd.backward(args[0], *(args[1:] or (gradient,)), **kwargs)
        if self.lines is not None and find_caller(1).line() not in self.lines:
            return self._call(func, args, kwargs)
        if name in _NOT_CAST or (name.endswith("_") and not name.endswith("__")):
            return self._call(func, args, kwargs)  # an operator in place must not write to a copy
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


def _paths(model: Module) -> set[str]:
    return {path for path, _ in named_paths(model) if path}


@dataclass(frozen=True)
class LossScale:
    """Backward with a constant loss scale, whose gradients are unscaled after it: the effect of a scaler."""

    code = "scaler = ampkit.GradScaler(); scaler.scale(loss).backward(), scaler.step(optimizer), scaler.update()"

    @contextmanager
    def around(self) -> Iterator[None]:
        """Return a context in which the step runs as if the code were there."""
        inner = torch.autograd.backward

        def scaled(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
            if not isinstance(tensors, Tensor) or grad_tensors is not None:
                inner(tensors, grad_tensors, *args, **kwargs)
                return
            leaves = list(_leaves(tensors))
            _scale_gradients(leaves, _SCALE)  # from earlier micro-batches
            inner(tensors, torch.full_like(tensors, _SCALE), *args, **kwargs)
            _scale_gradients(leaves, 1 / _SCALE)

        torch.autograd.backward = scaled
        try:
            yield
        finally:
            torch.autograd.backward = inner


@torch.no_grad()
def _scale_gradients(leaves: Iterable[Tensor], factor: float) -> None:
    for leaf in leaves:
        if leaf.grad is not None:
            leaf.grad.mul_(factor)


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """Yield the parameters that a loss depends on."""
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        nodes += [following for following, _ in node.next_functions]


@dataclass(frozen=True)
class NoCache:
    """Regions that cast a weight each time, and keep no cast."""

    code = "torch.autocast(..., cache_enabled=False)"

    @contextmanager
    def around(self) -> Iterator[None]:
        """Return a context in which the step runs as if the code were there."""
        inner, before = torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled = lambda enabled: inner(False)
        inner(False)
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled = inner
            inner(before)


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
        """Return a context in which the step runs as if the code were there."""
        before: dict[int, list[Any]] = {}

        def starts(optimizer: Any, args: Any, kwargs: Any) -> None:
            before[id(optimizer)] = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * self.factor

        def ended(optimizer: Any, args: Any, kwargs: Any) -> None:
            for group, rate in zip(optimizer.param_groups, before[id(optimizer)], strict=True):
                group["lr"] = rate

        with register_optimizer_step_pre_hook(starts), register_optimizer_step_post_hook(ended):
            yield


@dataclass(frozen=True)
class Clipping:
    """Gradients whose norm is clipped before each step of an optimizer."""

    code = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) before the step"

    def around(self) -> AbstractContextManager[Any]:
        """Return a context in which the step runs as if the code were there."""

        def starts(optimizer: Any, args: Any, kwargs: Any) -> None:
            torch.nn.utils.clip_grad_norm_(parameters_of(optimizer), 1.0)

        return register_optimizer_step_pre_hook(starts)


Change = PolicyChange | LineChange | LossScale | NoCache | LearningRate | Clipping


# --- the changes and the recommendation for a finding


def changes_for(
    finding: Finding, region: Region, model: Module | None, policy: Policy | None = None
) -> Iterator[Change]:
    """Yield changes that may fix a finding, the likeliest first; none if float16 and bfloat16 did not cause it.

    `policy` is the one that the step's regions were given, if any.
    """
    if finding.check in ("nonfinite", "data"):
        yield from _changes_for_nonfinite(finding, region, model, policy)
    elif finding.kind == "underflow" and finding.place.phase != "forward":
        yield LossScale()
    elif finding.kind == "stale cast":
        yield NoCache()
    elif finding.kind == "divergence":
        explodes = (finding.cause.value or 0.0) > _LARGE_GRADIENT
        rates = [*map(LearningRate, (0.1, 0.01, 0.001))]
        yield from (Clipping(), *rates) if explodes else (*rates, Clipping())
    elif finding.kind in ("stagnating sum", "rounded", "underflow"):
        yield from _changes_of_lines(finding, region, [finding.producer or finding.place, finding.place])


def _changes_for_nonfinite(
    finding: Finding, region: Region, model: Module | None, policy: Policy | None
) -> Iterator[Change]:
    place, sources, cause = finding.place, finding.rounding_sources, finding.cause
    if cause.kind in ("arrived", "received", "constant", "uninitialized"):
        return  # no precision helps
    if place.phase == "optimizer" or cause.is_exact:
        return
    dtypes = [source.dtype for source in sources] or [place.dtype, *(each.dtype for each in finding.inputs)]
    if not any(dtype in ("float16", "bfloat16") for dtype in dtypes):
        return
    path = sources[0].module if sources else place.module
    if region == "ampkit" and model is not None and path in _paths(model):
        change = PolicyChange(finding.device, model, (path,), policy)
        if change.is_possible():
            yield change
    yield from _changes_of_lines(finding, region, sources or (place,))


def _changes_of_lines(finding: Finding, region: Region, places: Iterable[Place]) -> Iterator[LineChange]:
    """Yield the changes of the first line, and of all lines."""
    lines = list(dict.fromkeys(place.site for place in places if place.line))
    for count in sorted({1, len(lines)}) if lines else ():
        yield LineChange(finding.device, region, lines[:count])


def recommendation(finding: Finding, region: Region, model: Module | None, policy: Policy | None = None) -> Fix:
    """Return an untested fix: the check's, the first change, or one for the user's own code."""
    # No precision helps for undefined results unless a call was found that rounds, nor for results that do no harm, and
    # float32 may hide wrong data.
    is_undefined = finding.kind in ("undefined", "from inf") or finding.cause.is_of_data
    is_undefined |= finding.kind == "overflow" and finding.cause.is_number  # two masks
    is_undefined |= finding.check == "nonfinite" and finding.grade == "note"
    change = None if is_undefined else next(changes_for(finding, region, model, policy), None)
    if finding.fix.code or finding.check not in ("nonfinite", "data"):
        return finding.fix
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
        spec = region.spec
        region.spec = changed(spec)
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
    """Context in which `torch.autocast` enters ampkit regions."""
    enter, leave = torch.autocast.__enter__, torch.autocast.__exit__
    of_thread = threading.local()  # `open`: torch's regions and their replacements, innermost last

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
    """Return the policy of a region, for one that does not inherit it."""
    return spec.policy or Policy.default(spec.device_type)


def inherits(spec: RegionSpec) -> bool:
    """Return whether a region that is entered now has the policy of a region around it."""
    return spec.policy is None and any(entry.spec.device_type == spec.device_type for entry in thread.regions)


def has_float8(policy: Policy) -> bool:
    """Return whether a policy computes operators in FP8, in all modules or in some."""
    return any(rule in RECIPES for layer in policy.overrides for _, rule in layer) or any(
        isinstance(rule.value, Policy) and has_float8(rule.value) for rule in policy.modules.rules
    )


def without_float8(policy: Policy) -> Policy:
    """Return the policy without its FP8 rules, and without FP8 rules in its modules' policies."""
    layers = (tuple(item for item in layer if item[1] not in RECIPES) for layer in policy.overrides)
    rules = (
        rule._replace(value=without_float8(rule.value)) if isinstance(rule.value, Policy) else rule
        for rule in policy.modules.rules
    )
    return replace(policy, overrides=tuple(filter(None, layers)), modules=ModuleRules(tuple(rules)))


def wider(policy: Policy, *, float8: bool) -> Any:
    """Return the value of a rule for a precise module: with `float8` the policy without FP8 rules, or float32."""
    return replace(without_float8(policy), modules=ModuleRules()) if float8 else torch.float32


def code_of(policy: Policy | None, device_type: str, paths: Iterable[str], value: Any, rules: str = "") -> str:
    """Return the code that gives modules of a region's policy one value; `policy` is the user's, if any."""
    named = "torch" if policy == TORCH_POLICIES[device_type] else "" if policy is not None else "default"
    start = f'Policy.{named}("{device_type}")' if named else "policy"
    shown = repr(value).replace("'", '"')
    modules = ", ".join(f'"{path}": {shown}' for path in paths)
    return f"policy = {start}{rules}.for_modules(model, {{{modules}}})"
