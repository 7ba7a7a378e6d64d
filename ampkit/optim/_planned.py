"""Steps taken as the last one was: what a parameter group's lists are is found out once, and then only looked over.

Nothing is remembered in place of being read: parameters, gradients and the entries of their state are taken anew from
where users can change them. What is saved is asking of each tensor, every time, all that a kernel relies on.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

import ampkit_kernels as kernels
from ampkit.gradients.amp_optimizers import StepScalars
from ampkit.optim import _scaled
from ampkit.optim._scaled import Row, ScaledStep

_TENSOR = {Tensor}


class PlannedGroup:
    """The parameters of a group that had gradients, their entries of state by name, and the kernels' plans for them.

    One plan for rows without a copy to write, one for rows with one. `names` end with "step" where steps are counted.
    The optimizer's `KnownState` vouches for `states`.
    """

    def __init__(
        self, group: dict[str, Any], rows: Sequence[Row], states: Sequence[dict[str, Any]], names: Sequence[str],
        parts: Sequence[PlannedPart], impl: str,
    ) -> None:
        self.impl = impl
        self.device: torch.device = parts[0].plan.device
        self._everyone = list(group["params"])
        self._params = [row.param for row in rows]
        self._states = states
        self._names = names
        self._n_moments = len(names) - ("step" in names)
        self._parts = parts

    def run(
        self, group: dict[str, Any], names: Sequence[str] | None, options: dict[str, Any]
    ) -> list[Tensor] | None:
        """Step the group. Returns those stepped: fewer than have gradients where something is not as it was planned.

        None: all of them are. `names` as when planned.
        """
        params = group["params"]
        if names is None or names != self._names or not same(params, self._everyone):
            return []
        grads = [param.grad for param in params]
        types = set(map(type, grads))
        if types != _TENSOR:
            if not types <= {Tensor, type(None)}:
                return []
            params = [param for param, grad in zip(params, grads, strict=True) if grad is not None]
            grads = [grad for grad in grads if grad is not None]
        if params is not group["params"] and not same(params, self._params):
            return []
        if len(params) != len(self._params):
            return []
        states = self._states
        try:
            entries = [[state[name] for state in states] for name in names]
        except KeyError:  # an entry has been taken out
            return []
        n = self._n_moments
        for part, (numbers, copies, plan) in enumerate(self._parts):
            lists = [params, grads, *entries]
            if len(numbers) != len(params):
                lists = [[column[i] for i in numbers] for column in lists]
            if not plan.run([*lists[: n + 2], *copies, *lists[n + 2 :]], options):
                return [params[i] for before in self._parts[:part] for i in before.numbers]
            # As any in-place operation would: what was saved for backward is stale now.
            torch.autograd.graph.increment_version(lists[0])
        return None


class PlannedPart(NamedTuple):
    """Rows of a group by number, the list of their copies if there are any, and the kernels' plan."""

    numbers: list[int]
    copies: list[list[Tensor]]
    plan: Any


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
        """Step every group, and have the casts written that sources keep."""
        if not self._sources or torch.compiler.is_compiling():
            if self._targets is not self._copies:
                self._set_copies(self._copies)
            self._step_as_planned()
            return
        casts = [(source, source.casts_to_write(self)) for ref in self._sources if (source := ref()) is not None]
        targets: dict[Tensor, Tensor] = {}
        for _, wanted in reversed(casts):
            targets.update(wanted)
        targets.update(self._copies)
        before = self._targets
        if not (same(list(targets), list(before)) and same(list(targets.values()), list(before.values()))):
            self._forget_plans()
        self._targets = targets
        self._step_as_planned()
        changed = not StepScalars.of(self).skips_on_host()
        for source, wanted in casts:
            written = {param: cast for param, cast in wanted.items() if targets[param] is cast}
            source.casts_written(self, written, changed=changed)

    def _step_as_planned(self) -> None:
        scalars = StepScalars.of(self)
        on_device: dict[torch.device, StepScalars] = {}
        if self._planned and not self._known_state.is_still(self.state):
            self._planned.clear()
        all_planned = True
        for number, group in enumerate(self.param_groups):
            planned = self._planned.get(number)
            stepped: list[Tensor] | None = []
            if planned is not None:
                device = planned.device
                if device not in on_device:
                    on_device[device] = scalars.on(device)
                if planned.impl is self.impl:
                    stepped = planned.run(group, self._names(group), self._options(group, on_device[device], device))
                    if stepped is None:
                        continue
                if not is_capturing(device):    # a capture steps another way, and reads what the plan has sent
                    del self._planned[number]
            all_planned = False
            self._step_anew(number, group, scalars, stepped)
        if not all_planned:
            self._known_state.remember(self.state)

    @torch.no_grad()
    def _step_anew(
        self, number: int, group: dict[str, Any], scalars: StepScalars, stepped: list[Tensor]
    ) -> None:
        """Step a group whose lists nobody knows, and plan its next steps if that can be done; not those `stepped`."""
        by_device = _scaled.rows_by_device(group, type(self).__name__)
        for device, rows in by_device.items():
            here = scalars.on(device)
            triton = kernels.uses_triton(self.impl, device)
            if is_on_host(group["lr"], device) and is_capturing(device):
                self._warn_of_frozen_lr()
            plannable = triton and len(by_device) == 1 and not stepped
            planned = self._planned_group(group, device, rows) if plannable else None
            if planned is not None:
                done = planned.run(group, self._names(group), self._options(group, here, device))
                if done is None:
                    self._planned[number] = planned
                    continue
                stepped = done
            if stepped:
                ids = set(map(id, stepped))
                rows = [row for row in rows if id(row.param) not in ids]
            self._step_rows(group, device, rows, here, triton=triton)

    def _warn_of_frozen_lr(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"ampkit.optim.{type(self).__name__}.step() is captured in a CUDA graph with a learning rate that the "
                "host holds: every replay will use this one, whatever a scheduler sets. Pass lr=torch.tensor(...) on "
                "the device and change it in place.",
                stacklevel=5,
            )

    def _planned_group(self, group: dict[str, Any], device: torch.device, rows: list[Row]) -> PlannedGroup | None:
        """Plans for these rows; None where one call of a kernel does not serve all that have copies, or have none."""
        names = self._names(group)
        plain = all(row.local is row.param and type(row.grad) is Tensor for row in rows)
        if names is None or not plain:
            return None
        states = self._states(rows, group, device)
        entries = [[state[name] for state in states] for name in names]
        columns = [[row.param for row in rows], [row.grad for row in rows], *entries]
        parts = []
        for with_copy in (False, True):
            numbers = [i for i, row in enumerate(rows) if (row.param in self._targets) is with_copy]
            if not numbers:
                continue
            lists = [[column[i] for i in numbers] for column in columns]
            copies = [self._targets[param] for param in lists[0]] if with_copy else None
            plan = self._plan(group, lists, copies)
            if plan is None:
                return None
            parts.append(PlannedPart(numbers, [] if copies is None else [copies], plan))
        return PlannedGroup(group, rows, states, names, parts, self.impl) if parts else None


def is_on_host(lr: float | Tensor, device: torch.device) -> bool:
    """Whether a learning rate reaches the kernels of `device` as a number: it is one, or a tensor on the CPU."""
    return not isinstance(lr, Tensor) or (lr.is_cpu and device.type != "cpu")


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched on this device now goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two lists hold the same objects."""
    return len(some) == len(others) and all(map(is_, some, others))
