"""Reports as one HTML file: no script, nothing fetched, light and dark as the reader's system has it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ampkit.debugging.hashes import HashLog, compare_hashes
from ampkit.debugging.operator_stats import OperatorStats
from ampkit.debugging.precision_report import PrecisionReport
from ampkit.debugging.report import Finding, NonFiniteReport
from ampkit.debugging.report_file import MonitorLog, Report, SearchLines, named

__all__ = ["page"]

_ROWS = 30


class Cell:
    """What stands in a table: text, set right for a number, before a bar for a share of 1."""

    def __init__(self, text: object, cls: str = "", share: float | None = None) -> None:
        self.text, self.cls, self.share = str(text), cls, share

    def __str__(self) -> str:
        if self.share is None:
            return f'<td class="{self.cls}">{escape(self.text)}</td>' if self.cls else f"<td>{escape(self.text)}</td>"
        share = f"{100 * min(max(self.share, 0.0), 1.0):.1f}%"
        return f'<td class="{self.cls} bar" style="--share: {share}">{escape(self.text)}</td>'


def page(reports: Sequence[tuple[str, Report]]) -> str:
    """One page with a section for each report, given with the names of their files."""
    sections = [_section(number, name, report) for number, (name, report) in enumerate(reports, 1)]
    titles = [_SECTIONS[type(report)][0] for _, report in reports]
    links = "".join(
        f'<li><a href="#section-{number}">{escape(title if titles.count(title) == 1 else f"{title}, {name}")}</a></li>'
        for number, (title, (name, _)) in enumerate(zip(titles, reports, strict=True), 1)
    )
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    between = _differences([(name, report) for name, report in reports if isinstance(report, HashLog)])
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>ampkit debug report</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        f'<header><h1>ampkit debug report</h1>\n<nav aria-label="sections"><ul>{links}</ul></nav></header>\n'
        f"<main>\n{''.join(sections)}{between}</main>\n</body>\n</html>\n"
    )


def _section(number: int, name: str, report: Report) -> str:
    title, lines = _SECTIONS[type(report)]
    body = "\n".join(lines(report))
    return (
        f'<section id="section-{number}">\n<h2>{escape(title)}</h2>\n<p class="file">{escape(name)}</p>\n{body}\n'
        "</section>\n"
    )


def _nonfinite(report: NonFiniteReport) -> Iterator[str]:
    looked = f"{report.operators} operators in {_count(report.steps, 'step')}"
    rank = f", rank {report.rank} of {report.world_size}" if report.world_size > 1 else ""
    if report.findings:
        yield f'<p><span class="bad">{_count(len(report.findings), "origin")}</span> among {looked}{rank}</p>'
    else:
        yield f'<p><span class="good">nothing found</span> among {looked}{rank}</p>'
    yield from map(_finding, report.findings)
    if report.skipped:
        yield "<h3>left to the loss scaler, which skips the step</h3>"
        yield from map(_finding, report.skipped)
    yield from (f"<p>note: {escape(note)}</p>" for note in report.notes)


def _finding(one: Finding) -> str:
    rows = [
        ("origin", f"<code>{escape(str(one.origin))}</code>"),
        ("why", escape(one.cause.text)),
        ("inputs", "<br>".join(f"<code>{escape(str(each))}</code>" for each in one.inputs)),
        ("parameter", f"<code>{escape(one.parameter)}</code>" if one.parameter else ""),
        ("scale", "" if one.scale is None else f"{one.scale:g}"),
    ]
    if one.suggestion is not None:
        tried = "good" if one.suggestion.verified else ""
        rows += [
            ("change", f"<code>{escape(one.suggestion.code)}</code>"),
            ("evidence", f'<span class="{tried}">{escape(one.suggestion.evidence)}</span>'),
        ]
    way = "".join(f"<li><code>{escape(str(each))}</code></li>" for each in one.chain)
    rows.append(("way", f"<details><summary>{_count(len(one.chain), 'operator')}</summary><ol>{way}</ol></details>"))
    times = f", {one.times} times alike" if one.times > 1 else ""
    listed = "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in rows if text)
    return f'<div class="card"><h3>{escape(one.symptom)} in step {one.step}{times}</h3><dl>{listed}</dl></div>'


def _precision(report: PrecisionReport) -> Iterator[str]:
    yield f'<div class="card code">{_lines(str(report))}</div>'
    modules = report.modules()
    yield f"<h3>modules, by what their own operators round{_of(modules)}</h3>"
    yield _table(("own error", "module", "operator", "phase", "total", "amplification", "to zero"), (
        (
            _decades(one.local, 1e-8), Cell(one.module or "(none)", "name"), Cell(one.worst.op, "name"),
            Cell(one.phase), _number(one.total), _number(one.amplification), _share(one.lost),
        )
        for one in modules[:_ROWS]
    ))
    gradients = sorted(report.parameters, key=lambda one: -one.share)
    yield f"<h3>gradients, by their share of the error{_of(gradients)}</h3>"
    yield _table(("share", "parameter", "error", "to zero", "overflowed", "norm"), (
        (_decades(one.share, 1e-8), Cell(one.parameter, "name"), _number(one.error), _share(one.lost),
         _share(one.overflowed), _number(one.norm))
        for one in gradients[:_ROWS]
    ))


def _operators(report: OperatorStats) -> Iterator[str]:
    whole = report.seconds or 1.0
    slowest = report.by_operator()
    calls = sum(one.calls for one in slowest)
    yield f"<p>{report.seconds * 1e3:.3g} ms in {_count(calls, 'operator call')}</p>"
    yield f"<h3>operators, the slowest first{_of(slowest)}</h3>"
    yield _table(("time", "operator", "dtype", "calls", "MB"), (
        (
            _bar(one.seconds / whole), Cell(one.op, "name"), Cell(one.dtype), Cell(one.calls, "number"),
            Cell(f"{one.nbytes / 1e6:.3f}", "number"),
        )
        for one in slowest[:_ROWS]
    ))
    casts = list(report.casts().items())
    if casts:
        most = max(nbytes for _, nbytes in casts)
        yield f"<h3>casts, by module{_of(casts)}</h3>"
        yield _table(("MB", "module"), (
            (Cell(f"{nbytes / 1e6:.3f}", "number", nbytes / most), Cell(module or "(none)", "name"))
            for module, nbytes in casts[:_ROWS]
        ))
    shapes = sorted(report.shapes, key=lambda one: -one.seconds)
    if shapes:
        yield f"<h3>products in 16 bits with sizes that are no multiples of 8{_of(shapes)}</h3>"
        yield _table(("time", "to change", "operator", "module", "parameter"), (
            (
                _bar(one.seconds / whole), Cell(", ".join(f"{name} {size}" for name, size in one.odd.items())),
                Cell(one.op, "name"), Cell(one.module or "(none)", "name"), Cell(one.parameter, "name"),
            )
            for one in shapes[:_ROWS]
        ))


def _hashes(report: HashLog) -> Iterator[str]:
    phases: dict[str, int] = {}
    for call in report.calls:
        phases[call.phase] = phases.get(call.phase, 0) + 1
    words = ", ".join(f"{count} in {phase}" for phase, count in phases.items())
    yield f"<p>{_count(len(report.calls), 'result')}: {escape(words)}</p>"


def _differences(logs: Sequence[tuple[str, HashLog]]) -> str:
    """The first log beside each of the others."""
    if len(logs) < 2:
        return ""
    (first, a), *others = logs
    cards = []
    for name, b in others:
        difference = compare_hashes(a, b)
        cards.append(
            f'<div class="card"><h3>{escape(first)} and {escape(name)}</h3>'
            f'<div class="code">{_lines(str(difference))}</div></div>'
        )
    return f'<section id="differences">\n<h2>hashes that differ</h2>\n{"".join(cards)}\n</section>\n'


def _monitor(report: MonitorLog) -> Iterator[str]:
    samples = report.samples
    yield f"<p>{escape(str(report))}, {_count(sum(one['skipped'] for one in samples), 'skipped step')}</p>"
    for kind in ("outputs", "gradients"):
        least = [(one["step"], min((float(each["headroom"]) for each in one[kind].values()), default=math.inf))
                 for one in samples]
        yield _figure(f"headroom of {kind}: powers of two between the largest value of any module and the end of the "
                      "range", least)
    yield _figure("loss scale, as a power of two", [
        (one["step"], math.log2(one["scale"])) for one in samples if isinstance(one["scale"], int | float)
    ])
    for kind in ("outputs", "gradients"):
        worst: dict[str, tuple[float, float, bool]] = {}
        for sample in samples:
            for name, one in sample[kind].items():
                headroom, underflow, broken = worst.get(name, (math.inf, 0.0, False))
                worst[name] = (
                    min(headroom, float(one["headroom"])), max(underflow, float(one["underflow"])),
                    broken or one["broken"],
                )
        nearest = sorted(worst.items(), key=lambda item: item[1][0])
        if nearest:
            yield f"<h3>{kind}, by module, at their worst{_of(nearest)}</h3>"
            yield _table(("headroom", "module", "underflow", "inf or NaN"), (
                (_number(headroom), Cell(name or "(none)", "name"), _bar(underflow),
                 Cell("yes" if broken else "no", "bad" if broken else ""))
                for name, (headroom, underflow, broken) in nearest[:_ROWS]
            ))
    lost: dict[str, float] = {}
    for sample in samples:
        for name, share in sample["lost_updates"].items():
            lost[name] = max(lost.get(name, 0.0), float(share))
    most = sorted(((name, share) for name, share in lost.items() if share > 0), key=lambda item: -item[1])
    if most:
        yield f"<h3>updates that were lost, at their worst{_of(most)}</h3>"
        yield _table(("lost", "parameter"), ((_bar(share), Cell(name, "name")) for name, share in most[:_ROWS]))


def _search(report: SearchLines) -> Iterator[str]:
    yield f"<p>{escape(str(report))}</p>"
    rows = []
    for number, one in enumerate(report.evaluations, 1):
        passes = Cell("passes" if one["passes"] else "fails", "good" if one["passes"] else "bad")
        value = f"{one['value']:.4g}" if isinstance(one["value"], float) else one["value"]
        rows.append((Cell(number, "number"), Cell(value, "number"), passes, Cell(f"{one['seconds']:.3g}", "number"),
                     Cell(named(one["float32"]), "name long"), one is report.best))
    yield _table(("", "metric", "", "seconds", "in float32"), (row[:-1] for row in rows), [row[-1] for row in rows])


_SECTIONS: dict[type, tuple[str, Callable[[Any], Iterator[str]]]] = {
    NonFiniteReport: ("inf and NaN", _nonfinite),
    PrecisionReport: ("precision", _precision),
    OperatorStats: ("operators", _operators),
    HashLog: ("hashes", _hashes),
    MonitorLog: ("monitor", _monitor),
    SearchLines: ("search", _search),
}


def _table(header: Sequence[str], rows: Iterable[Sequence[Cell]], marked: Sequence[bool] = ()) -> str:
    rows = list(rows)
    numeric = [any("number" in row[place].cls for row in rows) for place in range(len(header))]
    head = "".join(
        f'<th scope="col" class="number">{escape(name)}</th>' if right else f'<th scope="col">{escape(name)}</th>'
        for name, right in zip(header, numeric, strict=True)
    )
    body = "".join(
        f"<tr{' class=best' if place < len(marked) and marked[place] else ''}>{''.join(map(str, row))}</tr>\n"
        for place, row in enumerate(rows)
    )
    return (
        f'<div class="scroll" tabindex="0"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}</tbody></table></div>"
    )


def _figure(caption: str, points: Sequence[tuple[int, float]]) -> str:
    """A line over steps; nothing for fewer than two points that have a place."""
    points = [(step, value) for step, value in points if math.isfinite(value)]
    if len(points) < 2:
        return ""
    first, last = points[0][0], points[-1][0]
    low, high = min(0.0, *(value for _, value in points)), max(value for _, value in points) or 1.0
    places = " ".join(
        f"{1000 * (step - first) / max(1, last - first):.1f},{200 - 190 * (value - low) / (high - low):.1f}"
        for step, value in points
    )
    return (
        f'<figure><figcaption>{escape(caption)}: {low:.3g} to {high:.3g}</figcaption>'
        f'<svg viewBox="0 0 1000 200" preserveAspectRatio="none" role="img" aria-label="{escape(caption)}">'
        f'<line class="axis" x1="0" y1="200" x2="1000" y2="200"/><polyline class="line" points="{places}"/></svg>'
        f'<div class="ends"><span>step {first}</span><span>step {last}</span></div></figure>'
    )


def _number(value: float) -> Cell:
    return Cell(f"{value:.3g}", "number bad" if not math.isfinite(value) else "number")


def _share(value: float) -> Cell:
    return Cell(f"{value:.2%}", "number")


def _bar(share: float) -> Cell:
    return Cell(f"{share:.1%}", "number", share)


def _decades(value: float, least: float) -> Cell:
    """A number with a bar for its decades above `least`; 1 and more are the whole."""
    share = 1.0 if not value < 1 else 0.0 if value <= least else 1 - math.log10(value) / math.log10(least)
    return Cell(f"{value:.2g}", "number", share)


def _lines(text: str) -> str:
    """A report's text, each line by itself, with its columns."""
    return "".join(f"<div>{escape(line)}</div>" for line in text.splitlines())


def _of(some: Sequence[Any]) -> str:
    return f", {_ROWS} of {len(some)}" if len(some) > _ROWS else ""


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
