"""Backward of one graph with several scales, to find gradients that do not follow the gradient that comes in.

Backward is linear in the gradient that it starts with: twice that gradient doubles all others, and 0 makes all of them
0. A custom function that returns a gradient which it computed in forward, or a hook that clips, is not linear, so its
gradient is wrong wherever a loss is scaled, divided or weighted, and nothing raises an error. Here a graph runs with
the factors 0, 1 and 2. What is left with 0 was never multiplied by what came in, however small its share is.
"""

from __future__ import annotations

import ast
import gc
import inspect
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import CodeType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from ampkit.debugging.call_sites import Caller, find_caller, relative
from ampkit.debugging.operator_calls import OperatorObserver
from ampkit.debugging.operator_facts import tensors_in
from ampkit.debugging.report import Problem, Suggestion
from ampkit.debugging.snapshot import generators
from ampkit.debugging.torch_private import (
    ObserverMode,
    is_opaque,
    node_name,
    node_sequence_number,
    set_version,
)
from ampkit.user_code import is_library

_SUBLINEAR = 0.99  # a gradient that grows by less than this share of the factor is clipped or normalized
_SMALLEST_NORMAL = torch.finfo(torch.float16).smallest_normal  # smaller numbers may be rounded much in float16

_Node = Any
_Place = Literal["entered", "left"]  # gradients that came into a node, or that it returned


@dataclass(frozen=True)
class ScaleFinding:
    """A custom function, or a hook, that returns a gradient which does not follow the one that comes in.

    `kind` is "constant" if a part of its gradient is there even if 0 comes in, "clipped" if it grows by less than what
    comes in.
    """

    kind: Literal["constant", "clipped"]
    function: str  # in words
    file: str  # of the line that returns the gradient; "" if it is not known
    line: int
    number: int  # sequence number of the node, which is that of its forward operator
    parameters: tuple[Tensor, ...]  # leaves whose gradients are wrong
    share: float  # of the norm of its gradient that does not follow
    whole: bool  # nothing that it returns follows
    starts: bool  # the gradient that comes in is 1 throughout, as at a loss that nothing multiplies


def compare_scales(roots: Sequence[Tensor], gradients: Sequence[Tensor | None] | None = None) -> list[ScaleFinding]:
    """Run backward of a graph with the gradients that it starts with times 0, 1 and 2.

    To be called before `backward`, with the same arguments. Graph, `.grad` and random number generators stay as they
    are, and so does what custom functions saved, of which a copy is made meanwhile. Hooks on tensors run three times
    more. Synchronizes with the device a few times.

    Args:
        roots: the losses, or other tensors that backward starts at.
        gradients: the gradient of each; None is ones.

    Returns:
        A finding for each custom function and hook that is not linear in what comes in, and that reaches a leaf.

    Raises:
        RuntimeError: if backward cannot run repeatedly, or not under `torch.autograd.grad`, as with a checkpoint with
            `use_reentrant=True`.
    """
    starts = [
        (root, torch.ones_like(root) if gradient is None else gradient)
        for root, gradient in zip(roots, gradients or [None] * len(roots), strict=True)
        if root.grad_fn is not None
    ]
    graph = _Graph(root.grad_fn for root, _ in starts)
    if not graph.leaves:
        return []
    kept = _Kept(graph.functions)
    zero, one, two = (_Pass(graph, starts, factor, kept) for factor in (0.0, 1.0, 2.0))

    def is_constant(place: _Place, node: _Node, number: int) -> bool:
        return zero.norm(place, node, number) > 0

    def is_clipped(place: _Place, node: _Node, number: int) -> bool:
        first, second = one.norm(place, node, number), two.norm(place, node, number)
        enough = _SMALLEST_NORMAL * math.sqrt(one.size(place, node, number))
        return enough < first < math.inf and second < 2 * _SUBLINEAR * first

    origins: dict[_Origin, tuple[Literal["constant", "clipped"], float]] = {}
    for origin in graph.origins(is_constant):
        share = zero.total(origin) / max(one.total(origin), zero.total(origin))
        origins[origin] = ("constant", share)
    for origin in graph.origins(is_clipped):
        share = 2 - two.total(origin) / one.total(origin)
        origins.setdefault(origin, ("clipped", min(1.0, share)))
    hooks = {origin.node for origin in origins if origin.is_hook}
    callers = _Pass(graph, starts, 1.0, kept, noting=hooks).callers if hooks else {}
    findings = []
    for origin, (kind, share) in origins.items():
        differs = is_constant if kind == "constant" else is_clipped
        leaves = tuple(graph.leaves[node] for node in graph.reached(origin.node) if differs("entered", node, 0))
        changed = [(zero.total(origin), one.total(origin))]
        if not origin.is_hook:
            outputs = range(len(origin.node.next_functions))
            changed = [(zero.norm("left", origin.node, j), one.norm("left", origin.node, j)) for j in outputs]
        if leaves:
            file, line = _place(origin, graph, callers)
            findings.append(
                ScaleFinding(
                    kind=kind,
                    function=_described(origin, graph),
                    file=file,
                    line=line,
                    number=node_sequence_number(origin.node),
                    parameters=leaves,
                    share=share,
                    whole=kind == "constant" and all(left > 0.999 * usual for left, usual in changed),
                    starts=one.is_ones(origin.node),
                )
            )
    return findings


