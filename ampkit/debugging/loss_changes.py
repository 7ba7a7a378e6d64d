"""How much the rounding of each module is expected to raise the loss, from one step.

While a module runs, its own operators also compute reference copies, which begin at the values that it was given. So
what leaves it (its result, or an input of a module inside it) has the error d of its own rounding alone. Backward gives
the gradient g there. A row changes the loss by sum(g d), in either direction: over many steps that averages out. What
stays is of second order. The loss is a mean of n terms, and the squared changes of single terms estimate its curvature
(the empirical Fisher information), so the loss is expected to rise by n/2 sum over rows (sum(g d))^2. As a share of the
loss L this is n/2 sum over rows (sum(g d))^2 / L^2, which depends on neither the batch's size nor the loss's unit.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from ampkit.containers import map_tensors
from ampkit.debugging.reference_copies import ReferenceCopies
from ampkit.debugging.torch_private import is_opaque, without_dispatch
from ampkit.torch_private import functorch_level

_SAMPLE = 2**12  # the most elements of a tensor whose errors are kept until backward, but 32 rows
_SMALLEST_LOSS = 0.1  # smaller ones count as this: the losses of some methods are near 0 by chance


class _Copies(ReferenceCopies):
    """The reference copies of one call of a module, which also sees those that outlive the call."""

    def __init__(self, reference: torch.dtype, shared: ReferenceCopies) -> None:
        super().__init__(reference)
        self._shared = shared

    def _copy_of(self, tensor: Tensor) -> Any:
        return super()._copy_of(tensor) or self._shared._copy_of(tensor)


class LossChanges:
    """Collects the expected changes of a step's loss. `enter` and `leave` are hooks of modules.

    Tensors in FP8 keep their copies when the module ends, since modules share them. `step_copies` are the copies of the
    whole step.
    """

    def __init__(self, step_copies: ReferenceCopies) -> None:
        self.reference = step_copies.reference
        self._shared = ReferenceCopies(self.reference)
        self._running = threading.local()
        self.restart(step_copies)

    def restart(self, step_copies: ReferenceCopies) -> None:
        """Begin another step."""
        self._step_copies = step_copies
        self._squares: dict[str, list[Tensor]] = {}  # by module: the terms of its sum
        self._n_terms, self._loss, self._n_backward = 0, 1.0, 0

    def changes(self) -> dict[str, float]:
        """The expected rise of the loss by module, as a share of it, the largest first; inf if its values overflow.

        `""` is code outside of modules, whose change is measured. Synchronizes with the device.
        """
        shares = {name: sum(map(float, terms)) / (self._n_backward or 1) for name, terms in self._squares.items()}
        shares = {name: math.inf if math.isnan(share) else share for name, share in shares.items() if share}
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    @property
    def copies(self) -> ReferenceCopies:
        """The copies of the innermost module that runs in this thread."""
        return self._calls()[-1][1]

    def copies_for(self, result: Tensor) -> ReferenceCopies:
        """Where the copy of an operator's result belongs."""
        return self._shared if result.element_size() == 1 else self.copies

    def enter(self, name: str, args: Any) -> Any:
        """Begin a module's call. Returns its arguments, some of which may be replaced by equal tensors."""
        args = self._inputs(args)
        self._calls().append((name, _Copies(self.reference, self._shared)))
        return args

    @contextmanager
    def keywords(self) -> Iterator[None]:
        """A context in which inputs that a module gets by keyword are noted too: global hooks do not see them."""
        inner: Any = Module.__call__

        def call(module: Module, *args: Any, **kwargs: Any) -> Any:
            return inner(module, *args, **(kwargs if torch.compiler.is_compiling() else self._inputs(kwargs)))

        Module.__call__ = call
        try:
            yield
        finally:
            Module.__call__ = inner

    def leave(self, result: Any) -> Any:
        """End the call of the innermost module. Returns its result, of which tensors may be replaced by equal ones."""
        if len(self._calls()) < 2:
            return result
        name, copies = self._calls().pop()
        return map_tensors(result, lambda tensor: self._leaves(name, copies, tensor))

    def backward_starts(self, loss: Tensor, scale: float) -> None:
        """Note the value and the terms of a loss, which is multiplied by `scale`, and the error outside of modules."""
        self._n_backward += 1
        self._n_terms = _n_terms(loss)
        self._loss = max(abs(float(self._step_copies.read(loss))), _SMALLEST_LOSS * scale)
        if self.copies.has_copy(loss):
            self._add("", (loss.detach().double() - self.copies.read(loss)).abs() / self._loss)

    def _calls(self) -> list[tuple[str, _Copies]]:
        if not hasattr(self._running, "calls"):
            self._running.calls = [("", _Copies(self.reference, self._shared))]
        return self._running.calls

    def _add(self, name: str, square: Tensor) -> None:
        self._squares.setdefault(name, []).append(square)

    def _inputs(self, values: Any) -> Any:
        name, copies = self._calls()[-1]
        return map_tensors(values, lambda tensor: self._leaves(name, copies, tensor))

    def _leaves(self, name: str, copies: ReferenceCopies, tensor: Tensor) -> Tensor:
        """Note the error of a tensor that leaves a module, until backward reaches it.

        A tensor that needs no gradient, such as positions, is replaced by an equal one that does.
        """
        if not (tensor.is_floating_point() and tensor.numel() and torch.is_grad_enabled()):
            return tensor
        if is_opaque(tensor) or functorch_level() is not None:
            return tensor
        with without_dispatch(), torch.no_grad():
            if not copies.has_copy(tensor):
                return tensor
            exact = _rows(copies.read(tensor))
            error = torch.where(torch.isfinite(exact), _rows(tensor).to(exact.dtype) - exact, 0.0)
            copies.read(tensor).copy_(tensor)  # the error counts once: further readers begin at the user's values
            if not error.count_nonzero():
                return tensor
        if not tensor.requires_grad:
            tensor = self._with_gradient(tensor)
        tensor.register_hook(self._at_backward(name, error.bfloat16()))
        return tensor

    def _with_gradient(self, tensor: Tensor) -> Tensor:
        """An equal tensor that requires a gradient, and is no leaf: leaves refuse writes in place."""
        steps = self._step_copies
        with without_dispatch():
            equal = tensor.detach().requires_grad_().clone()
            if steps.has_copy(tensor):
                steps.write(equal, steps.read(tensor), steps.error(tensor), own=False)
        return equal

    def _at_backward(self, name: str, error: Tensor) -> Callable[[Tensor], None]:
        def note(gradient: Tensor) -> None:
            with without_dispatch(), torch.no_grad():
                # A gradient that is not finite is another finding, or the scaler's work.
                slope = _rows(gradient).float().nan_to_num(0.0, 0.0, 0.0)
                squares = ((slope * error).double().sum(1) / self._loss).square()
                n_terms = self._n_terms or len(gradient.reshape(-1, gradient.shape[-1] if gradient.dim() > 1 else 1))
                all_rows = gradient.numel() / error.numel()
                self._add(name, squares.sum() * all_rows * n_terms / 2)

        return note


