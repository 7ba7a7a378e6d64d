"""`ampkit debug compare A B`: the first operator whose results differ between two recorded runs of one script.

The calls of a step are aligned by phase, module and operator, in their order, so that casts that only one run makes are
left out. Results are compared by their magnitudes, which rounding changes by less than a known share: more in 16 bits,
more with each step, and more if random numbers differ.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import torch

from ampkit.debugging.report import Report
from ampkit.debugging.run_record import GIVEN, KIND, VERSION

# Norms may differ by so many units of rounding, by the number of elements from which on: of few elements more.
_UNITS = ((256, 4), (16, 16), (0, 64))
_LEAST = 1e-3  # and by this share, in any precision
_NEGLIGIBLE = 1e-3  # a gradient below this share of the largest may be nothing but rounding
_RANDOM = 0.75  # after random numbers differ, norms may differ by this share
_ZEROS = 0.25  # shares of zeros may differ by this much
_CAST = "aten::_to_copy"
_ALIGNED = 0.5  # of the calls, at least, for an answer

_Call = dict[str, Any]


@dataclass
class Difference:
    """One call in both runs, and how its results differ."""

    step: int
    what: str  # in words
    share: float  # by which the norms differ, of the larger one
    explained: float  # the share that rounding explains
    first: _Call
    second: _Call
    alone: tuple[str, _Call] | None = None  # the last call before it that only one run has, apart from casts

    def __str__(self) -> str:
        call = self.first
        op = call["op"].removeprefix("aten::") + (" in backward" if call["phase"] == "backward" else "")
        place = ", ".join(part for part in (f"{call['file']}:{call['line']}", call["module"], op) if part)
        return f"{place}: {self.what}, in step {self.step}"


@dataclass
class Comparison(Report):
    """The report of `compare_runs`; truthy if the runs differ by more than rounding explains."""

    kind = "comparison"
    differences: list[Difference] = field(default_factory=list)  # the first one of each step
    steps: int = 0
    compared: int = 0
    unaligned: dict[str, int] = field(default_factory=dict)  # calls in one run only, by run and operator
    largest: float = (
        0.0  # the largest difference of norms that rounding explains, before the first one that it does not
    )
    notes: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.differences)

    def __str__(self) -> str:
        lines = [*self.notes]
        if self.differences:
            first = self.differences[0]
            lines.insert(0, str(first))
            lines.insert(1, f"  A  {_described(first.first)}")
            lines.insert(2, f"  B  {_described(first.second)}")
            lines.insert(3, f"  the norms are {first.share:.2g} apart, and rounding explains {first.explained:.2g}")
            if first.alone is not None:
                name, call = first.alone
                lines.insert(4, f"  before it, only {name} has {call['op']}, {call['file']}:{call['line']}")
        elif self.incomplete:
            lines.insert(0, f"inconclusive: {self.incomplete}")
        else:
            lines.insert(0, f"no difference beyond rounding: {self.largest:.2g} at most")
        lines.append(f"{self.compared} calls in {self.steps} steps were compared")
        if self.unaligned:
            most = sorted(self.unaligned.items(), key=lambda item: -item[1])[:4]
            lines.append("not compared, in one run only: " + ", ".join(f"{count} {name}" for name, count in most))
        return "\n".join(lines)


def compare_runs(first: str | Path, second: str | Path, *, other_data: bool = False) -> Comparison:
    """Compare two records of `record_run`.

    Args:
        first: the file of one run.
        second: the file of the other run.
        other_data: whether the runs have other data, as ranks have. Then only parameters and updates are compared.

    Returns:
        The comparison; `differences[0]` is the first operator that differs by more than rounding explains.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if a file is no record, or has another version.
    """
    runs = [_steps_of(first), _steps_of(second)]
    comparison = Comparison()
    unaligned: Counter[str] = Counter()
    total = 0
    random = False
    for step in sorted(runs[0].keys() & runs[1].keys()):
        steps = [run[step] for run in runs]
        calls = [[call for call in each["calls"] if _counts(call, other_data)] for each in steps]
        skipped = [name for name, each in zip("AB", steps, strict=True) if each["skipped"]]
        comparison.steps += 1
        total += max(map(len, calls))
        epsilon = max((_epsilon(call["dtype"]) for each in calls for call in each), default=0.0)
        pairs, alone = _aligned(*calls)
        for name, call, _ in alone:
            unaligned[f"{call['op']} in {name}, {call['file']}:{call['line']}"] += 1
            random |= call["random"]
        comparison.compared += len(pairs)
        largest = max(
            (call["norm"] / call["scale"] for pair in pairs for call in pair if _is_backward(call)), default=0.0
        )
        for index, (one, other) in enumerate(pairs):
            unscaled = max(one["norm"] / one["scale"], other["norm"] / other["scale"])
            if _is_backward(one) and (skipped or unscaled < _NEGLIGIBLE * largest):
                continue
            random |= one["random"] and one["norm"] != other["norm"]
            units = next(units for numel, units in _UNITS if one["numel"] >= numel)
            explained = max(_LEAST, units * epsilon, _RANDOM if random else 0.0) * (1 + step)
            difference = _difference(step, one, other, explained)
            if difference is not None:
                before = [(name, call) for name, call, position in alone if position <= index]
                difference.alone = next((each for each in reversed(before) if each[1]["op"] != _CAST), None)
                comparison.differences.append(difference)
                break
            if not comparison.differences:
                comparison.largest = max(comparison.largest, _share(one, other))
        if skipped:
            names = " and ".join(skipped)
            comparison.notes.append(f"the scaler skipped step {step} in {names}: later steps are not compared")
            break
    if random:
        comparison.notes.append("the runs draw other random numbers: only large differences count")
    comparison.unaligned = dict(unaligned)
    if comparison.compared < _ALIGNED * max(total, 1):
        comparison.differences = []
        comparison.incomplete = f"{comparison.compared} of {total} calls have a counterpart in the other run"
    return comparison


def _steps_of(path: str | Path) -> dict[int, dict[str, Any]]:
    """The steps of a record, by number."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    try:
        head, *steps = map(json.loads, lines)
        kind, version = head["kind"], head["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no record of a run; expected a file of `ampkit debug record`") from error
    if (kind, version) != (KIND, VERSION):
        raise ValueError(f"{path} is {kind!r} in version {version}; expected {KIND!r} in version {VERSION}")
    return {step["step"]: step for step in steps}


