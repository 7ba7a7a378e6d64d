"""`examine`: one look at everything that a training run does, and one ranked list of what is wrong.

An `Examination` is the one dispatch mode of a run. Cheap looks see every operator in every step and between steps:
where inf and NaN begin, sums that stop, casts that are out of date, gradients that are 0. Dear looks, such as the same
step beside it in float32, are made in a few steps: the first, some at random, and those after a cheap look found
something.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from ampkit.debugging import causes
from ampkit.debugging.call_sites import find_caller
from ampkit.debugging.cheap_looks import Gradients, Roundings, StaleCasts, Sums
from ampkit.debugging.detect import detect_nonfinite, rank
from ampkit.debugging.find import try_changes
from ampkit.debugging.nonfinite_origins import Event, Origin, absorbed, find_origins
from ampkit.debugging.operator_calls import OperatorCall, Ran
from ampkit.debugging.operator_facts import tensors_in
from ampkit.debugging.precision import PrecisionComparison, compare_precision
from ampkit.debugging.proposed_changes import advice, advice_on_precision
from ampkit.debugging.report import ExaminationReport, Problem, Suggestion
from ampkit.debugging.snapshot import TrainingSnapshot
from ampkit.debugging.storage_map import StorageMap
from ampkit.debugging.tape import Tape
from ampkit.debugging.torch_private import (
    LoaderIterator,
    OpOverload,
    is_opaque,
    node_sequence_number,
    storage_key,
    without_dispatch,
)
from ampkit.debugging.two_scales import TwoScales
from ampkit.dtypes import SIXTEEN_BIT, dtype_name

_DEAR_SHARE = 0.3  # dear looks may take so much of the time of the run
_MANY_SKIPS = 8  # steps that a scaler skips
_LARGE_NUMBER = 1e4
_LOSSES = frozenset(  # that a region computes in float32
    f"{name}{ending}"
    for name in ("nll_loss", "nll_loss2d", "mse_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits")
    for ending in ("", "_forward")
) | {"smooth_l1_loss", "huber_loss", "kl_div", "soft_margin_loss"}
_RANDOM_STEP = 0.02  # the chance of another step to be chosen


class Examination(detect_nonfinite):
    """Context that looks at every operator of a run, in training steps and outside of them.

    Results and random numbers stay the same to the bit. Synchronizes with the device at each operator.

    Args:
        model: module whose submodules are named by their paths; None takes the outermost modules that run.

    Entering returns the `ExaminationReport`, which is complete after the context.
    """

    report: ExaminationReport  # type: ignore[assignment]

    def __init__(self, model: Module | None = None) -> None:
        super().__init__(model, on_found="record")
        self.report.losses = self.losses
        self.dear_at: int | None = None  # make the dear looks in this step only; None: choose
        self.on_step: Callable[[], None] = lambda: None  # called when a step has ended
        self.on_operator: Callable[[], None] = lambda: None  # called now and then, for progress
        self.precision: PrecisionComparison | None = None  # of a chosen step
        self._sums, self._casts = Sums(self), StaleCasts(self)
        self._roundings, self._gradients = Roundings(self), Gradients(self)
        self._loaded: StorageMap[tuple[str, int, int]] = (
            StorageMap()
        )  # by storage: line of the loop, number of the batch
        self._batches = 0
        self._scales: TwoScales | None = None  # of a chosen step
        self._random = random.Random(0)  # not the run's own
        self._started = self._dear_started = 0.0
        self._dear_time = 0.0
        self._found_before = 0

    @property
    def region_line(self) -> tuple[str, int] | None:
        """Where the outermost open region was entered, which keeps casts until it is left; None outside of regions."""
        return self._check.regions[0] if self._check.regions else None

    def state_name(self, tensor: Tensor) -> tuple[str, str]:
        """What a tensor belongs to, and its name: the state of an optimizer, a parameter or buffer, or neither."""
        key = storage_key(tensor)
        for optimizer in self._check.optimizers:
            for parameter, state in optimizer.state.items():
                for name, value in state.items():
                    if isinstance(value, Tensor) and not is_opaque(value) and storage_key(value) == key:
                        return "the optimizer's state", f"{name} of {self._name_of(parameter) or 'a parameter'}"
        return self._name_of(tensor) or "a tensor", "it"

    def _new_report(self) -> ExaminationReport:
        return ExaminationReport(rank=rank())

    # --- the course of a run

    def __enter__(self) -> ExaminationReport:  # type: ignore[override]
        super().__enter__()
        self._check.on_backward = self._before_backward
        self._started = time.process_time()
        self._watch_loaders(self._open)
        self._choose()
        return self.report

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        if isinstance(raised[1], BaseException) and not isinstance(raised[1], Exception):
            self._complete = False
            self._step_ended()  # interrupted: what is known so far
        looks = (*self._sums.problems(), *self._roundings.problems(), *self._gradients.problems())
        for problem in (*looks, *self._skipped_steps()):
            problem.last = max(problem.last, self.step - 1)
            self.report.add_problem(problem)

    def _skipped_steps(self) -> list[Problem]:
        """What makes a scaler skip many steps, more than while its scale settles."""
        skips = self._check.skips
        if skips < _MANY_SKIPS or skips < 0.3 * self.step:
            return []
        underflows = [problem for problem in self.report.problems if problem.kind == "underflow"]
        for problem in underflows:
            problem.grade = "lost"
            problem.why += f"; the scaler skips {skips} of {self.step} steps"
        if underflows or self.report.findings or not self.report.skipped:
            return []
        finding = max(self.report.skipped, key=lambda each: each.times)
        problem = Problem.of_finding(finding)
        problem.grade, problem.look = "lost", "nonfinite"
        problem.what = f"the scaler skips {skips} of {self.step} steps: {finding.symptom}"
        problem.finding = None
        problem.suggestion = advice(finding)
        return [problem]

    def _next_step(self) -> None:
        super()._next_step()
        self._choose()
        self.on_step()

    def _choose(self) -> None:
        """Begin the dear looks if this step deserves them."""
        if self.dear_at is not None:
            chosen = self.step == self.dear_at
        else:
            affordable = self._dear_time <= _DEAR_SHARE * (time.process_time() - self._started)
            found = len(self.report.findings) + len(self.report.skipped) + len(self.report.problems)
            chosen = self.step == 0 or (
                affordable and (found > self._found_before or self._random.random() < _RANDOM_STEP)
            )
            self._found_before = found
        self._scales = TwoScales(self) if chosen else None
        self._tape = Tape() if chosen else None
        if chosen:
            self._dear_started = time.process_time()
            self.precision = PrecisionComparison.beside(self)

    def _end_dear(self) -> None:
        """Collect what the dear looks found."""
        if self._scales is not None:
            for problem in self._scales.problems:
                self.report.add_problem(problem)
            if self._scales.unseen and self._scales.unseen not in self.report.unseen:
                self.report.unseen.append(self._scales.unseen)
        if self.precision is not None:
            if not any(finding.step <= self.precision.report.step <= finding.last for finding in self.report.findings):
                for problem in _of_precision(self.precision):
                    self.report.add_problem(problem)
            self._dear_time += time.process_time() - self._dear_started
        self.precision = self._scales = None

    def _step_starts(self, optimizer: Any) -> None:
        self._gradients.step_starts(optimizer)
        if self.precision is not None:
            self.precision._step_starts(optimizer)

    def _step_ended(self, *, skipped: bool = False) -> None:
        if not skipped:
            self._gradients.step_ended()
        super()._step_ended(skipped=skipped)
        with without_dispatch():
            if self.precision is not None:
                self.precision._step_ended(skipped=skipped)
                self.precision.__exit__(None, None, None)
            self._end_dear()

    # --- one operator

    def _run(self, call: OperatorCall, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.precision is None:
            return func(*args, **kwargs)
        self.precision.scale = self.scale
        return self.precision._observe(call, func, args, kwargs)

    def _ran(self, ran: Ran) -> None:
        call = ran.call
        for problem in (self._casts.operator_ran(call, ran.outputs), self._roundings.operator_ran(ran)):
            if problem is not None:
                self.report.add_problem(problem)
        self._sums.operator_ran(ran)
        if call.phase == "backward":
            self._gradients.operator_ran(ran)
        if call.phase == "optimizer" and call.facts.mutable:
            self._gradients.parameters_written(call, ran.outputs)
        if call.index % 256 == 0:
            self.on_operator()

    def _add_findings(self) -> list[Origin]:
        origins = super()._add_findings()
        # In a step that an exception ended, what nothing has read yet is no symptom, and nothing absorbs it either.
        for event in absorbed(self._events, origins if self._complete else find_origins(self._events)):
            cause = event.rounded or event.finding.cause
            self.report.add_problem(
                Problem.at(
                    event.finding.origin,
                    grade="note",
                    look="nonfinite",
                    kind=event.finding.cause.kind,
                    what=f"a result is {event.values}, which a later operator absorbs",
                    why=f"{cause.text}; {event.finding.elements}",
                    suggestion=advice(replace(event.finding, cause=cause)),
                    step=self.step,
                )
            )
        return origins

    def _note_low_loss(self, root: Tensor) -> None:
        """Note a loss that is computed in 16 bits, as no region would do."""
        node: Any = root.grad_fn
        while node is not None and node.name().startswith(("Mul", "ToCopy")):  # by the scale
            node = node.next_functions[0][0]
        forward = None if node is None else self._forward.get(node_sequence_number(node))
        dtype = None if node is None else node._input_metadata[0].dtype
        if forward is None or dtype not in SIXTEEN_BIT or not self._check.dtypes:
            return
        if forward.facts.base in _LOSSES:
            self.report.add_problem(
                Problem.at(
                    self._operation(forward),
                    grade="note",
                    look="rounded",
                    kind="rounded",
                    what=f"the loss is computed in {dtype_name(dtype)}, outside of the region",
                    why="inside of it the region computes a loss in float32",
                    suggestion=Suggestion("leave the region after the loss, or compute the loss of output.float()"),
                    step=self.step,
                )
            )

    def _before_backward(self, roots: list[Any], gradients: Any, scaled: bool) -> None:
        for root in roots:
            if isinstance(root, Tensor):
                self._note_low_loss(root)
        if self._scales is not None:
            self.paused = True
            try:
                self._scales.before_backward([root for root in roots if isinstance(root, Tensor)], gradients, scaled)
            finally:
                self.paused = False

    # --- data

    def _watch_loaders(self, stack: ExitStack) -> None:
        """Note where each batch of a DataLoader is read."""
        cls: Any = LoaderIterator
        inner = cls.__next__

        def watched(iterator: Any) -> Any:
            batch = inner(iterator)
            line = find_caller(2).line()
            self._batches += 1
            for tensor in tensors_in(batch):
                if not is_opaque(tensor):
                    self._loaded.set(tensor, (*line, self._batches - 1))
            return batch

        cls.__next__ = watched
        stack.callback(setattr, cls, "__next__", inner)

    def _arrive(self, tensor: Tensor, call: OperatorCall) -> tuple[int, ...]:
        indices = super()._arrive(tensor, call)
        for index in indices:
            event = self._events[index]
            if event.broken and not event.finding.parameter:
                self._name_data(event, tensor)
        return indices

    def _explain(self, event: Event, ran: Ran, inputs: list[Any]) -> None:
        super()._explain(event, ran, inputs)
        if event.is_mask:
            return
        call, finding = ran.call, event.finding
        computed = not torch.is_grad_enabled() or any(each.requires_grad for each in call.tensors)
        computed |= any(abs(number) > _LARGE_NUMBER for number in call.numbers)  # the code's own number overflows
        why = ""
        if finding.cause.kind == "overflow" and call.phase == "forward" and not computed:
            why = "no parameter took part in it"
        elif finding.cause.kind in ("overflow", "intermediate", "undefined", "from inf", "rounded"):
            given = [each for ref in self.modules.inputs if (each := ref()) is not None and not is_opaque(each)]
            why = next((text for each in given if each.is_floating_point() and (text := causes.outlier(each))), "")
        if why:
            finding.cause = replace(finding.cause, text=f"{finding.cause.text}; {why}: {causes.WITH_THE_DATA}")

    def _name_data(self, event: Event, tensor: Tensor) -> None:
        """Say where in the data a broken value is."""
        loaded = self._loaded.get(tensor)
        where = "with the data" if loaded is None else "in batch {2} of the loader at {0}:{1}".format(*loaded)
        what = event.values.replace("nan", "NaN")
        event.finding.elements = ""
        event.finding.cause = causes.Cause("arrived", f"it arrived {where}: {what} in {causes.broken_elements(tensor)}")


def _of_precision(comparison: PrecisionComparison) -> list[Problem]:
    """The problems of a step that was compared with float32."""
    report = comparison.report
    origin = report.error_origin()
    if not report.operators or origin is None or report.is_left_to_scaler or not report.error >= 0.05:
        return []
    why = f"the largest error begins with {origin.name()} in {origin.dtype}"
    amplified = report.amplified
    if amplified is not None and amplified is not origin:
        why += f"; {amplified.op}{amplified.where()} makes it {amplified.amplification:.3g} times larger"
    return [
        Problem.at(
            origin,
            grade="note",
            look="precision",
            kind="imprecise",
            what=f"gradients are {report.gradient_error:.2g} off, against the same step in {report.reference}",
            why=why,
            suggestion=advice_on_precision(report),
            step=report.step,
        )
    ]


def examine(step: Callable[[], Any], model: Module, *, steps: int = 4, state: Iterable[Any] = ()) -> ExaminationReport:
    """Run a step a few times and return one ranked list of what is wrong in it: a place, the cause and a change.

    Cheap looks see every operator of all steps, dear looks those of the first step and of steps after a finding.
    Afterwards everything is as before: parameters, buffers, gradients, optimizers, scalers, random number generators
    and the objects in `state`.

    Synchronizes with the device at each operator.

    Args:
        step: function without arguments: forward, backward and optimizer.
        model: module whose state is restored, and whose submodules are named by their paths.
        steps: number of times that the step runs.
        state: further objects that the step changes, with `state_dict` and `load_state_dict`, such as a scaler.

    Returns:
        The report; it is truthy if something is wrong or lost, and prints as text.

    Raises:
        TypeError: if an object in `state` has no `state_dict` and `load_state_dict`, or `model` is no module.
        Exception: what the step raises, after everything is restored.

    Example::

        report = debugging.examine(step, model, state=[scaler])
        print(report)
    """
    snapshot = TrainingSnapshot(model, state)
    examination = Examination(model)
    examination.on_state = snapshot.add
    with snapshot, examination as report:
        for _ in range(steps):
            step()
    if report.findings:
        try_changes(report, step, model, snapshot, examination.modules)
    for problem in report.problems:
        if problem.look == "precision":
            with snapshot:
                problem.suggestion = compare_precision(step, model).suggestion or problem.suggestion
            break
    return report
