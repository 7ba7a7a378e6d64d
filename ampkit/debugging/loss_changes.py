"""The expected change of the loss that the rounding of each module causes, from one step.

While a module runs, its own operators also compute reference copies, which begin at the values that it was given. So
what leaves it (its result, or an input of a module inside it) has the error d of its own rounding alone. Backward gives
the gradient g there. With independent rounding errors the loss is expected to change by sqrt(sum(g^2 * d^2)): a Taylor
term of first order, in the loss's own unit (nats for a cross entropy).
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ampkit.containers import map_tensors
from ampkit.debugging.reference_copies import ReferenceCopies
from ampkit.torch_internals.operator_tracing import is_opaque, without_dispatch
from ampkit.torch_internals.transforms import functorch_level

_SAMPLE = 2048  # the most elements of a tensor whose errors are kept until backward


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
        self._step_copies = step_copies
        self._shared = ReferenceCopies(self.reference)
        self._running = threading.local()
        self._squares: dict[str, list[Tensor]] = {}  # by module: the terms of its sum

    def changes(self, scale: float) -> dict[str, float]:
        """The expected change for each module of which there is one, by path; inf if its values overflow.

        `scale` is the scale of the loss. Synchronizes with the device.
        """
        roots = {name: math.sqrt(sum(map(float, terms))) / scale for name, terms in self._squares.items()}
        return {
            name: math.inf if math.isnan(change) else change
            for name, change in sorted(roots.items(), key=lambda item: -item[1])
            if change
        }

    def restart(self, step_copies: ReferenceCopies) -> None:
        """Begin another step."""
        self._step_copies = step_copies
        self._squares.clear()

    @property
    def copies(self) -> ReferenceCopies:
        """The copies of the innermost module that runs in this thread."""
        return self._calls()[-1][1]

    def copies_for(self, result: Tensor) -> ReferenceCopies:
        """Where the copy of an operator's result belongs."""
        return self._shared if result.element_size() == 1 else self.copies

    def enter(self, name: str, args: Any) -> Any:
        """Begin a module's call. Returns its arguments, some of which may be replaced by equal tensors."""
        calls = self._calls()
        caller, copies = calls[-1]
        calls.append((name, _Copies(self.reference, self._shared)))
        return map_tensors(args, lambda tensor: self._leaves(caller, copies, tensor))

    def leave(self, result: Any) -> Any:
        """End the call of the innermost module. Returns its result, of which tensors may be replaced by equal ones."""
        calls = self._calls()
        if len(calls) < 2:
            return result
        name, copies = calls.pop()
        return map_tensors(result, lambda tensor: self._leaves(name, copies, tensor))

    def backward_starts(self, loss: Tensor) -> None:
        """Add the error of the loss itself, whose gradient is 1: that of operators outside of modules."""
        if self.copies.has_copy(loss):
            self._add("", (loss.double() - self.copies.read(loss)).square())

    def _calls(self) -> list[tuple[str, _Copies]]:
        if not hasattr(self._running, "calls"):
            self._running.calls = [("", _Copies(self.reference, self._shared))]
        return self._running.calls

    def _add(self, name: str, square: Tensor) -> None:
        self._squares.setdefault(name, []).append(square)

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
            chosen = _sample(tensor.numel(), tensor.device)
            value, exact = _chosen(tensor, chosen), _chosen(copies.read(tensor), chosen)
            copies.read(tensor).copy_(tensor)  # the error counts once: further readers begin at the user's values
            error = torch.where(torch.isfinite(exact), value.to(exact.dtype) - exact, 0.0)
            if not error.count_nonzero():
                return tensor
            factor = tensor.numel() / error.numel()
        if not tensor.requires_grad:
            tensor = self._with_gradient(tensor)
        tensor.register_hook(self._at_backward(name, chosen, error, factor))
        return tensor

    def _with_gradient(self, tensor: Tensor) -> Tensor:
        """An equal tensor that requires a gradient, and is no leaf: leaves refuse writes in place."""
        steps = self._step_copies
        with without_dispatch():
            equal = tensor.detach().requires_grad_().clone()
            if steps.has_copy(tensor):
                steps.write(equal, steps.read(tensor), steps.error(tensor), own=False)
        return equal

    def _at_backward(self, name: str, chosen: Any, error: Tensor, factor: float) -> Callable[[Tensor], None]:
        def note(gradient: Tensor) -> None:
            with without_dispatch(), torch.no_grad():
                # A gradient that is not finite is another finding, or the scaler's work.
                slope = _chosen(gradient, chosen).to(error.dtype).nan_to_num(0.0, 0.0, 0.0)
                self._add(name, (slope * error).double().square().sum() * factor)

        return note


def _chosen(tensor: Tensor, chosen: Tensor | None) -> Tensor:
    flat = tensor.detach().reshape(-1)
    return flat.clone() if chosen is None else flat[chosen]


@functools.lru_cache(maxsize=64)
def _sample(numel: int, device: torch.device) -> Tensor | None:
    """Indices of random elements, the same for each tensor of this size; None for all. Leaves torch's generators."""
    if numel <= _SAMPLE:
        return None
    return torch.randint(numel, (_SAMPLE,), generator=torch.Generator().manual_seed(numel)).to(device)