class TwoScales:
    """Compares the backwards of a step with several scales. Costs more than a pass over each result."""

    def __init__(self, observer: OperatorObserver[Any]) -> None:
        self.problems: list[Problem] = []
        self.unseen = ""  # what it could not look at, and why
        self._observer = observer

    def before_backward(self, roots: Sequence[Tensor], gradients: Any, scaled: bool) -> None:
        """Look at a backward that is about to run."""
        ranks = torch.distributed
        if ranks.is_available() and ranks.is_initialized() and ranks.get_world_size() > 1:
            self.unseen = "backward with several scales, which all ranks would have to run at once"
            return
        try:
            starts = (gradients,) if isinstance(gradients, Tensor) else gradients
            findings = compare_scales(roots, starts)
        except Exception as error:  # of the user's functions
            self.unseen = f"backward with several scales: {str(error).partition(chr(10))[0][:100]}"
            return
        self.problems += [problem for each in findings if (problem := self._problem(each, scaled)) is not None]

    def _problem(self, finding: ScaleFinding, scaled: bool) -> Problem | None:
        """The problem of a finding; None where it does no harm without a scaler."""
        names = [self._observer._name_of(parameter) or "an input" for parameter in finding.parameters]
        what = f"the gradient of {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        if finding.kind == "clipped":
            if not scaled:
                return None
            what += " depends on the loss scale"
            why = (
                f"with twice the loss scale, what {finding.function} returns is {2 - finding.share:.3g} times as large"
            )
            advice = "clip gradients after scaler.unscale_(optimizer), not in backward"
        else:
            what += " is not multiplied by the loss scale" if scaled else " does not follow the gradient of the loss"
            share = "all" if finding.whole else f"{finding.share:.2g}"
            why = f"{finding.function} returns {share} of its gradient even if the gradient that comes in is 0"
            advice = "multiply by the gradient that comes in: return grad_output * gradient"
        # A custom loss may return its gradient as it is, if nothing scales or weights the loss.
        wrong = scaled or (finding.whole and not finding.starts)
        problem = Problem(
            "wrong" if wrong else "note",
            "two scales",
            "not scaled",
            what,
            why,
            finding.file,
            finding.line,
            suggestion=Suggestion(advice, evidence="not tried"),
            step=self._observer.step,
        )
        forward = self._observer._forward.get(finding.number)
        if forward is not None:
            fields = self._observer._operation_fields(forward)
            problem.module, problem.op = fields["module"], finding.function
            if not problem.file:
                problem.file, problem.line = fields["file"], fields["line"]
        return problem


class _Origin(NamedTuple):
    """Where a gradient begins to differ: a node, or a hook on a gradient that comes into it."""

    node: _Node
    is_hook: bool


