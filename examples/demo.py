"""Train on real data in fp32, with torch.amp and with ampkit, side by side; `make demo` runs it.

A small CNN learns scikit-learn's handwritten digits, a character-level GPT the text of Python's own manual; nothing is
downloaded. The three copies of each model start from the same weights, train on the same batches and take turns. It
prints a table and writes `results.json` and `curves.png`; finally, it makes a gradient overflow in the middle of a
model and prints the scaler's report. The 16-bit dtype is the one that the device computes faster, by the measurement
of `ampkit doctor`. `python examples/demo.py --help` lists the options.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import math
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampkit
from ampkit import GradScaler, Policy, Rule, autocast, doctor
from ampkit.dtypes import dtype_name
from ampkit.text_tables import table, terminal_width

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
GROWTH_INTERVAL = 20  # torch's 2,000 steps would never let the scale grow in a demo


class DigitsNet(nn.Sequential):
    """Two convolutions with batch norm and a linear head: `[n, 1, 8, 8]` images to `[n, 10]` logits."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1, stride=2, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * width * 4 * 4, 10),
        )


class Block(nn.Module):
    """A pre-norm transformer block: causal self-attention, then a two-layer perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[batch, time, width]` to the same shape."""
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm_attention(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class CharGPT(nn.Module):
    """A character-level GPT: `[batch, time]` int64 codes to `[batch, time, alphabet]` logits."""

    def __init__(self, alphabet: int, context: int = 32, width: int = 128, depth: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(alphabet, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, alphabet)
        for embedding in (self.embed, self.position):  # with torch's unit normal training starts slowly
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, codes: Tensor) -> Tensor:
        """Predict the next character at each position."""
        x = self.embed(codes) + self.position(torch.arange(codes.shape[1], device=codes.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Digits:
    """Classify 1,797 handwritten digits, every fifth held out; measured by accuracy in percent."""

    title, unit = "handwritten digits, small CNN", "%"
    steps, peak_lr = 300, 5e-3

    def __init__(self, device: torch.device, batch_size: int = 64) -> None:
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        self.images = torch.as_tensor(pixels, dtype=torch.float32, device=device).view(-1, 1, 8, 8) / 16
        self.labels = torch.as_tensor(labels, dtype=torch.int64, device=device)
        rows = torch.arange(len(labels))
        self.train, self.test = rows[rows % 5 != 0], rows[rows % 5 == 0]
        self.batch_size = batch_size

    def model(self) -> nn.Module:
        """Return a new model, on the CPU, from torch's global random state."""
        return DigitsNet()

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Images `[n, 1, 8, 8]` in 0..1 and labels `[n]` of one step."""
        chosen = self.train[torch.randint(len(self.train), (self.batch_size,), generator=generator)]
        return self.images[chosen], self.labels[chosen]

    def evaluate(self, model: nn.Module) -> float:
        """Accuracy on the held-out images."""
        hits = model(self.images[self.test]).argmax(-1) == self.labels[self.test]
        return 100 * hits.float().mean().item()


class Characters:
    """Predict the next character of `pydoc_data.topics`; measured by bits per character on the last tenth."""

    title, unit = "Python's language reference, character-level GPT", "bits/char"
    steps, peak_lr = 400, 5e-3

    def __init__(self, device: torch.device, batch_size: int = 32, context: int = 32) -> None:
        from pydoc_data.topics import topics

        # Topics repeat paragraphs. Each is kept once, or held-out text would be seen in training.
        joined = "\n\n".join(topics[name] for name in sorted(topics))
        paragraphs = list(dict.fromkeys(part for part in joined.split("\n\n") if part.strip()))
        self.alphabet = "".join(sorted(set("\n\n".join(paragraphs))))
        code_of = {character: code for code, character in enumerate(self.alphabet)}
        cut = len(paragraphs) * 9 // 10
        self.train, self.test = (
            torch.tensor([code_of[character] for character in "\n\n".join(part)], device=device)
            for part in (paragraphs[:cut], paragraphs[cut:])
        )
        self.batch_size, self.context = batch_size, context

    def model(self) -> nn.Module:
        """Return a new model, on the CPU, from torch's global random state."""
        return CharGPT(len(self.alphabet), self.context)

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Codes `[n, context]`, and the same shifted by one."""
        return self._windows(
            self.train, torch.randint(len(self.train) - self.context, (self.batch_size,), generator=generator)
        )

    def evaluate(self, model: nn.Module) -> float:
        """Bits per character of the held-out text, which windows cover once."""
        starts = torch.arange(0, len(self.test) - self.context, self.context)
        total = sum(
            loss_of(model, self._windows(self.test, part)).item() * len(part)
            for part in starts.split(4 * self.batch_size)
        )
        return total / len(starts) / math.log(2)

    def _windows(self, text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        window = text[(starts[:, None] + torch.arange(self.context + 1)).to(text.device)]
        return window[:, :-1], window[:, 1:]


TASKS: dict[str, type[Digits] | type[Characters]] = {"digits": Digits, "gpt": Characters}


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross entropy of a batch, in nats."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


@dataclass
class Record:
    """Measurements of one way of training: an entry per step, and the held-out result at the end."""

    name: str
    dtype: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped_steps: list[int] = field(default_factory=list)
    step_bytes: int | None = None  # most memory that a step needed in addition to the memory allocated before it
    held_out: float | None = None


@dataclass
class Run:
    """One way of training: a model with its optimizer, autocast context and scaler."""

    record: Record
    model: nn.Module
    optimizer: torch.optim.Optimizer
    context: Callable[[], AbstractContextManager]
    scaler: torch.amp.GradScaler

    def step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """One training step, as a user would write it. Returns the loss, on the device."""
        self.optimizer.zero_grad()
        with self.context():
            loss = loss_of(self.model, batch)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def measured_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """Execute a step and record it. Waits for the device, so that the seconds are only of this step."""
        record, device = self.record, batch[0].device
        counter: Any = None if device.type == "cpu" else torch.get_device_module(device)
        before, live = self.scaler.get_scale(), 0
        if counter:
            counter.synchronize(device)
            counter.reset_peak_memory_stats(device)
            live = counter.memory_allocated(device)
        start = time.perf_counter()
        loss = self.step(batch)
        if counter:
            counter.synchronize(device)
            record.step_bytes = max(counter.max_memory_allocated(device) - live, record.step_bytes or 0)
        record.seconds.append(time.perf_counter() - start)
        record.losses.append(loss.item())
        if self.scaler.is_enabled():
            record.scales.append(self.scaler.get_scale())
            if record.scales[-1] < before:  # only a skipped step lowers the scale
                record.skipped_steps.append(len(record.losses))


def make_runs(task: Digits | Characters, device: torch.device, dtype: str, seed: int) -> list[Run]:
    """fp32, torch.amp and ampkit from the same weights. The loss scale is on for fp16 only.

    With "fp8" ampkit computes linear layers in FP8, except the last one, and torch.amp runs in bf16.
    """
    torch.manual_seed(seed)
    origin = task.model()
    device_type, low = device.type, DTYPES[dtype]
    options: dict[str, Any] = {"growth_interval": GROWTH_INTERVAL, "enabled": dtype == "fp16"}
    ways: list[tuple[str, str, Callable[[], AbstractContextManager], torch.amp.GradScaler]] = [
        ("fp32", "fp32", nullcontext, torch.amp.GradScaler(device_type, enabled=False)),
        (
            "torch.amp",
            "bf16" if dtype == "fp8" else dtype,
            lambda: torch.autocast(device_type, low),
            torch.amp.GradScaler(device_type, **options),
        ),
        ("ampkit", dtype, lambda: autocast(device_type, low), GradScaler(device_type, **options)),
    ]
    runs = []
    for name, shown, context, scaler in ways:
        model = copy.deepcopy(origin).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=task.peak_lr)
        if shown == "fp8":
            context = functools.partial(autocast, device_type, low, policy=float8_policy(device_type, model))
        runs.append(Run(Record(name, shown), model, optimizer, context, scaler))
    return runs


def sixteen_bit(times: dict[str, doctor.FormatTime]) -> str:
    """bf16 or fp16, whichever the device computes faster; fp16 if they are alike, to show the loss scale at work."""
    return "fp16" if times["float16"].times(times["bfloat16"]) <= doctor.AS_FAST else "bf16"


def float8_policy(device_type: str, model: nn.Module) -> Policy:
    """FP8 with a scale per row for all linear layers except the last one."""
    policy = Policy.default(device_type).with_rules({"aten::linear": Rule.FLOAT8_ROWWISE})
    *_, head = (module for module in model.modules() if isinstance(module, nn.Linear))
    return policy.for_modules(model, {head: Policy.default(device_type)})


def schedule(step: int, steps: int) -> float:
    """Fraction of the peak learning rate: a linear rise over the first tenth, then half a cosine."""
    rise = max(1, steps // 10)
    if step < rise:
        return (step + 1) / rise
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def train(task: Digits | Characters, runs: list[Run], steps: int, seed: int) -> None:
    """Step the runs in turn on the same batches, so that other load disturbs all of them; then evaluate them."""
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        if step == 5:  # the first steps prepare kernels
            seconds = sum(statistics.median(run.record.seconds) for run in runs) * (steps - step)
            print(f"  about {math.ceil(seconds)} s", flush=True)
        batch = task.batch(generator)
        first = step % len(runs)
        for run in (*runs[first:], *runs[:first]):
            run.optimizer.param_groups[0]["lr"] = task.peak_lr * schedule(step, steps)
            run.measured_step(batch)
        if (step + 1) % max(1, steps // 10) == 0 or step + 1 == steps:
            losses = "  ".join(f"{run.record.name} {run.record.losses[-1]:.3f}" for run in runs)
            print(f"  step {step + 1}/{steps}  loss: {losses}", flush=True)
    for run in runs:
        run.model.eval()
        with torch.no_grad(), run.context():
            run.record.held_out = task.evaluate(run.model)


def show_overflow(task: Digits | Characters, run: Run, seed: int) -> dict[str, Any]:
    """Take three more steps with a copy of a model; in the second, a gradient in its middle overflows."""
    model = copy.deepcopy(run.model).train()
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=task.peak_lr / 10)
    layers = [(path, module) for path, module in model.named_modules() if list(module.parameters(recurse=False))]
    path, module = layers[len(layers) // 2]
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    scaler = GradScaler(device, init_scale=256.0)
    report = ""
    print(f"\nstep 2 of 3: in fp16, the gradient of the output of {path} ({type(module).__name__}) overflows")
    for step in (1, 2, 3):
        optimizer.zero_grad()
        hook = module.register_forward_hook(_overflow) if step == 2 else None
        with autocast(device.type, torch.float16):
            loss = loss_of(model, task.batch(generator))
        if hook is not None:
            hook.remove()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        outcome = "executed" if scaler.stepped(optimizer) else "skipped"
        print(f"  step {step}  loss {loss.item():.3f}  scale {scaler.get_scale():.0f}  {outcome}")
        report = str(scaler.overflow_report()) if step == 2 else report
    print("scaler.overflow_report():", *report.splitlines(), sep="\n  ")
    print("torch.amp skips such a step too, and does not report where the overflow began.\n")
    return {"module": path, "report": report}


def _overflow(module: nn.Module, args: object, output: Tensor) -> None:
    """Forward hook: make one element of the gradient of the output inf."""

    def plant(grad: Tensor) -> Tensor:
        planted = grad.clone(memory_format=torch.contiguous_format)
        planted.view(-1)[0] = torch.inf
        return planted

    output.register_hook(plant)


def print_table(results: dict[str, Any]) -> None:
    """Print a row per task and run, and a line that explains the times; a dash stands for a missing figure."""
    rows = [("task", "run", "dtype", "last loss", "held out", "ms/step", "vs torch.amp", "skipped", "memory/step")]
    for name, task in results["tasks"].items():
        runs: list[Record] = task["runs"]
        native = statistics.median(runs[1].seconds)
        for run in runs:
            median = statistics.median(run.seconds)
            rows.append(
                (
                    name,
                    run.name,
                    run.dtype,
                    f"{run.losses[-1]:.4f}",
                    f"{run.held_out:.2f} {task['unit']}",
                    f"{1e3 * median:.1f}",
                    f"{median / native:.2f}x",
                    f"{len(run.skipped_steps)}/{len(run.losses)}" if run.scales else "-",
                    f"{run.step_bytes / 2**20:.1f} MiB" if run.step_bytes else "-",
                )
            )
    for line in table(
        rows, {"last loss", "held out", "ms/step", "vs torch.amp", "skipped", "memory/step"}, terminal_width()
    ):
        print(line)
    print(f"\n{explanation(results)}")


def explanation(results: dict[str, Any]) -> str:
    """Return one line that explains the times of the table."""
    ratios = []
    for name, task in results["tasks"].items():
        single, native, *_ = (statistics.median(run.seconds) for run in task["runs"])
        ratios.append(f"{native / single:.2f}x for {name}")
    why = "with small layers, casts take as long as the faster products save"
    if results["emulated"]:
        why = f"this device emulates {results['emulated']}, so other devices can be faster"
    return f"torch.amp against fp32, in time per step: {', '.join(ratios)}; {why}."


STYLES: dict[str, dict[str, Any]] = {  # widest first: if curves coincide, the wider ones are still visible
    "fp32": {"color": "#b8bcc4", "linewidth": 4.5},
    "torch.amp": {"color": "#2b6cb0", "linewidth": 2.2},
    "ampkit": {"color": "#dd6b20", "linewidth": 1.4, "linestyle": (0, (3, 2))},
}


def draw(results: dict[str, Any], path: Path) -> None:
    """Loss, time per step and, if there is one, the loss scale; a row of panels per task that took a step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    tasks = [task for task in results["tasks"].values() if task["runs"][-1].losses]
    widths = (3, 2, 3) if any(run.scales for task in tasks for run in task["runs"]) else (3, 2)
    figure, panels = pyplot.subplots(
        len(tasks),
        len(widths),
        figsize=(1.7 * sum(widths), 3.6 * len(tasks)),
        squeeze=False,
        width_ratios=widths,
        layout="constrained",
    )
    for (loss, duration, *scales), task in zip(panels, tasks, strict=True):
        runs: list[Record] = [run for run in task["runs"] if run.losses]
        for run in runs:
            loss.plot(_smooth(run.losses), label=run.name, **STYLES[run.name])
            for scale in scales if run.scales else ():
                scale.step(range(len(run.scales)), run.scales, where="post", label=run.name, **STYLES[run.name])
                scale.set(xlabel="step", ylabel="loss scale")
                scale.set_yscale("log", base=2)
        colors = [STYLES[run.name]["color"] for run in runs]
        medians = [1e3 * statistics.median(run.seconds) for run in runs]
        bars = duration.bar([run.name for run in runs], medians, color=colors)
        duration.bar_label(bars, fmt="%.1f")
        duration.margins(y=0.1)  # for the label of the highest bar
        loss.set(title=task["title"], xlabel="step", ylabel="training loss, nats (smoothed)", yscale="log")
        loss.yaxis.set_major_formatter(ticker.LogFormatter())
        loss.yaxis.set_minor_formatter(ticker.LogFormatter(minor_thresholds=(1, 0.4)))
        duration.set(ylabel="median ms per step")
        loss.legend(frameon=False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _smooth(values: list[float]) -> list[float]:
    """Exponential moving average, corrected for its start."""
    average, weight, out = 0.0, 0.0, []
    for value in values:
        average, weight = 0.9 * average + 0.1 * value, 0.9 * weight + 0.1
        out.append(average / weight)
    return out


def save(results: dict[str, Any], folder: Path) -> bool:
    """Write results.json and curves.png; without a step an earlier run's files remain. Return whether it wrote."""
    if not any(run.losses for task in results["tasks"].values() for run in task["runs"]):
        return False
    plain = results | {
        "tasks": {
            name: task | {"runs": [asdict(run) for run in task["runs"]]} for name, task in results["tasks"].items()
        }
    }
    (folder / "results.json").write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    draw(results, folder / "curves.png")
    return True


def main(argv: list[str] | None = None) -> int:
    """Run the demo; return the exit code. Ctrl-C saves the measurements so far, if there are any, and returns 130."""
    options = _options(argv)
    device, names = options.device, list(TASKS) if options.model == "both" else [options.model]
    trained: list[tuple[Digits | Characters, Run]] = []
    results: dict[str, Any] = {
        "seed": options.seed,
        "device": str(device),
        "tasks": {},
        "machine": {
            "platform": platform.platform(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "ampkit": ampkit.__version__,
            "torch_threads": torch.get_num_threads(),
        },
    }
    print(f"fp32, torch.amp and ampkit side by side on {device}: same seed, same batches, in turns.")
    try:
        times = doctor.measure(device)
        dtype = options.dtype or sixteen_bit(times)
        print(f"ampkit doctor, on this device: {doctor.recommendation(times)}.", flush=True)
        is_emulated = times[dtype_name(DTYPES[dtype])].native is False
        results["emulated"] = dtype if is_emulated else None
        for name in names:
            task = TASKS[name](device)
            steps = options.steps or task.steps
            runs = make_runs(task, device, dtype, options.seed)
            results["tasks"][name] = {"title": task.title, "unit": task.unit, "runs": [run.record for run in runs]}
            used = "torch.amp uses bf16, ampkit fp8" if dtype == "fp8" else f"torch.amp and ampkit use {dtype}"
            print(f"\n{name}: {task.title}, {steps} steps; {used}", flush=True)
            train(task, runs, steps, options.seed)
            trained.append((task, runs[-1]))
        results["overflow"] = show_overflow(*trained[0], options.seed)
    except KeyboardInterrupt:
        message = f"the measurements so far are in {options.out}" if save(results, options.out) else "no step was run"
        print(f"\ninterrupted; {message}", file=sys.stderr)
        return 130
    print_table(results)
    save(results, options.out)
    print(f"\nnumbers: {options.out / 'results.json'}\ncurves:  {options.out / 'curves.png'}")
    return 0


def _options(argv: list[str] | None) -> argparse.Namespace:
    """Return the command line, checked before minutes of training."""
    parser = argparse.ArgumentParser(prog="demo", description="Train in fp32, with torch.amp and with ampkit.")
    parser.add_argument("--model", choices=[*TASKS, "both"], default="both", help="the model to train (default: both)")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="of torch.amp and ampkit (default: the faster of fp16 and bf16 here); with fp8, torch.amp runs in bf16",
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: the accelerator, else cpu)")
    parser.add_argument("--steps", type=int, help="for each model (default: 300 for digits, 400 for gpt)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches (default: 0)")
    parser.add_argument("--out", type=Path, default=Path("ampkit-demo"), help="folder (default: ampkit-demo)")
    options = parser.parse_args(argv)
    if options.steps is not None and options.steps < 1:
        parser.error(f"argument --steps: expected 1 or more, got {options.steps}")
    try:
        import matplotlib  # noqa: F401
        import sklearn  # noqa: F401
    except ImportError as error:
        parser.error(f"needs {error.name}; install both with: pip install matplotlib scikit-learn")
    try:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        options.device = torch.device(options.device) if options.device else accelerator or torch.device("cpu")
        torch.zeros(1, device=options.device).item()
        torch.manual_seed(options.seed)
    except (RuntimeError, AssertionError, NotImplementedError, ValueError) as error:
        reason = str(error).splitlines()[0]
        parser.error(f"cannot use device {str(options.device)!r} with seed {options.seed}: {reason}")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=options.out).close()
    except OSError as error:
        parser.error(f"argument --out: cannot write into {str(options.out)!r} ({error.strerror})")
    return options


if __name__ == "__main__":
    sys.exit(main())
