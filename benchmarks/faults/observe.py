"""What a training program does: its losses, metrics, gradients, steps and weights, in a forked process."""

from __future__ import annotations

import contextlib
import io
import math
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from benchmarks.faults.programs import cache

SECONDS = 20


@dataclass
class Record:
    """One run of a program."""

    error: str = ""
    losses: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    gradients: dict[int, list[torch.Tensor | None]] = field(default_factory=dict)  # by the number of backward calls
    before: list[torch.Tensor] = field(default_factory=list)
    after: list[torch.Tensor] = field(default_factory=list)
    buffers: list[torch.Tensor] = field(default_factory=list)
    steps: int = 0
    executed: dict[str, list[int]] = field(default_factory=dict)  # lines by file, if they were asked for
    seconds: float = 0.0


def observe(folder: Path, arguments: Sequence[str], *, lines: bool = False) -> Record:
    """Run a program's `train.py` in a child of this process and return what it did.

    Args:
        folder: The folder of the program.
        arguments: Of the script.
        lines: Whether to record the lines that ran, which takes longer.

    Returns:
        The record, whose `error` has the last line of a traceback if the program failed.
    """
    with tempfile.NamedTemporaryFile() as file:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                _child(folder, arguments, lines=lines, path=file.name)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        if os.waitpid(child, 0)[1] or not Path(file.name).stat().st_size:
            return Record(error="the process ended")
        return torch.load(file.name, weights_only=False)


def _child(folder: Path, arguments: Sequence[str], *, lines: bool, path: str) -> None:
    signal.signal(signal.SIGPROF, _too_long)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # of processor time
    os.chdir(folder)
    torch.set_num_threads(1)
    sys.argv = ["train.py", *arguments]
    sys.path[:0] = [str(folder), str(cache() / "site-packages")]
    record, began, output = Record(), time.process_time(), io.StringIO()
    for name in [name for name in sys.modules if name.split(".")[0] in {"models", "model", "utils", "util", "losses"}]:
        del sys.modules[name]
    parameters = _watch(record)
    if lines:
        sys.settrace(_tracer(folder, record.executed))
    values: dict[str, Any] = {}
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            values = runpy.run_path("train.py", run_name="__main__")
        except SystemExit as left:
            record.error = f"SystemExit: {left.code}" if left.code else ""
        except BaseException as error:
            record.error = traceback.format_exception_only(error)[-1].strip()
    sys.settrace(None)
    signal.setitimer(signal.ITIMER_PROF, 0)
    _read(record, values)
    record.after = [weight.detach().float().clone() for weight in parameters]
    record.seconds = time.process_time() - began
    torch.save(record, path)


def _too_long(*_: object) -> None:
    raise TimeoutError(f"longer than {SECONDS} s")


def _watch(record: Record) -> list[torch.Tensor]:
    backwards, backward = [0], torch.Tensor.backward
    parameters: list[torch.Tensor] = []

    def counted(*args: Any, **kwargs: Any) -> None:
        backwards[0] += 1
        backward(*args, **kwargs)

    def before(optimizer: Optimizer, *_: object) -> None:
        updated = [weight for group in optimizer.param_groups for weight in group["params"]]
        if not record.before:
            record.before = [weight.detach().float().clone() for weight in updated]
        if [weight.shape for weight in updated] == [weight.shape for weight in record.before]:
            parameters[:] = updated  # a program may go on with another model, from a checkpoint
        if len(record.gradients) < 3:
            record.gradients[backwards[0]] = [
                None if weight.grad is None else weight.grad.detach().float().clone() for weight in updated
            ]
        record.steps += 1

    torch.Tensor.backward = counted  # type: ignore[method-assign]
    register_optimizer_step_pre_hook(before)
    return parameters


def _read(record: Record, values: dict[str, Any]) -> None:
    model = values.get("model")
    if isinstance(model, torch.nn.Module):
        record.buffers = [buffer.detach().float().clone() for buffer in model.buffers() if buffer.is_floating_point()]
    losses = values.get("losses", [])
    if isinstance(losses, dict):
        record.metrics |= {f"loss {name}": float(value) for name, value in losses.items()}
    else:
        record.losses = [float(loss) for loss in losses]
    for name, value in values.get("metrics", {}).items():
        record.metrics[name] = float(value)
    if "lossf" in values:
        record.losses = [float(values["lossf"])]


def _tracer(folder: Path, executed: dict[str, list[int]]) -> Any:
    seen: dict[str, set[int]] = {}
    prefix = str(folder.resolve()) + os.sep

    def trace(frame: Any, event: str, _: object) -> Any:
        file = frame.f_code.co_filename
        if file == "train.py":
            file = prefix + file
        if not file.startswith(prefix):
            return None
        lines = seen.setdefault(file[len(prefix) :], set())
        if event == "line" and frame.f_lineno not in lines:
            lines.add(frame.f_lineno)
            executed.setdefault(file[len(prefix) :], []).append(frame.f_lineno)
        return trace

    return trace


# Symptoms: how a run differs from healthy ones, beyond what rounding and seeds explain.