def _counts(call: _Call, other_data: bool) -> bool:
    """Whether a call is compared: of the optimizer what updates parameters; with other data, only these."""
    is_parameter = call["phase"] in ("before", "optimizer") and call["module"] != ""
    return is_parameter or not (other_data or call["phase"] == "optimizer")


def _is_backward(call: _Call) -> bool:
    return bool(call["phase"] in ("backward", "scaler"))


def _aligned(first: list[_Call], second: list[_Call]) -> tuple[list[tuple[_Call, _Call]], list[tuple[str, _Call, int]]]:
    """Pairs of calls with the same key in the same order; and calls of one run only, with the next pair's index."""
    keys = [
        [(each["phase"], each["module"], each["op"], each["backward_of"]) for each in run] for run in (first, second)
    ]
    matcher = SequenceMatcher(None, *keys, autojunk=False)
    pairs, alone = [], []
    for tag, i, j, k, n in matcher.get_opcodes():
        if tag == "equal":
            pairs += zip(first[i:j], second[k:n], strict=True)
        else:
            alone += [("A", call, len(pairs)) for call in first[i:j]] + [
                ("B", call, len(pairs)) for call in second[k:n]
            ]
    return pairs, alone


def _difference(step: int, one: _Call, other: _Call, explained: float) -> Difference | None:
    """How the results of a call differ; None if rounding explains it."""
    share = _share(one, other)
    what = ""
    if bool(one["nonfinite"]) != bool(other["nonfinite"]):
        what = (
            f"{max(one['nonfinite'], other['nonfinite'])} elements are inf or NaN in {'A' if one['nonfinite'] else 'B'}"
        )
    elif abs(one["zeros"] - other["zeros"]) > _ZEROS:
        what = f"{one['zeros']:.0%} of its result are 0 in A, {other['zeros']:.0%} in B"
    elif share > explained:
        what = f"the norm of its result is {one['norm']:.4g} in A, {other['norm']:.4g} in B"
    if not what:
        return None
    if one["op"] == GIVEN:
        given = f"the parameter {one['module']}" if one["module"] else "the data"
        what = f"{given} differs from the start: {what}"
    return Difference(step, what, share, explained, one, other)


def _share(one: _Call, other: _Call) -> float:
    """The difference of the norms, as a share of the larger norm of results and operands.

    In backward it is not known whether a result was multiplied by the loss scale: the smaller difference counts.
    """
    return min(_share_of(one, other, 1.0, 1.0), _share_of(one, other, one["scale"], other["scale"]))


def _share_of(one: _Call, other: _Call, scale: float, other_scale: float) -> float:
    roots = [math.sqrt(call["numel"]) * each for call, each in ((one, scale), (other, other_scale))]
    norms = [float(call["norm"]) / root for call, root in zip((one, other), roots, strict=True)]
    operands = [float(call["operand"]) / root for call, root in zip((one, other), roots, strict=True)]
    largest = max(*norms, *(each for each in operands if math.isfinite(each)), 1e-300)
    return abs(norms[0] - norms[1]) / largest


def _epsilon(dtype: str) -> float:
    kind = getattr(torch, dtype, None)
    return torch.finfo(kind).eps if isinstance(kind, torch.dtype) and kind.is_floating_point else 0.0


def _described(call: _Call) -> str:
    return (
        f"{call['dtype']}, {call['numel']} elements: norm {call['norm']:.4g}, largest {call['largest']:.4g}, "
        f"{call['zeros']:.1%} zeros, {call['nonfinite']} inf or NaN"
    )
