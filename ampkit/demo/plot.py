"""The PNG: loss curves, time per step and loss scale, one row of panels per task."""

from pathlib import Path
from typing import Any

from ampkit.demo.results import LaneResult, Results, TaskResult

# Widest first: where curves coincide, the ones below stay visible.
STYLES = {
    "fp32": {"color": "#b8bcc4", "linewidth": 4.5},
    "torch.amp": {"color": "#2b6cb0", "linewidth": 2.2},
    "ampkit": {"color": "#dd6b20", "linewidth": 1.4, "linestyle": (0, (3, 2))},
}
SMOOTHING = 0.9


def draw(results: Results, path: Path) -> None:
    """Draw the tasks that took a step into `path`; there must be one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tasks = [task for task in results.tasks if task.lanes[0].record.losses]
    figure, panels = pyplot.subplots(
        len(tasks),
        3,
        figsize=(13, 3.6 * len(tasks)),
        squeeze=False,
        width_ratios=(3, 2, 3),
        layout="constrained",
    )
    for (loss, time, scale), task in zip(panels, tasks, strict=True):
        loss.set_title(task.title, loc="left", fontsize=11)
        _draw_losses(loss, task)
        _draw_times(time, task)
        _draw_scales(scale, task)
        for panel in (loss, time, scale):
            panel.spines[["top", "right"]].set_visible(False)
            panel.grid(axis="y", color="#e8eaee")
            panel.set_axisbelow(True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def smooth(values: list[float]) -> list[float]:
    """Exponential moving average, corrected for its start."""
    average, weight, out = 0.0, 0.0, []
    for value in values:
        average = SMOOTHING * average + (1 - SMOOTHING) * value
        weight = SMOOTHING * weight + (1 - SMOOTHING)
        out.append(average / weight)
    return out


def _draw_losses(panel: Any, task: TaskResult) -> None:
    for lane in task.lanes:
        panel.plot(smooth(lane.record.losses), label=_label(lane), **STYLES[lane.name])
    panel.set_yscale("log")
    panel.set(xlabel="step", ylabel="training loss, nats (smoothed)")
    panel.legend(frameon=False)


def _draw_times(panel: Any, task: TaskResult) -> None:
    timed = [(lane, lane.median_ms) for lane in task.lanes if lane.median_ms is not None]
    bars = panel.bar(
        [_label(lane).replace(" ", "\n") for lane, _ in timed],
        [median for _, median in timed],
        color=[STYLES[lane.name]["color"] for lane, _ in timed],
        width=0.6,
    )
    panel.bar_label(bars, fmt="%.1f")
    panel.set(ylabel="median ms per step")
    panel.margins(y=0.15)


def _draw_scales(panel: Any, task: TaskResult) -> None:
    scaled = [lane for lane in task.lanes if lane.record.scales]
    if not scaled:
        reason = "no loss scale:\nbf16 has fp32's range"
        panel.text(0.5, 0.5, reason, ha="center", va="center", color="#6b7280")
        panel.set_axis_off()
        return
    for lane in scaled:
        scales = lane.record.scales
        panel.step(range(len(scales)), scales, where="post", label=_label(lane), **STYLES[lane.name])
    last = scaled[-1]
    at = [step - 1 for step in last.record.skipped_steps]
    marks = {"marker": "v", "linestyle": "", "color": "#9b2c2c", "markersize": 5}
    panel.plot(at, [last.record.scales[i] for i in at], label=f"{last.name}: step skipped", **marks)
    panel.set_yscale("log", base=2)
    panel.set(xlabel="step", ylabel="loss scale")
    panel.legend(frameon=False)


def _label(lane: LaneResult) -> str:
    return lane.name if lane.name == lane.dtype else f"{lane.name} {lane.dtype}"