def symptoms(run: Record, healthy: Record, exact: Record, seeds: Iterable[Record]) -> dict[str, str]:
    """Return what is wrong with a run, by kind; nothing where it is as good as the healthy ones.

    Args:
        run: The run.
        healthy: The program without the fault, with the same seed and dtype.
        exact: The same in float32.
        seeds: The program without the fault, with other seeds.

    Returns:
        The symptoms: "nonfinite", "skipped", "gradients", "parameters", "loss", "metric", each with the measure.
    """
    found: dict[str, str] = {}
    broken = _nonfinite(run)
    if broken and not _nonfinite(healthy):
        found["nonfinite"] = broken
    if run.steps < healthy.steps - max(1, 0.15 * healthy.steps):
        found["skipped"] = f"{run.steps} steps instead of {healthy.steps}"
    if wrong := _wrong_gradients(run, healthy, exact):
        found["gradients"] = wrong
    if broken:
        return found
    if len(run.after) == len(exact.after) == len(healthy.after):
        moved = _norm(_difference(exact.after, exact.before))
        off, usual = (_norm(_difference(other.after, exact.after)) / moved for other in (run, healthy))
        if off > max(4 * usual, 0.4):
            found["parameters"] = f"{off:.3g} of the way from the start are off; healthy {usual:.3g}"
        if run.buffers and len(run.buffers) == len(exact.buffers):
            size = _norm(exact.buffers) or 1.0
            off, usual = (_norm(_difference(other.buffers, exact.buffers)) / size for other in (run, healthy))
            if off > max(3 * usual, 0.1):
                found["buffers"] = f"buffers {off:.3g} off; healthy {usual:.3g}"
    others = [healthy, *seeds]
    if wrong := _outside(run, others):
        found["loss"] = wrong
    for name, value in run.metrics.items():
        wanted, rounded = exact.metrics.get(name, value), healthy.metrics.get(name, value)
        off, usual = abs(value - wanted), abs(rounded - wanted)
        spread = [other.metrics[name] for other in others if name in other.metrics]
        outside = value < min(spread, default=value + 1) or value > max(spread, default=value - 1)
        if outside and off > max(3 * usual, 0.05 * max(abs(wanted), 0.2)):
            found["metric"] = f"{name} is {value:.4g}, not {rounded:.4g}; in float32 {wanted:.4g}"
    return found


def _nonfinite(run: Record) -> str:
    """Return what is inf or NaN in a run at its end or in a loss; "" if nothing is."""
    bad = [place for place, loss in enumerate(run.losses) if not math.isfinite(loss)]
    if bad:
        return f"the loss is {run.losses[bad[0]]} from step {bad[0]}"
    for name, value in run.metrics.items():
        if not math.isfinite(value):
            return f"{name} is {value}"
    if any(not tensor.isfinite().all() for tensor in (*run.after, *run.buffers)):
        return "a parameter or buffer is not finite"
    return ""


def _wrong_gradients(run: Record, healthy: Record, exact: Record) -> str:
    """Return how the gradients of the first step are wrong; "" where they are not."""
    if not run.gradients or not exact.gradients or not healthy.gradients:
        return ""
    first = min(exact.gradients)
    if min(healthy.gradients) != first or first not in run.gradients:
        return ""
    wanted, given, usual = exact.gradients[first], run.gradients[first], healthy.gradients[first]
    if len(wanted) != len(given):
        return ""
    size = _norm(wanted)
    if any(gradient is not None and not gradient.isfinite().all() for gradient in given):
        return "gradients are not finite at a step"
    whole, rounding = _norm(_difference(given, wanted)) / size, _norm(_difference(usual, wanted)) / size
    if whole > max(3 * rounding, 0.08):
        return f"gradients {whole:.3g} off at the first step; healthy {rounding:.3g}"
    for place, gradient in enumerate(wanted):
        norm = 0.0 if gradient is None else float(gradient.norm())
        if norm > 1e-2 * size:
            off, rounded = (_norm(_difference([other[place]], [gradient])) / norm for other in (given, usual))
            if off > max(4 * rounded, 0.5):
                return f"the gradient of parameter {place} is {off:.3g} off at the first step; healthy {rounded:.3g}"
    return ""


def _outside(run: Record, others: Sequence[Record]) -> str:
    """Return whether the last third of the losses is outside of the spread of healthy runs."""
    if len(run.losses) < 3 or any(len(other.losses) != len(run.losses) for other in others):
        return ""
    third = len(run.losses) // 3
    value, *usual = (sum(other.losses[-third:]) / third for other in (run, *others))
    spread = max(usual) - min(usual) + 0.02 * abs(usual[0])
    if not min(usual) - spread <= value <= max(usual) + spread:
        return f"{value:.4g} at the end; {min(usual):.4g} to {max(usual):.4g} with {len(usual)} seeds"
    return ""


def _difference(
    first: Sequence[torch.Tensor | None], second: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    pairs = zip(first, second, strict=True)
    return [one if two is None else two if one is None else one - two for one, two in pairs]


def _norm(tensors: Sequence[torch.Tensor | None]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors if tensor is not None))
