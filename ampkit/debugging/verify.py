"""Finds out by trial runs which finding changes the training: the losses with a change are compared with those without.

The first trial computes everything in float32. If it trains as well, no rounding harms the training. If it trains
better, the changes for the findings are tried, and then lines by bisection, until few lines explain the difference.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from ampkit.debugging.changes import (
    Change,
    Clipping,
    LearningRate,
    LineChange,
    advice,
    changeable_paths,
    changes_for,
    module_change,
)
from ampkit.debugging.finding import Cause, Finding, Fix, Losses, Place, Report
from ampkit.debugging.observe.call import Call
from ampkit.debugging.observe.observer import Observer
from ampkit.debugging.trials import Attempt, NoResultError, smallest

T = TypeVar("T")
_SMALLEST_GAP = 0.02  # of the loss; a smaller one is not a finding
_MAKERS = tuple(f"aten::{name}" for name in ("_to_copy", "copy", "ones", "zeros", "full", "empty", "clone"))
_N_SPREADS = 3.0  # the smallest gap, in multiples of the spread
_FEW = 8  # lines or modules
_DIVERGED = 100.0  # the smallest growth of a loss in float32 that shows divergence
_UPDATES = (LearningRate, Clipping)
_LARGEST_SPREAD = 0.3  # with a larger one the losses of two runs cannot be compared
_CLEAR_GAP = 0.2  # needs no second pair of runs, if it is 3 times the smallest gap


class _Gap(NamedTuple):
    """The difference of the losses of a line in two runs, in the second half of their steps, as a share of the loss."""

    share: float  # positive if the second run is better; inf or -inf if only one run is finite
    spread: float  # root mean square of the differences in single steps
    site: tuple[str, int]
    steps: list[int]
    before: float  # loss in the last step
    after: float


def verify(
    report: Report,
    run: Observer,
    attempt: Attempt,
    base: Losses,
    *,
    max_runs: int,
    seconds: float = math.inf,
    is_script: bool = False,
    show: Callable[[str], None] = lambda text: None,
) -> None:
    """Find which findings of a report change the training, by at most `max_runs` runs.

    A finding whose change makes the training better is an error or a precision loss, and its fix is verified. If no
    finding explains a training that is better in float32, one is added.

    Args:
        report: the findings of a run; their grades and fixes are changed.
        run: the observed run.
        attempt: runs the training again.
        base: the losses of the run.
        max_runs: the most runs.
        seconds: no run starts after this time.
        is_script: each run begins before the models are made, so that 16-bit models are made in float32. No changes are
            tried for values from the data.
        show: shows a line of progress.
    """
    start, count = time.monotonic(), 0

    def losses_with(change: Change | None, seed: int = 0) -> Losses | str:
        nonlocal count
        if count == max_runs or time.monotonic() > start + seconds:
            raise NoResultError(f"{count} runs in {time.monotonic() - start:.0f} s")
        count += 1
        name = "with slightly different weights" if change is None else change.code
        show(f"run {count}: {name[:100]}")
        # Steps that are skipped while a scale settles are also skipped here. More of them are an effect of low
        # precision.
        skips = () if change is None or report.skips_many else run.loop.skipped
        return attempt(change, seed, skips)

    trials = _Trials(report, run, losses_with, base, is_script)
    try:
        trials.compare()
    except NoResultError as error:
        report.not_checked.append(f"further changes: {error}")
    except KeyboardInterrupt:
        report.not_checked.append("further changes: the runs were interrupted")
    if not report and trials.reference is not None:
        trials.add(None, trials.reference, [])  # no line explains the difference
    report.findings = [each for each in report.findings if (each.kind, each.grade) != ("divergence", "note")]


@dataclass
class _Trials:
    """Decides by runs with changes. `losses` runs a training with a change and a seed."""

    report: Report
    run: Observer
    losses: Callable[..., Losses | str]
    base: Losses
    is_script: bool
    reference: Losses | None = None  # in float32, if the training is another there
    smallest_gap: float = _SMALLEST_GAP
    tried: set[str] = field(default_factory=set)  # the code of changes

    def compare(self) -> None:
        """Compare the training with the same in float32, and find the change that makes the difference."""
        report, run = self.report, self.run
        candidates = list(self._candidates())
        rounded = [each for each in report.findings if each.check == "updates" and each.grade == "precision loss"]
        if report and not candidates and not (rounded and self.is_script):
            return  # no change can be applied from outside
        everything = LineChange(next((each.device for each in report.findings), "cpu"), run.modules.region)
        float32_helps = self._float32_helps(everything)
        for finding in rounded if report.trains_as_well and self.is_script else ():
            finding.grade = "note"  # the weights are trained as well as float32 weights
        # A training that diverges in float32 too needs smaller updates, and nothing else.
        usable = [each for each in candidates if float32_helps is not isinstance(each[1], _UPDATES)]
        of_lines = [each for each in usable if isinstance(each[1], LineChange)]
        if self._try([each for each in usable if each not in of_lines]):
            return
        if self.reference is not None and self._bisect_modules(everything.device):
            return
        if self._try(of_lines):
            return
        for finding in report.nonfinite:
            if any(finding is each for each, _ in candidates):
                finding.fix = replace(finding.fix, code=advice(finding))
        if self.reference is not None:
            self._bisect_lines(everything)

    def _try(self, candidates: list[tuple[Finding, Change]]) -> bool:
        """Try changes until one helps; return whether one does."""
        for finding, change in candidates:
            if change.code in self.tried:
                continue
            self.tried.add(change.code)
            losses = self.losses(change)
            if isinstance(losses, dict) and self._closes(change, losses):
                self._verified(finding, change, losses)
                return True
            outcome = losses if isinstance(losses, str) else self._text(losses)
            finding.fix = replace(finding.fix, tried=(*finding.fix.tried, f"{change.code} ({outcome})"))
        return False

    def _candidates(self) -> Iterator[tuple[Finding, Change]]:
        """Yield changes for the findings, the most likely first: those for notes come last."""
        errors = [each for each in self.report.findings if each.grade == "error"]
        is_explained = any(each.check in ("data", "loop order") or each.cause.is_of_data for each in errors)
        first = min(self.report.nonfinite, key=lambda each: each.step, default=None)
        overflows = first is None or first.kind in ("overflow", "intermediate")
        mishandles_scale = any(each.check == "loop order" for each in errors)
        for finding in self.report.ranked():
            if finding.cause.is_of_data and self.is_script:
                continue  # float32 may hide an error of the data
            if finding.kind == "divergence" and (is_explained or not overflows):
                continue
            if finding.check == "nonfinite" and finding.scale is not None and mishandles_scale:
                finding.fix = Fix("correct the loop first: it mishandles scaled gradients")
                continue
            for change in changes_for(finding, self.run.modules):
                yield finding, change

    # --- the comparison

    def _float32_helps(self, everything: Change) -> bool:
        """Return whether the training is another in float32, beyond the spread of slightly different weights."""
        report = self.report
        if not self.run.low:
            report.comparison = "not compared with float32: nothing was computed in 16 bits"
            return False
        reference = self.losses(everything)
        gap = _gap(self.base, reference)
        if gap is None:
            why = reference if isinstance(reference, str) else "there is no loss of the same step"
            report.comparison = f"not compared with float32: {why}"
            return not _is_finite(self.base)
        assert isinstance(reference, dict)
        if gap.share == -math.inf:
            report.comparison = "in float32 the loss is not finite"
            return False
        if gap.share == math.inf and not _stays(reference, _DIVERGED):
            report.comparison = f"diverges in float32: {self._text(reference)}"
            return False
        if gap.share < math.inf and not self._is_significant(gap, everything, reference):
            return False
        self.reference = reference
        word = "better" if gap.share > 0 else "differently"
        report.comparison = f"trains {word} in float32: {self._text(reference)}"
        return True

    def _is_significant(self, gap: _Gap, everything: Change, reference: Losses) -> bool:
        """Return whether a finite gap is larger than the spread; if not, or if it is unknown, report so."""
        moved = self.losses(None, 1)
        around = _gap(moved, self.base, gap.site)
        if around is None:
            self.report.comparison = f"not compared with float32: a second run had no result ({moved})"
            return False
        spread, shares = around.spread, [abs(gap.share)]
        if spread > _LARGEST_SPREAD and shares[0] < _N_SPREADS * spread:
            self.report.comparison = (
                f"not compared with float32: the losses of two runs in the same precision differ by {spread:.0%}, as "
                "without seeds, or if the script continues from its own checkpoint"
            )
            return False
        self.smallest_gap = max(_SMALLEST_GAP, _N_SPREADS * spread)
        if self.smallest_gap < shares[0] < max(_CLEAR_GAP, 3 * self.smallest_gap):
            again = self.losses(everything, 1)
            second, third = _gap(moved, again, gap.site), _gap(again, reference, gap.site)
            shares.append(0.0 if second is None else math.copysign(second.share, gap.share * second.share))
            spread = max(spread, 0.0 if third is None else third.spread)
            self.smallest_gap = max(_SMALLEST_GAP, _N_SPREADS * spread)
        if min(shares) > self.smallest_gap:
            return True
        number = f"{100 * gap.share:+.1f}% +- {100 * spread:.1f}%"
        self.report.comparison = (
            f"trains as well in float32: the loss differs by {number} in steps {gap.steps[0]}-{gap.steps[-1]}"
        )
        self.report.trains_as_well = True
        return False

    def _closes(self, change: Change, losses: Losses) -> bool:
        """Return whether a training with a change is about as good as in float32."""
        if self.reference is None or isinstance(change, _UPDATES):
            return _is_finite(losses) and _stays(losses, 1.0)
        gap = _gap(self.base, self.reference)
        remaining = None if gap is None else _gap(losses, self.reference, gap.site)
        if gap is None or remaining is None:
            return False
        return abs(remaining.share) <= max(self.smallest_gap, min(abs(gap.share), 1.0) / 2)

    def _text(self, losses: Losses) -> str:
        gap = _gap(self.base, losses)
        if gap is None:
            return "no loss of the same step"
        place = f" of {gap.site[0]}:{gap.site[1]}" if len(losses) > 1 else ""
        return f"loss{place} in step {gap.steps[-1]}: {gap.before:.4g} -> {gap.after:.4g}"

    def _verified(self, finding: Finding, change: Change | None, losses: Losses) -> None:
        """Set the verified fix of a finding, and its grade."""
        if change is not None:
            finding.fix = Fix(change.code, True, self._text(losses), finding.fix.tried)
        if finding.grade == "note":
            gap = _gap(self.base, losses)
            finding.grade = "error" if gap is not None and gap.share == math.inf else "precision loss"

    # --- bisection

    def _bisect_modules(self, device: str) -> bool:
        """Find few modules that make the difference, if a policy can keep them in float32; return whether there are."""
        paths = changeable_paths(self.run.modules)
        calls = self._low_calls(lambda call: call.module.name if call.module and call.module.name in paths else "")
        return self._bisect(calls, lambda names: module_change(self.run.modules, device, names))

    def _bisect_lines(self, everything: LineChange) -> None:
        """Find few lines that make the difference."""
        calls = self._low_calls(lambda call: call.caller.line())
        self._bisect(calls, lambda lines: LineChange(everything.device, everything.region, lines))

    def _bisect(self, calls: dict[T, list[Call]], change_of: Callable[[Sequence[T]], Change]) -> bool:
        """Find at most `_FEW` keys of calls whose change helps, and add a finding; return whether there are any."""
        best: tuple[Change, Losses, list[Call]] | None = None

        def closes(keys: Sequence[T]) -> bool:
            nonlocal best
            change = change_of(keys)
            losses = self.losses(change)
            if isinstance(losses, str) or not self._closes(change, losses):
                return False
            if len(keys) <= _FEW:
                best = change, losses, [call for key in keys for call in calls[key]]
            return True

        try:
            smallest(list(calls), closes)
        finally:
            if best is not None:
                self.add(*best)
        return best is not None

    def _low_calls(self, key_of: Callable[[Call], T]) -> dict[T, list[Call]]:
        """Return 16-bit calls by their key, if it is not empty, in the order of the lines."""
        calls = [call for call in self.run.low.values() if call.phase != "optimizer" and not call.caller.outside]
        calls = [call for call in calls if call.caller.line()[1]]
        by_key: dict[T, list[Call]] = {}
        for call in sorted(calls, key=lambda call: (*call.caller.line(), call.index)):
            if key := key_of(call):
                by_key.setdefault(key, []).append(call)
        return by_key

    def add(self, change: Change | None, losses: Losses, calls: list[Call]) -> None:
        """Add the finding of a bisection, or note its fix in the error that it prevents."""
        places = [self.run.place(call) for call in calls]
        rounds = next((place for place in places if not place.op.startswith(_MAKERS)), places[0] if places else Place())
        sites, is_finite = {place.site for place in places}, _is_finite(self.base)
        errors = [each for each in self.report.ranked() if each.check == "nonfinite" and each.grade == "error"]
        errors = [each for each in errors if not is_finite or each.place.site in sites]
        if errors:
            self._verified(errors[0], change, losses)
            return
        operators = ", ".join(dict.fromkeys(place.op for place in places))
        text = f"{operators} in 16 bits; " if operators else ""
        finding = Finding(
            grade="note",
            check="training",
            cause=Cause("imprecise", f"{text}in float32 {self._text(self.reference or losses)}"),
            what="16 bits change the training",
            place=rounds,
            producer=places[0] if places and places[0] != rounds else None,
            fix=Fix("train in float32: no few lines were found that make the difference"),
            last=max(0, self.run.step - 1),
        )
        self._verified(finding, change, losses)
        self.report.add(finding)


def _gap(before: Losses | str, after: Losses | str, site: tuple[str, int] | None = None) -> _Gap | None:
    """Return the gap of a line of backward, or the largest gap; None if no step has a loss in both."""
    if isinstance(before, str) or isinstance(after, str):
        return None
    gaps = [
        _gap_of_line(each, losses, after[each], steps)
        for each, losses in before.items()
        if site in (None, each) and (steps := sorted(losses.keys() & after.get(each, {}).keys()))
    ]
    return max(gaps, key=lambda gap: abs(gap.share), default=None)


def _gap_of_line(site: tuple[str, int], before: dict[int, float], after: dict[int, float], steps: list[int]) -> _Gap:
    half = steps[len(steps) // 2 :]
    ends = before[steps[-1]], after[steps[-1]]
    if not all(math.isfinite(after[step]) for step in half):
        return _Gap(-math.inf, math.inf, site, half, *ends)
    if not all(math.isfinite(before[step]) for step in half):
        return _Gap(math.inf, math.inf, site, half, *ends)
    finite = [[losses[step] for step in steps if math.isfinite(losses[step])] for losses in (before, after)]
    size = max(map(_mean, finite)) or 1.0
    differences = [(before[step] - after[step]) / size for step in half]
    spread = math.sqrt(statistics.mean(each * each for each in differences))
    return _Gap(statistics.mean(differences), spread, site, half, *ends)


def _stays(losses: Losses, factor: float) -> bool:
    """Return whether the last losses are at most a multiple of the first."""
    values = ([*each.values()] for each in losses.values())
    return all(_mean(each[len(each) // 2 :]) <= factor * max(abs(each[0]), 1e-3) for each in values)


def _mean(values: Iterable[float]) -> float:
    return statistics.mean(map(abs, values))


def _is_finite(losses: Losses) -> bool:
    return all(math.isfinite(loss) for of_line in losses.values() for loss in of_line.values())