def _n_terms(loss: Tensor) -> int:
    """The number of terms that a loss is the mean of: targets, or elements; 0 where that is not known."""
    nodes = [loss.grad_fn]
    for node in nodes:  # breadth first
        target, numel = getattr(node, "_saved_target", None), getattr(node, "_saved_self_sym_numel", None)
        weight = getattr(node, "_saved_total_weight", None)  # of a cross entropy: without targets that are ignored
        found = (
            float(weight) if weight is not None and float(weight) else target.numel() if target is not None else numel
        )
        if found or len(nodes) > 100:
            return round(found or 0)
        nodes += [following for following, _ in getattr(node, "next_functions", ()) if following is not None]
    return 0


def _rows(tensor: Tensor) -> Tensor:
    """Rows of a tensor, along its last dimension, the same for each tensor of this shape. A copy."""
    rows = tensor.detach().reshape(-1, tensor.shape[-1] if tensor.dim() > 1 else 1)
    chosen = _sample(len(rows), max(32, _SAMPLE // rows.shape[1]), tensor.device)
    return rows.clone() if chosen is None else rows[chosen]


@functools.lru_cache(maxsize=64)
def _sample(count: int, most: int, device: torch.device) -> Tensor | None:
    """Indices of random rows; None for all. Leaves torch's generators."""
    if count <= most:
        return None
    return torch.randint(count, (most,), generator=torch.Generator().manual_seed(count)).to(device)
