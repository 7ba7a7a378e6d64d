"""Steps taken as the last one was: what a parameter group's lists are is found out once, and then only looked over.

Nothing is remembered in place of being read: parameters, gradients and the entries of their state are taken anew from
where users can change them. What is saved is asking of each tensor, every time, all that a kernel relies on.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from ampkit.gradients import kernels
from ampkit.gradients.amp_optimizers import StepScalars
from ampkit.optim import _scaled
from ampkit.optim._scaled import Row, ScaledStep

_TENSOR = {Tensor}


class PlannedGroup:
    """The parameters of a group that had gradients, their entries of state by name, and the kernels' plan for them.

    `names` end with "step" where steps are counted. The optimizer's `KnownState` vouches for `states`.
    """

    def __init__(
        self, group: dict[str, Any], rows: Sequence[Row], states: Sequence[dict[str, Any]], names: Sequence[str],
        copies: list[Tensor] | None, plan: Any, impl: str,
    ) -> None:
        self.impl = impl
        self.device: torch.device = plan.device
        self._everyone = list(group["params"])
        self._params = [row.param for row in rows]
        self._states = states
        self._names = names
        self._n_moments = len(names) - ("step" in names)
        self._copies = [] if copies is None else [copies]
        self._plan = plan

    def run(self, group: dict[str, Any], names: Sequence[str] | None, options: dict[str, Any]) -> bool:
        """Step the group; False, and nothing done, where anything is not as it was planned. `names` as when planned."""
        params = group["params"]
        if names is None or names != self._names or not same(params, self._everyone):
            return False
        grads = [param.grad for param in params]
        types = set(map(type, grads))
        if types != _TENSOR:
            if not types <= {Tensor, type(None)}:
                return False
            params = [param for param, grad in zip(params, grads, strict=True) if grad is not None]
            grads = [grad for grad in grads if grad is not None]
        if params is not group["params"] and not same(params, self._params):
            return False
        if len(params) != len(self._params):
            return False
        states = self._states
        try:
            entries = [[state[name] for state in states] for name in names]
        except KeyError:  # an entry has been taken out
            return False
        n = self._n_moments
        if not self._plan.run([params, grads, *entries[:n], *self._copies, *entries[n:]], options):
            return False
        # As any in-place operation would: what was saved for backward is stale now.
        torch.autograd.graph.increment_version(params)
        return True


class KnownState:
    """Which dict of state belongs to which parameter, as of the last step."""

    def __init__(self) -> None:
        self._params: list[Tensor] = []
        self._states: list[dict[str, Any]] = []

    def is_still(self, state: dict[Tensor, dict[str, Any]]) -> bool:
        """Whether an optimizer's state has the same dicts for the same parameters; what they hold is not looked at."""
        return same(list(state), self._params) and same(list(state.values()), self._states)

    def remember(self, state: dict[Tensor, dict[str, Any]]) -> None:
        """What `is_still` compares with from now on."""
        self._params, self._states = list(state), list(state.values())


class PlannedStep(ScaledStep, ABC):
    """Mixin for an optimizer whose groups are stepped by plans where one call of a kernel serves a whole group."""

    state: Any
    _planned: dict[int, PlannedGroup]
    _known_state: KnownState

    _warned = False

    def _forget_plans(self) -> None:
        self._planned = {}  # by number of the group
        self._known_state = KnownState()

    @abstractmethod
    def _names(self, group: dict[str, Any]) -> tuple[str, ...] | None:
        """The entries of state that a plan steps, "step" last; None where the group needs more than a plan has."""

    @abstractmethod
    def _options(self, group: dict[str, Any], scalars: StepScalars, device: torch.device) -> dict[str, Any]:
        """What the kernels take beside lists."""

    @abstractmethod
    def _states(self, rows: Sequence[Row], group: dict[str, Any], device: torch.device) -> list[dict[str, Any]]:
        """The state of each parameter, made where there is none, as the kernels want it."""

    @abstractmethod
    def _plan(self, group: dict[str, Any], lists: list[list[Tensor]], copies: list[Tensor] | None) -> Any:
        """The kernels' plan for parameters, gradients and the entries that `_names` names; None: they have none."""

    @abstractmethod
    def _step_rows(
        self, group: dict[str, Any], device: torch.device, rows: list[Row], scalars: StepScalars, *, triton: bool
    ) -> None:
        """Step rows of one device in whatever way serves them."""

    def _step_groups(self) -> None:
        scalars = StepScalars.of(self)
        on_device: dict[torch.device, StepScalars] = {}
        if self._planned and not self._known_state.is_still(self.state):
            self._planned.clear()
        all_planned = True
        for number, group in enumerate(self.param_groups):
            planned = self._planned.get(number)
            if planned is not None:
                device = planned.device
                if device not in on_device:
                    on_device[device] = scalars.on(device)
                if planned.impl is self.impl and planned.run(
                    group, self._names(group), self._options(group, on_device[device], device)
                ):
                    continue
                del self._planned[number]
            all_planned = False
            self._step_anew(number, group, scalars)
        if not all_planned:
            self._known_state.remember(self.state)

    @torch.no_grad()
    def _step_anew(self, number: int, group: dict[str, Any], scalars: StepScalars) -> None:
        """Step a group whose lists nobody knows, and plan its next steps if that can be done."""
        by_device = _scaled.rows_by_device(group, type(self).__name__)
        for device, rows in by_device.items():
            here = scalars.on(device)
            triton = kernels.uses_triton(self.impl, device)
            if not isinstance(group["lr"], Tensor) and is_capturing(device):
                self._warn_of_frozen_lr()
            planned = self._planned_group(group, device, rows) if triton and len(by_device) == 1 else None
            if planned is not None and planned.run(group, self._names(group), self._options(group, here, device)):
                self._planned[number] = planned
            else:
                self._step_rows(group, device, rows, here, triton=triton)

    def _warn_of_frozen_lr(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"ampkit.optim.{type(self).__name__}.step() is captured in a CUDA graph with a learning rate that is a "
                "number: every replay will use this one, whatever a scheduler sets. Pass lr=torch.tensor(...) on the "
                "device and change it in place.",
                stacklevel=5,
            )

    def _planned_group(self, group: dict[str, Any], device: torch.device, rows: list[Row]) -> PlannedGroup | None:
        """A plan for these rows; None where one call of a kernel does not serve all of them as they are."""
        parts = list(_scaled.split_by_copy(rows, self._copies))
        names = self._names(group)
        plain = all(row.local is row.param and type(row.grad) is Tensor for row in rows)
        if names is None or len(parts) != 1 or not plain:
            return None
        states = self._states(rows, group, device)
        entries = [[state[name] for state in states] for name in names]
        lists = [[row.param for row in rows], [row.grad for row in rows], *entries]
        (_, copies), = parts
        plan = self._plan(group, lists, copies)
        return None if plan is None else PlannedGroup(group, rows, states, names, copies, plan, self.impl)


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched on this device now goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two lists hold the same objects."""
    return len(some) == len(others) and all(map(is_, some, others))
