"""Changes that may fix a finding, and recommendations if none does.

A change has the code that a user writes for it, and a context that runs a step as if that code were there. The second
part of the file selects the changes for a finding, and the recommendation for the user's own code. The third enters
regions with another policy, for changes and rehearsals.
"""

from __future__ import annotations

import ast
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from ampkit.containers import map_tensors
from ampkit.debugging.checks.causes import advice_for
from ampkit.debugging.finding import Finding, Fix, Place
from ampkit.debugging.observe.call_sites import find_caller
from ampkit.debugging.observe.operator_properties import tensors_in
from ampkit.debugging.torch_private import current_node
from ampkit.dtypes import SIXTEEN_BIT
from ampkit.matmul.float8_recipes import RECIPES
from ampkit.policy.module_paths import named_paths
from ampkit.policy.module_rules import ModuleRules
from ampkit.policy.policy import Policy
from ampkit.region.arguments import TORCH_POLICIES, RegionSpec
from ampkit.region.autocast import autocast
from ampkit.region.stack import thread

Region = Literal["ampkit", "torch", "none"]  # the kind of region that the user's step runs in
_SCALE = 2.0**12
_NOT_CAST = frozenset(
    {  # functions whose arguments `LineChange` does not cast
        "batch_norm",
        "backward",
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

    def extended(self, remaining: Finding) -> PolicyChange | None:
        """Return this change with the module of a finding that remains, or the module around it; None without."""
        path = remaining.place.module if remaining.place.module in _paths(self.model) else ""
        while path in self.modules:
            path = path.rpartition(".")[0]
        extended = replace(self, modules=(*self.modules, path))
        return extended if path and extended.is_possible() else None


class LineChange(TorchFunctionMode):
    """Lines of the user's code that compute in float32, and do not cast to 16 bits; with a region or without."""

    def __init__(self, device: str, region: Region, lines: tuple[Lines, ...]) -> None:
        super().__init__()
        self.device = device
        self.region: Region = region
        self.lines = lines

    @property
    def code(self) -> str:
        """The code that a user writes."""
        where = " and ".join(map(str, self.lines))
        if self.region == "none":
            return f"compute {where} in float32: .float() on its tensors, and no cast to 16 bits there"
        name = "autocast" if self.region == "ampkit" else "torch.autocast"
        return f'with {name}("{self.device}", enabled=False): around {where}, with .float() on its tensors'

    def around(self) -> AbstractContextManager[Any]:
        """Return a context in which the step runs as if the code were there."""
        return self

    def extended(self, remaining: Finding) -> LineChange | None:
        """Return this change with a line of a finding that remains, or the line's function; None if there is none."""
        candidates: list[Lines] = []
        for place in (remaining.producer, remaining.place):
            line = None if place is None else line_of(place)
            if line is not None:
                candidates.append(line)
        for line in reversed(list(candidates)):
            function = function_around(line)
            if function is not None:
                candidates.append(function)
        added = next((new for new in candidates if not any(old.covers(new) for old in self.lines)), None)
        if added is None:
            return None
        return LineChange(self.device, self.region, (*(old for old in self.lines if not added.covers(old)), added))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        file, line = find_caller(1).line()
        if not any(lines.covers(Lines(file, line, line)) for lines in self.lines):
            return self._call(func, args, kwargs)
        name = getattr(func, "__name__", "")
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


class Lines(NamedTuple):
    """Lines of a file, from `first` to `last` inclusive."""

    file: str
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.file}:{self.first}" + (f"-{self.last}" if self.last > self.first else "")

    def covers(self, other: Lines) -> bool:
        """Return whether all of some lines are among these."""
        return self.file == other.file and self.first <= other.first and other.last <= self.last


def line_of(place: Place) -> Lines | None:
    """Return the line of a place; None if it is not known."""
    return Lines(place.file, place.line, place.line) if place.line else None


def function_around(lines: Lines) -> Lines | None:
    """Return the body of the innermost function around some lines; None without, or if the file cannot be read."""
    try:
        tree = ast.parse(Path(lines.file).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return None
    bodies = [
        Lines(lines.file, node.body[0].lineno, node.end_lineno or node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return min((body for body in bodies if body.covers(lines)), key=lambda body: body.last - body.first, default=None)


@dataclass(frozen=True)
class LossScale:
    """Backward with a constant loss scale, whose gradients are unscaled at once: the effect of a scaler."""

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
            before = [leaf.grad for leaf in leaves]
            for leaf in leaves:
                leaf.grad = None
            inner(tensors, torch.full_like(tensors, _SCALE), *args, **kwargs)
            with torch.no_grad():
                for leaf, old in zip(leaves, before, strict=True):
                    if leaf.grad is None:
                        leaf.grad = old
                    else:
                        leaf.grad.div_(_SCALE)
                        leaf.grad = leaf.grad if old is None else old.add_(leaf.grad)

        torch.autograd.backward = scaled
        try:
            yield
        finally:
            torch.autograd.backward = inner


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


Change = PolicyChange | LineChange | LossScale | NoCache


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
    elif finding.kind in ("stagnating sum", "imprecise", "rounded", "underflow"):
        lines = [line for each in (finding.producer, finding.place) if each and (line := line_of(each))]
        for count in sorted({1, len(set(lines))} - {0}) if lines else ():
            yield LineChange(finding.device, region, tuple(dict.fromkeys(lines))[:count])


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
    lines = [line for each in sources or (place,) if (line := line_of(each)) is not None]
    path = sources[0].module if sources else place.module
    if region == "ampkit" and model is not None and path in _paths(model):
        change = PolicyChange(finding.device, model, (path,), policy)
        if change.is_possible():
            yield change
    if lines:
        yield LineChange(finding.device, region, (lines[0],))
    if len(set(lines)) > 1:
        yield LineChange(finding.device, region, tuple(dict.fromkeys(lines)))


def recommendation(finding: Finding, region: Region, model: Module | None, policy: Policy | None = None) -> Fix:
    """Return an untested fix: the one that a check gave, the first change, or one for the user's own code."""
    # No precision helps for undefined results unless a call is known that rounds, nor for results that do no harm, and
    # float32 may hide wrong data.
    is_undefined = finding.kind in ("undefined", "from inf") or finding.cause.is_of_data
    is_undefined |= finding.check == "nonfinite" and finding.grade == "note"
    change = None if is_undefined else next(changes_for(finding, region, model, policy), None)
    if finding.kind == "imprecise" and change is not None:
        return Fix(f"{finding.fix.code}: {change.code}")
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

    Regions of modules with rules are entered as the policy of the new region says. In place of a `torch.autocast` an
    ampkit region is entered, by torch's lists.
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
    """Return the policy without its FP8 rules, and without those in its modules' policies."""
    layers = (tuple(item for item in layer if item[1] not in RECIPES) for layer in policy.overrides)
    rules = (
        rule._replace(value=without_float8(rule.value)) if isinstance(rule.value, Policy) else rule
        for rule in policy.modules.rules
    )
    return replace(policy, overrides=tuple(filter(None, layers)), modules=ModuleRules(tuple(rules)))


def wider(policy: Policy, *, float8: bool) -> Any:
    """Return the value that keeps a module precise: with `float8` the policy without its FP8 rules, else float32."""
    return replace(without_float8(policy), modules=ModuleRules()) if float8 else torch.float32


def code_of(policy: Policy | None, device_type: str, paths: Iterable[str], value: Any, rules: str = "") -> str:
    """Return the code that gives modules of a region's policy one value; `policy` is the user's, if any."""
    named = "torch" if policy == TORCH_POLICIES[device_type] else "" if policy is not None else "default"
    start = f'Policy.{named}("{device_type}")' if named else "policy"
    shown = repr(value).replace("'", '"')
    modules = ", ".join(f'"{path}": {shown}' for path in paths)
    return f"policy = {start}{rules}.for_modules(model, {{{modules}}})"