class _Graph:
    """The nodes that backward reaches, with the edges between them."""

    def __init__(self, roots: Iterable[_Node]) -> None:
        self.sources: dict[_Node, dict[int, list[tuple[_Node, int]]]] = {}  # by node and input: which outputs add up
        pending = list(roots)
        while pending:
            node = pending.pop()
            if node in self.sources:
                continue
            self.sources[node] = {}
            pending += [following for following, _ in node.next_functions if following is not None]
        for node in self.sources:
            for output, (following, number) in enumerate(node.next_functions):
                if following is not None:
                    self.sources[following].setdefault(number, []).append((node, output))
        leaves = [node for node in self.sources if node_name(node).endswith("AccumulateGrad")]
        self.leaves: dict[_Node, Tensor] = {node: node.variable for node in leaves}
        self.functions = [node for node in self.sources if _backward_of(node) is not None]

    def origins(self, differs: Callable[[_Place, _Node, int], bool]) -> Iterator[_Origin]:
        """The custom functions and the hooks where gradients begin to differ. Torch's own operators are linear."""
        for node in self.functions:
            left = any(differs("left", node, output) for output in range(len(node.next_functions)))
            if left and not any(differs("entered", node, number) for number in range(len(node._input_metadata))):
                yield _Origin(node, False)
        for node, inputs in self.sources.items():
            for number, sources in inputs.items():
                if differs("entered", node, number) and not any(differs("left", *source) for source in sources):
                    yield _Origin(node, True)

    def reached(self, node: _Node) -> Iterator[_Node]:
        """The leaves that gradients of a node go to."""
        pending, seen = [node], set()
        while pending:
            each = pending.pop()
            if each in seen or each is None:
                continue
            seen.add(each)
            pending += [following for following, _ in each.next_functions]
            if each in self.leaves:
                yield each


class _Pass:
    """One backward, with the norms of all gradients. `noting`: nodes for which `callers` gets the line of a hook."""

    def __init__(
        self,
        graph: _Graph,
        starts: list[tuple[Tensor, Tensor]],
        factor: float,
        kept: _Kept,
        noting: Iterable[_Node] = (),
    ) -> None:
        self._norms: dict[tuple[_Place, _Node], list[float]] = {}
        self._sizes: dict[tuple[_Place, _Node], list[int]] = {}
        self._pending: list[Tensor] = []  # norms that are not on the host yet
        self._ones: dict[_Node, Tensor] = {}
        self.callers: dict[_Node, Caller] = {}
        inside = _CallersInside()
        hooks = [node.register_hook(partial(self._note, node)) for node in graph.sources if node not in graph.leaves]
        hooks += [node.register_hook(inside.forget) for node in graph.sources if noting]
        hooks += [node.register_prehook(partial(self._note_caller, inside, node)) for node in noting]
        try:
            with inside:
                gradients = torch.autograd.grad(
                    [root for root, _ in starts],
                    list(graph.leaves.values()),
                    [gradient * factor for _, gradient in starts],
                    retain_graph=True,
                    allow_unused=True,
                )
        finally:
            for hook in hooks:
                hook.remove()
            kept.restore()
        for node, gradient in zip(graph.leaves, gradients, strict=True):
            self._measure("entered", node, [gradient])
        del gradients
        norms = iter(torch.stack([norm.to("cpu") for norm in self._pending]).tolist() if self._pending else [])
        for values in self._norms.values():
            values[:] = [next(norms) if value else 0.0 for value in values]
        self._pending.clear()

    def norm(self, place: _Place, node: _Node, number: int) -> float:
        """The norm of a gradient; 0.0 where there is none."""
        norms = self._norms.get((place, node), ())
        return norms[number] if number < len(norms) else 0.0

    def size(self, place: _Place, node: _Node, number: int) -> int:
        """The number of elements of a gradient."""
        return self._sizes[place, node][number]

    def total(self, origin: _Origin) -> float:
        """The norm of all gradients that a function returns, or of those that a hook has changed."""
        return math.hypot(*self._norms.get(("entered" if origin.is_hook else "left", origin.node), ()))

    def is_ones(self, node: _Node) -> bool:
        """Whether the gradient that comes into a custom function is 1 throughout."""
        ones = self._ones.get(node)
        return ones is not None and bool(ones)

    def _note(self, node: _Node, returned: Any, received: Any) -> None:
        self._measure("left", node, returned)
        self._measure("entered", node, received)
        if isinstance(node, BackwardCFunction) and len(received) == 1 and isinstance(received[0], Tensor):
            self._ones[node] = (received[0] == 1).all()

    @torch.no_grad()
    def _measure(self, place: _Place, node: _Node, gradients: Iterable[Any]) -> None:
        tensors = [getattr(each, "_local_tensor", each) for each in gradients]  # of a DTensor its shard
        readable = [each if each is not None and not is_opaque(each) and each.numel() else None for each in tensors]
        self._norms[place, node] = [float(each is not None) for each in readable]
        self._sizes[place, node] = [0 if each is None else each.numel() for each in readable]
        self._pending += [_norm(each) for each in readable if each is not None]

    def _note_caller(self, inside: _CallersInside, node: _Node, received: Any) -> None:
        if inside.last is not None:
            self.callers[node] = inside.last


