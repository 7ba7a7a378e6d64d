"""From rows of JSON to a report: Markdown with every figure and aim, plots where matplotlib is, the table last."""

import json
from pathlib import Path
from typing import Any

# (list, job, torch's form, most that ours / theirs may be): aims stated before anything was measured, for one H200.
AIMS = (
    ("GPT-2 124M", "unscale", "torch", 1.0),
    ("GPT-2 1.5B", "unscale", "torch", 1.0),
    ("ResNet-50", "unscale", "torch", 1.0),
    ("GPT-2 124M", "unscale + clip", "torch", 0.62),
    ("GPT-2 1.5B", "unscale + clip", "torch", 0.62),
    ("GPT-2 124M", "clip + AdamW", "torch", 0.70),
    ("GPT-2 1.5B", "clip + AdamW", "torch", 0.70),
    ("GPT-2 124M", "clip + AdamW", "torch foreach", 0.36),
    ("GPT-2 1.5B", "clip + AdamW", "torch foreach", 0.36),
    ("5000 tiny", "unscale", "torch", 0.5),
    ("5000 tiny", "unscale + clip", "torch", 0.5),
)
COPY_RATE_AIM = ("GPT-2 1.5B", "unscale", 0.90)


def load(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSON-lines file; none if it is missing, whole rows only if it was cut short."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def table(rows: list[dict[str, Any]]) -> list[str]:
    """One Markdown line per comparison with torch."""
    lines = [
        "| list | dtype | job | ampkit ms | GB/s | of copy | launches | host ms | torch form | torch ms | launches | "
        "host ms | ratio (20-80 %) |",
        "|---|---|---|---:|---:|---:|---:|---:|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['list']} | {row['dtype']} | failed: {row['error'][:80]} |||||||||||")
            continue
        ours = row["sides"]["ampkit"]
        head = f"| {row['list']} | {row['dtype']} | {row['job']} | {ours['device_ms']:.3f} | {ours['gb_per_s']:.0f} "
        head += f"| {ours['of_copy_rate']:.0%} | {ours['launches']} | {ours['host_ms']:.3f} "
        others = {name: side for name, side in row["sides"].items() if name != "ampkit"}
        if not others:
            lines.append(f"{head}| torch cannot | | | | |")
        for name, side in others.items():
            spread = f"{side['ratio']:.2f} ({side['ratio_low']:.2f}-{side['ratio_high']:.2f})"
            torchs = f"{side['device_ms']:.3f} | {side['launches']} | {side['host_ms']:.3f}"
            lines.append(f"{head}| {name} | {torchs} | {spread} |")
    return lines


def aims(rows: list[dict[str, Any]]) -> list[str]:
    """Each aim, what was measured, and whether it was reached."""
    found = {
        (row["list"], row["job"]): row for row in rows if row.get("dtype") == "float32" and "sides" in row
    }
    lines = []
    for name, job, form, most in AIMS:
        side = found.get((name, job), {}).get("sides", {}).get(form)
        if side is None:
            lines.append(f"- {name}, {job} <= {most} x {form}: not measured")
            continue
        verdict = "reached" if side["ratio"] <= most else "MISSED"
        lines.append(f"- {name}, {job} <= {most} x {form}: {side['ratio']:.2f}, {verdict}")
    name, job, least = COPY_RATE_AIM
    ours = found.get((name, job), {}).get("sides", {}).get("ampkit")
    if ours is not None:
        verdict = "reached" if ours["of_copy_rate"] >= least else "MISSED"
        lines.append(
            f"- {name}, {job} at >= {least:.0%} of the copy rate: {ours['of_copy_rate']:.0%}, {verdict}"
        )
    return lines


def tuning(rows: list[dict[str, Any]]) -> list[str]:
    """The three fastest launch parameters per kernel, and those it ships with."""
    lines = []
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        timed = sorted(
            (r for r in rows if r["kernel"] == kernel and "device_ms" in r), key=lambda r: r["device_ms"]
        )
        best = "; ".join(
            f"{'shipped: ' * r['shipped']}block {r['block']}, warps {r['warps']}, programs {r['programs']}: "
            f"{r['device_ms']:.3f} ms"
            for r in timed[:3] + [r for r in timed[3:] if r["shipped"]]
        )
        lines.append(f"- {kernel} ({len(timed)} tried): {best or 'nothing ran'}")
    return lines


def plot(rows: list[dict[str, Any]], path: Path) -> bool:
    """Ratios to torch as bars; False where matplotlib is missing."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return False
    bars = [
        (f"{row['list']}, {row['job']}\nagainst {name}", side["ratio"])
        for row in rows
        if row.get("dtype") == "float32" and "sides" in row
        for name, side in row["sides"].items()
        if name != "ampkit"
    ]
    if not bars:
        return False
    figure, axes = pyplot.subplots(figsize=(8, 1 + 0.35 * len(bars)))
    axes.barh([label for label, _ in bars], [value for _, value in bars], color="#3b6ea5")
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xlabel("device time, ampkit / torch (less is better)")
    axes.tick_params(axis="y", labelsize=6)
    axes.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return True


def write(out: Path) -> int:
    """Write `out/report.md` and the plot, print the table last; 1 where nothing was measured."""
    rows = load(out / "rows.jsonl")
    environment_file = out / "environment.json"
    facts = json.loads(environment_file.read_text()) if environment_file.exists() else {}
    lines = ["# Kernels on a GPU", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    for name in ("checks", "small-checks"):
        path = out / f"{name}.json"
        if path.exists():
            results = json.loads(path.read_text())
            failed = [f"{check}: {text}" for check, text in results.items() if text]
            lines += ["", f"## {name}: {len(results) - len(failed)} of {len(results)} passed", ""]
            lines += [f"- {text}" for text in failed]
    if plot(rows, out / "ratios.png"):
        lines += ["", "![ratios](ratios.png)"]
    lines += ["", "## Launch parameters", "", *tuning(load(out / "tuning.jsonl"))]
    lines += ["", "## Aims", "", *aims(rows), "", "## All figures", "", *table(rows), ""]
    (out / "report.md").write_text("\n".join(lines))
    print("\n".join([*aims(rows), "", *table(rows)]))
    return 0 if rows else 1
