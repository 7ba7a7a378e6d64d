"""Custom functions whose gradient does not follow the incoming gradient.

Backward is linear: 0 gives 0. Torch's own operators are linear. A custom function that returns a gradient which it
computed in forward is not, and its gradient is wrong whenever a loss is scaled, divided or weighted. Each of them is
tried when it runs, with its incoming gradient and with 0.
"""

from __future__ import annotations

import dis
import functools
import inspect
import math
from collections.abc import Sequence
from contextlib import ExitStack
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from ampkit.debugging.checks.check import Add, Check
from ampkit.debugging.finding import Cause, Place
from ampkit.debugging.observe.autograd_graph import leaves_from, nodes_from
from ampkit.debugging.observe.call_sites import relative
from ampkit.debugging.observe.observer import Observer
from ampkit.debugging.observe.operator_properties import tensors_in
from ampkit.debugging.observe.ranks import rank
from ampkit.debugging.snapshot import generators
from ampkit.debugging.torch_private import is_opaque, node_sequence_number, set_version
from ampkit.torch_private import local_tensors
from ampkit.user_code import is_library


class _Nonlinear(NamedTuple):
    """How a function is not linear."""

    share: float  # of the norm of its gradient that does not follow
    whole: bool  # nothing that it returns follows
    results: list[bool]  # which of its results


class Linearity(Check):
    """Tries each custom function that runs in steps 0, 1, 2, 4, 8 and so on."""

    name = "linearity"

    def __init__(self, run: Observer, add: Add) -> None:
        super().__init__(run, add)
        self._scaled = False
        self._trying = False
        self._handles: list[Any] = []

    def opened(self, stack: ExitStack) -> None:
        stack.callback(self._remove_handles)

    @property
    def active(self) -> bool:
        """Whether the step is one in which functions are tried."""
        return self.run.step & (self.run.step - 1) == 0 and rank() is None

    def not_checked(self) -> list[str]:
        return [] if rank() is None else ["linearity of backward, which all ranks would have to try together"]

    def backward_starts(self, roots: Sequence[Tensor], scaled: bool) -> None:
        self._scaled = scaled
        self._remove_handles()
        for node in nodes_from(root.grad_fn for root in roots) if self.active else ():
            if isinstance(node, BackwardCFunction) and _code_of(node) is not None:
                self._handles.append(node.register_prehook(functools.partial(self._try, node)))

    def _remove_handles(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _try(self, node: Any, received: tuple[Any, ...]) -> None:
        if self._trying:
            return
        given = [
            torch.zeros(like.shape, dtype=like.dtype, device=like.device) if gradient is None else gradient
            for gradient, like in zip(received, node._input_metadata, strict=True)
        ]
        with self.run.silently():
            found = self._tried(node, given)
            if found is not None:
                ones = len(received) == 1 and received[0] is not None and bool((received[0] == 1).all())
                self._add(found, node, starts=ones)

    def _tried(self, node: Any, received: list[Tensor]) -> _Nonlinear | None:
        """Run a function with 0 and with its gradients. Return how it is not linear; None if it is."""
        if any(is_opaque(each) for each in received):
            return None
        # A first loss scale may overflow: any other gradient does.
        received = [each if bool(torch.isfinite(each).all()) else torch.ones_like(each) for each in received]
        saved = _Saved(node)
        random = [(set_state, get_state()) for get_state, set_state in generators()]
        # A function that runs a backward of its own, as a checkpoint does, must not add to the gradients.
        gradients = [(p, p.grad) for root in self.run.modules.roots() for p in root.parameters()]
        for parameter, _ in gradients:
            parameter.grad = None
        norms: list[list[float]] = []
        self._trying = True
        try:
            with torch.no_grad():
                for factor in (0.0, 1.0):
                    results = node.apply(*[each * factor for each in received])
                    norms.append([_norm(each) for each in (results if isinstance(results, tuple) else [results])])
                    saved.restore()
                    for set_state, state in random:
                        set_state(state)
        except Exception:  # of the user's code, which its own call will raise again
            return None
        finally:
            self._trying = False
            for parameter, gradient in gradients:
                parameter.grad = gradient
        zero, one = norms
        if not any(zero):
            return None
        whole = all(z > 0.999 * o for z, o in zip(zero, one, strict=True) if o)
        return _Nonlinear(math.hypot(*zero) / max(math.hypot(*one), math.hypot(*zero)), whole, [z > 0 for z in zero])

    def _add(self, found: _Nonlinear, node: Any, *, starts: bool) -> None:
        """Add the finding of a function. `starts`: its incoming gradient is 1 throughout, as of a loss."""
        # `results` has an entry for each argument, `next_functions` for each tensor: None if it needs no gradient.
        nodes = [following for following, _ in node.next_functions if following is not None]
        needed = [wrong for wrong, need in zip(found.results, node.needs_input_grad, strict=False) if need]
        reached = leaves_from(each for each, wrong in zip(nodes, needed, strict=False) if wrong)
        names = [self.run.name_of(each) or "an input" for each in reached]
        if not names:
            return
        function = f"{type(node)._forward_cls.__qualname__.rpartition('.<locals>.')[2]}.backward"
        forward, code = self.run.forward_with(node_sequence_number(node)), _code_of(node)
        place = Place() if forward is None else self.run.place(forward)
        file, line = place.site if code is None else _return_line(code)
        why = (
            f"{function} returns {'all' if found.whole else f'{found.share:.2g}'} of its gradient even if the incoming "
        )
        follows = "is not multiplied by the loss scale" if self._scaled else "does not follow the gradient of the loss"
        # A custom loss may return its gradient unchanged, if nothing scales or weights the loss.
        is_wrong = self._scaled or (found.whole and not starts)
        cause = Cause("not scaled", f"{why}gradient is 0")
        what = f"the gradient of {names[0]}{f' and {len(names) - 1} more' * (len(names) > 1)} {follows}"
        fix, at = (
            "multiply by the incoming gradient: return grad_output * gradient",
            Place(file, line, function, place.module),
        )
        self.found(at, "error" if is_wrong else "note", cause, what, fix)


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


def _norm(value: Any) -> float:
    if not isinstance(value, Tensor):
        return 0.0
    (value,) = local_tensors([value])
    if is_opaque(value) or not value.numel():
        return 0.0
    values = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))


def _code_of(node: Any) -> CodeType | None:
    """Return the code of `backward` of a custom function; None for functions of libraries."""
    function = type(node)._forward_cls
    backward = function.backward if function.vjp is torch.autograd.Function.vjp else function.vjp
    code = getattr(inspect.unwrap(backward), "__code__", None)
    return None if code is None or is_library(code.co_filename) else code


def _return_line(code: CodeType) -> tuple[str, int]:
    """Return the file and the line of the last `return` of a function."""
    returns = [each.positions for each in dis.get_instructions(code) if each.opname.startswith("RETURN_")]
    lines = [each.lineno for each in returns if each is not None and each.lineno is not None]
    return relative(code.co_filename), max(lines, default=code.co_firstlineno)