def _norm(gradient: Tensor) -> Tensor:
    values = torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
    return torch.linalg.vector_norm(values, dtype=torch.float64)


class _CallersInside(ObserverMode):
    """Notes the last line of the user's code that runs inside of backward."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Caller | None = None

    def forget(self, *gradients: Any) -> None:
        """Forget the line: another node has run."""
        self.last = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        caller = find_caller(2)
        if caller.code is not None and not caller.outside:
            self.last = caller
        return func(*args, **(kwargs or {}))


# --- who wrote a function or a hook


def _backward_of(node: _Node) -> CodeType | None:
    """The code of `backward` of a custom function that is not torch's own; None for other nodes."""
    function: Any = getattr(type(node), "_forward_cls", None) if isinstance(node, BackwardCFunction) else None
    if function is None:
        return None
    backward = function.backward if function.vjp is torch.autograd.Function.vjp else function.vjp
    code = getattr(inspect.unwrap(backward), "__code__", None)
    return None if code is None or is_library(code.co_filename) else code


def _described(origin: _Origin, graph: _Graph) -> str:
    if not origin.is_hook:
        return f"{type(origin.node)._forward_cls.__qualname__.rpartition('.<locals>.')[2]}.backward"
    if origin.node in graph.leaves:
        return "a hook on the parameter"
    return f"a hook on the result of {node_name(origin.node).rstrip('0123456789').removesuffix('Backward')}"


def _place(origin: _Origin, graph: _Graph, callers: dict[_Node, Caller]) -> tuple[str, int]:
    """The line that returns the gradient; of a hook on a tensor that is no leaf, the last line that runs there."""
    if not origin.is_hook:
        code = _backward_of(origin.node)
        return ("", 0) if code is None else _return_line(code)
    for hook in (getattr(graph.leaves.get(origin.node), "_backward_hooks", None) or {}).values():
        code = getattr(hook, "__code__", None)
        if code is not None:
            return _return_line(code)
    caller = callers.get(origin.node)
    return caller.line() if caller is not None else ("", 0)


def _return_line(code: CodeType) -> tuple[str, int]:
    """The file and the last `return` of a function; its first line if the source cannot be read."""
    line = code.co_firstlineno
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError):
        return relative(code.co_filename), line
    returns = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Return)]
    return relative(code.co_filename), line + max(returns, default=1) - 1


# --- what stays as it is


class _Kept:
    """Random number generators, gradients of tensors that retain them, and the state of custom functions.

    Fused losses multiply a gradient that they saved in place, which would leave it 0 after a backward with 0.
    """

    def __init__(self, functions: Iterable[_Node]) -> None:
        self._random = [(set_state, get_state()) for get_state, set_state in generators()]
        self._attributes = [(vars(node), dict(vars(node))) for node in functions]
        saved = [tensor for node in functions for tensor in (*_saved_tensors(node), *tensors_in(vars(node)))]
        self._retained = [(each, each.grad) for each in gc.get_objects() if type(each) is Tensor and each.retains_grad]
        saved += [gradient for _, gradient in self._retained if gradient is not None]
        self._copies = [(each, each.detach().clone(), each._version) for each in saved if not is_opaque(each)]

    def restore(self) -> None:
        """Restore everything after a backward."""
        for tensor, gradient in self._retained:
            tensor.grad = gradient
        for attributes, before in self._attributes:
            attributes.clear()
            attributes.update(before)
        for tensor, values, version in self._copies:
            tensor.data.copy_(values)  # `data` has a version of its own
            if tensor._version != version:
                set_version((tensor,), (version,))
        for set_state, state in self._random:
            set_state(state)


def _saved_tensors(node: _Node) -> list[Tensor]:
    """What a custom function saved, without running hooks such as those of a checkpoint."""
    return tensors_in([saved.data for saved in node._raw_saved_tensors or ()])
