"""Custom functions and hooks of a backward whose gradient does not follow the gradient that comes in.

Backward is linear: 0 gives 0, and twice the gradient gives twice as much. Torch's own operators are linear. A custom
function that returns a gradient which it computed in forward, or a hook that clips, is not, and its gradient is wrong
whenever a loss is scaled, divided or weighted. Each of them is tried when it runs, with 0, 1 and 2 times the incoming
gradient.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import textwrap
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from ampkit.debugging.checks.check import Add, Check
from ampkit.debugging.finding import Cause, Finding, Fix, Place
from ampkit.debugging.observe.call_sites import relative
from ampkit.debugging.observe.observer import Observer
from ampkit.debugging.observe.operator_facts import tensors_in
from ampkit.debugging.observe.ranks import rank
from ampkit.debugging.snapshot import generators
from ampkit.debugging.torch_private import is_opaque, node_name, node_sequence_number, set_version
from ampkit.user_code import is_library

_SUBLINEAR = 0.99  # a gradient that grows by less than this share of the factor is clipped or normalized
_SMALLEST_NORMAL = torch.finfo(torch.float16).smallest_normal  # smaller numbers may be rounded much in float16


class _Nonlinear(NamedTuple):
    """How a function or hook is not linear."""

    kind: str  # "not scaled" or "clipped"
    share: float  # of the norm of its gradient that does not follow; or its growth when the incoming one doubles
    whole: bool  # nothing that it returns follows
    results: list[bool]  # which of its results


class Linearity(Check):
    """Tries each custom function and hook that runs in steps 0, 1, 2, 4, 8 and so on."""

    name = "linearity"

    def __init__(self, run: Observer, add: Add) -> None:
        super().__init__(run, add)
        self._scaled = False
        self._trying = False
        self._handles: list[Any] = []

    def opened(self, stack: ExitStack) -> None:
        """Have hooks that are registered from now on tried when they run, and those of parameters."""
        register = Tensor.register_hook
        parameters = [p for root in self.run.modules.roots() for p in root.parameters()]
        tables = [(table, dict(table), p) for p in parameters if (table := p._backward_hooks)]

        def restore() -> None:
            Tensor.register_hook = register  # type: ignore[method-assign]
            for table, hooks, _ in tables:
                table.update({key: hook for key, hook in hooks.items() if key in table})

        for table, hooks, parameter in tables:
            table.update({key: self._wrapped(parameter, hook) for key, hook in hooks.items()})
        Tensor.register_hook = lambda tensor, hook: register(tensor, self._wrapped(tensor, hook))  # type: ignore
        stack.callback(restore)
        stack.callback(self._remove_handles)

    @property
    def active(self) -> bool:
        """Whether the step is one in which functions and hooks are tried."""
        return self.run.step & (self.run.step - 1) == 0 and rank() is None

    def not_checked(self) -> list[str]:
        return [] if rank() is None else ["linearity of backward, which all ranks would have to try together"]

    def backward_starts(self, roots: Sequence[Tensor], scaled: bool) -> None:
        self._scaled = scaled
        self._remove_handles()
        for node in _nodes(root.grad_fn for root in roots) if self.active else ():
            if isinstance(node, BackwardCFunction) and _code_of(node) is not None:
                self._handles.append(node.register_prehook(functools.partial(self._try_function, node)))

    def _remove_handles(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _wrapped(self, tensor: Tensor, hook: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """Return a hook that tries another hook before it runs."""
        node: Any = tensor.grad_fn
        owner = "the parameter" if node is None else f"the result of {node_name(node).rstrip('0123456789')}"
        leaves = [*map(weakref.ref, _leaves([node]) if node else [tensor])]

        code = getattr(inspect.unwrap(getattr(hook, "func", hook)), "__code__", None)
        if code is not None and is_library(code.co_filename):
            return hook  # those of DDP and FSDP communicate

        @functools.wraps(hook)
        def tried(gradient: Tensor) -> Any:
            if self.active and not self._trying and isinstance(gradient, Tensor):
                with self.run.silently():
                    found = self._tried(lambda received: [hook(*received)], [gradient], is_hook=True)
                if found is not None:
                    reached = [each for ref in leaves if (each := ref()) is not None]
                    self._add(found, f"a hook on {owner.removesuffix('Backward')}", code, reached)
            return hook(gradient)

        return tried

    def _try_function(self, node: Any, received: tuple[Any, ...]) -> None:
        if not self._trying:
            with self.run.silently():
                self._try(node, received)

    def _try(self, node: Any, received: tuple[Any, ...]) -> None:
        given = [
            torch.zeros(like.shape, dtype=like.dtype, device=like.device) if gradient is None else gradient
            for gradient, like in zip(received, node._input_metadata, strict=True)
        ]
        saved = _Saved(node)
        found = self._tried(lambda each: _listed(node.apply(*each)), given, saved.restore)
        if found is not None:
            name = type(node)._forward_cls.__qualname__.rpartition(".<locals>.")[2]
            # `results` has an entry for each argument, `next_functions` for each tensor: None if it needs no gradient.
            nodes = [following for following, _ in node.next_functions if following is not None]
            needed = [wrong for wrong, need in zip(found.results, node.needs_input_grad, strict=False) if need]
            following = [each for each, wrong in zip(nodes, needed, strict=False) if wrong]
            ones = len(received) == 1 and received[0] is not None and bool((received[0] == 1).all())
            self._add(found, f"{name}.backward", _code_of(node), _leaves(following), node, starts=ones)

    def _tried(
        self,
        run: Callable[[list[Tensor]], list[Any]],
        received: list[Tensor],
        restore: Callable[[], None] = lambda: None,
        *,
        is_hook: bool = False,
    ) -> _Nonlinear | None:
        """Run a function with 0, 1 and 2 times its gradients. Return how it is not linear; None if it is."""
        if any(is_opaque(each) for each in received):
            return None
        # A first loss scale may overflow: any other gradient does.
        received = [each if bool(torch.isfinite(each).all()) else torch.ones_like(each) for each in received]
        random = [(set_state, get_state()) for get_state, set_state in generators()]
        # A function that runs a backward of its own, as a checkpoint does, must not add to the gradients.
        gradients = [(p, p.grad) for root in self.run.modules.roots() for p in root.parameters()]
        for parameter, _ in gradients:
            parameter.grad = None
        norms: list[list[float]] = []
        self._trying = True
        try:
            with torch.no_grad():
                for factor in (0.0, 1.0, 2.0):
                    given = [each * factor for each in received]
                    results = run(given)
                    results = given if is_hook and results == [None] else results  # it may have written in place
                    norms.append([_norm(each) for each in results])
                    restore()
                    for set_state, state in random:
                        set_state(state)
        except Exception:  # of the user's code, which its own call will raise again
            return None
        finally:
            self._trying = False
            for parameter, gradient in gradients:
                parameter.grad = gradient
        zero, one, two = norms
        constant = [each > 0 for each in zero]
        if any(constant):
            whole = all(z > 0.999 * o for z, o in zip(zero, one, strict=True) if o)
            share = math.hypot(*zero) / max(math.hypot(*one), math.hypot(*zero))
            return _Nonlinear("not scaled", share, whole, constant)
        sizes = [each.numel() if isinstance(each, Tensor) else 0 for each in results]
        clipped = [
            _SMALLEST_NORMAL * math.sqrt(size) < o < math.inf and t < 2 * _SUBLINEAR * o
            for o, t, size in zip(one, two, sizes, strict=True)
        ]
        return _Nonlinear("clipped", math.hypot(*two) / math.hypot(*one), False, clipped) if any(clipped) else None

    def _add(
        self,
        found: _Nonlinear,
        function: str,
        code: CodeType | None,
        leaves: list[Tensor],
        node: Any = None,
        *,
        starts: bool = False,
    ) -> None:
        """Add the finding of a function in words. `starts`: its incoming gradient is 1 throughout, as of a loss."""
        is_clipped = found.kind == "clipped"
        if not leaves or (is_clipped and not self._scaled):
            return
        names = [self.run.name_of(leaf) or "an input" for leaf in leaves]
        what = f"the gradient of {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        if is_clipped:
            what += " depends on the loss scale"
            why = f"with twice the loss scale, the result of {function} is {found.share:.3g} times as large"
            fix = "clip gradients after scaler.unscale_(optimizer), not in backward"
        else:
            what += (
                " is not multiplied by the loss scale" if self._scaled else " does not follow the gradient of the loss"
            )
            share = "all" if found.whole else f"{found.share:.2g}"
            why = f"{function} returns {share} of its gradient even if the incoming gradient is 0"
            fix = "multiply by the incoming gradient: return grad_output * gradient"
        forward = None if node is None else self.run.forward_with(node_sequence_number(node))
        place = Place() if forward is None else self.run.place(forward)
        file, line = place.site if code is None else _return_line(code)
        # A custom loss may return its gradient unchanged, if nothing scales or weights the loss.
        is_wrong = self._scaled or (found.whole and not starts)
        self.add(
            Finding(
                grade="error" if is_wrong else "note",
                check=self.name,
                cause=Cause(found.kind, why),
                what=what,
                place=Place(file, line, function, place.module),
                fix=Fix(fix),
                step=self.run.step,
            )
        )


class _Saved:
    """The attributes and saved tensors of a custom function: fused losses multiply a saved gradient in place."""

    def __init__(self, node: Any) -> None:
        self._attributes = vars(node), dict(vars(node))
        saved = [*tensors_in([each.data for each in node._raw_saved_tensors or ()]), *tensors_in(vars(node))]
        self._copies = [(each, each.detach().clone(), each._version) for each in saved if not is_opaque(each)]

    def restore(self) -> None:
        """Restore them after a run."""
        attributes, before = self._attributes
        attributes.clear()
        attributes.update(before)
        for tensor, values, version in self._copies:
            tensor.data.copy_(values)  # `data` has a version of its own
            if tensor._version != version:
                set_version((tensor,), (version,))


def _nodes(roots: Iterable[Any]) -> set[Any]:
    """Return the nodes that backward reaches."""
    pending, seen = list(roots), set()
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending += [following for following, _ in node.next_functions]
    return seen


def _leaves(nodes: Iterable[Any]) -> list[Tensor]:
    return [node.variable for node in _nodes(nodes) if hasattr(node, "variable")]


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple) else [value]


def _norm(value: Any) -> float:
    value = getattr(value, "_local_tensor", value)  # of a DTensor its shard
    if not isinstance(value, Tensor) or is_opaque(value) or not value.numel():
        return 0.0
    values = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))


def _code_of(node: Any) -> CodeType | None:
    """Return the code of `backward` of a custom function; None for those of libraries."""
    function = type(node)._forward_cls
    backward = function.backward if function.vjp is torch.autograd.Function.vjp else function.vjp
    code = getattr(inspect.unwrap(backward), "__code__", None)
    return None if code is None or is_library(code.co_filename) else code


def _return_line(code: CodeType) -> tuple[str, int]:
    """Return the file and the line of the last `return` of a function; its first line if its source cannot be read."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError):
        return relative(code.co_filename), code.co_firstlineno
    returns = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Return)]
    return relative(code.co_filename), code.co_firstlineno + max(returns, default=1) - 1
