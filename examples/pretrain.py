"""Pretrain a small GPT on several ranks, in a run that survives kills, preemption and another number of ranks.

    torchrun --nproc-per-node 2 examples/pretrain.py --parallel fsdp --precision fp16 --steps 60 --folder run

Kill any rank at any time, `kill -9` included, and start it again: it continues from the newest complete checkpoint,
with as many ranks as there are now. On SIGTERM to any rank all agree on a step, save and exit with 0. The last line of
output has a SHA-256 of the whole state; after as many steps on as many ranks it is the same, interrupted or not.

NCCL on GPUs, gloo on CPUs. `metrics.jsonl` in the folder has a line for each step. All ranks must see the same folder.
The text is Python's own manual, or random letters where that is not installed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ampkit.optim
from ampkit import DynamicLossScale, GradScaler, NoOpLossScale, Policy, Rule, TimesMedian, autocast
from ampkit.integrations.checkpoint import LoadPlanner

ALPHABET, CONTEXT, WIDTH, HEADS, DEPTH = 128, 32, 64, 4, 2
BATCH = 12  # sequences per step, over all ranks: 1, 2, 3, 4, 6 or 12 of them
KEPT = 2  # complete checkpoints


@dataclass(frozen=True)
class Precision:
    """The dtypes of a name of `--precision`."""

    compute: torch.dtype  # of matrix products
    weights: torch.dtype = torch.float32
    rules: dict[Any, Rule] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)


PRECISIONS = {
    "fp16": Precision(torch.float16),
    "bf16": Precision(torch.bfloat16),
    "fp8": Precision(torch.bfloat16, rules={"aten::linear": Rule.FLOAT8_ROWWISE}),
    "remainder": Precision(torch.bfloat16, torch.bfloat16, optimizer={"masters": "remainder"}),
    "stochastic": Precision(torch.bfloat16, torch.bfloat16, optimizer={"rounding": "stochastic"}),
}


class Block(nn.Module):
    """A pre-norm transformer block, whose activations are computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.project = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[batch, time, width]` to the same shape."""
        return checkpoint(self.compute, x, use_reentrant=False)

    def compute(self, x: Tensor) -> Tensor:
        """Return the block itself. Under tensor parallelism a rank has some of the heads."""
        normed = self.norm_attention(x)
        q, k, v = (
            layer(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class GPT(nn.Module):
    """Predicts characters. It returns the loss, so that all of it is computed inside the wrapped module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(ALPHABET, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, ALPHABET)
        for table in (self.embed, self.position):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, codes: Tensor) -> Tensor:
        """Return the mean loss of predicting each character of `[batch, time + 1]` from the ones before it."""
        given, wanted = codes[:, :-1], codes[:, 1:]
        x = self.embed(given) + self.position(torch.arange(given.shape[1], device=codes.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), wanted.flatten())


class Stream:
    """Batches `[BATCH, CONTEXT + 1]` of text, each drawn from its position: a position is all that has to be saved."""

    def __init__(self) -> None:
        try:
            from pydoc_data.topics import topics

            text = "\n\n".join(topics[name] for name in sorted(topics))
        except ImportError:
            text = "".join(random.Random(0).choices("etaoin shrdlu", k=100_000))
        self.codes = torch.tensor([*text.encode("ascii", "replace")])
        self.position = 0

    def next(self) -> Tensor:
        """Return the batch of all ranks; each takes its part."""
        generator = torch.Generator().manual_seed(self.position)
        self.position += 1
        starts = torch.randint(len(self.codes) - CONTEXT, (BATCH, 1), generator=generator)
        return self.codes[starts + torch.arange(CONTEXT + 1)]


def parallelize(model: nn.Module, how: str, device: torch.device, compute: torch.dtype) -> tuple[nn.Module, int, int]:
    """Return the parallel model, and which part of how many parts of a batch this rank computes."""
    world = dist.get_world_size()
    if how == "ddp":
        return DistributedDataParallel(model), dist.get_rank(), world
    tensor = 2 if how == "fsdp_tp" and world % 2 == 0 else 1
    mesh = init_device_mesh(device.type, (world // tensor, tensor), mesh_dim_names=("data", "tensor"))
    columns, rows = ("query", "key", "value", "up"), ("project", "down")
    plan: dict[str, Any] = {name: ColwiseParallel() for name in columns} | {name: RowwiseParallel() for name in rows}
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)  # 16-bit all-gathers
    for block in [module for module in model.modules() if isinstance(module, Block)]:
        if tensor > 1:
            parallelize_module(block, mesh["tensor"], plan)
        fully_shard(block, mesh=mesh["data"], mp_policy=policy)
    fully_shard(model, mesh=mesh["data"], mp_policy=policy)
    return model, mesh["data"].get_local_rank(), mesh["data"].size()


class Run:
    """All that a run continues from, as one object for `torch.distributed.checkpoint`.

    Tensors that are sharded are saved by shards. Of everything else DCP keeps one rank's copy, so it has to be equal on
    all ranks.
    """

    def __init__(self, model: nn.Module, optimizer: Any, scaler: Any, schedule: Any) -> None:
        self.model, self.optimizer, self.scaler, self.schedule = model, optimizer, scaler, schedule
        self.stream = Stream()
        self.step = 0
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        """Return the state after a step. Waits for the device."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "scaler": self.scaler.state_dict(),
            "schedule": self.schedule.state_dict(),
            "step": self.step,
            "position": self.stream.position,
            "losses": list(self.losses),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from there. The model and the optimizer are loaded together, or remainders would be dropped."""
        set_state_dict(self.model, self.optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
        self.scaler.load_state_dict(saved["scaler"])
        self.schedule.load_state_dict(saved["schedule"])
        self.step, self.stream.position, self.losses = saved["step"], saved["position"], list(saved["losses"])

    def digest(self) -> str:
        """Return a SHA-256 of the state, with shards put together. All ranks call it."""
        digest = hashlib.sha256()
        for name, value in _flat("run", self.state_dict()):
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            if isinstance(whole, Tensor):
                value = whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            digest.update(f"{name}: {value!r}".encode())
        return digest.hexdigest()


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the entries of nested dicts with their paths, sorted."""
    if not isinstance(value, dict):
        yield name, value
        return
    for key in sorted(value, key=str):
        yield from _flat(f"{name}.{key}", value[key])


class Checkpoints:
    """Folders `step-N`. DCP writes `.metadata` last, so a folder that has one is complete."""

    def __init__(self, folder: Path, group: Any) -> None:
        """`group`: a process group of gloo only for saves, because a separate thread uses it."""
        self.folder, self.group = folder, group
        self.pending: Any = None

    def complete(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted((path.parent for path in self.folder.glob("step-*/.metadata")), key=_step_of)

    def begin(self, run: Run, torchs: Path | None) -> None:
        """Load the newest complete checkpoint, or torch's; delete incomplete ones. Rank 0 chooses for all."""
        chosen: list[Path | None] = [None]
        if dist.get_rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            complete = self.complete()
            for path in set(self.folder.glob("step-*")) - set(complete):  # left by a kill in a save
                shutil.rmtree(path)
            chosen = [complete[-1] if complete else None]
        dist.broadcast_object_list(chosen, 0, group=self.group)
        if path := chosen[0] or torchs:
            dcp.load({"run": run}, checkpoint_id=path, planner=LoadPlanner(), process_group=self.group)

    def save(self, run: Run, *, wait: bool) -> None:
        """Save after a step; unless `wait`, files are written while training continues."""
        self.finish()
        path = self.folder / f"step-{run.step}"
        if wait:
            dcp.save({"run": run}, checkpoint_id=path, process_group=self.group)
            self.delete_old()
        else:
            self.pending = dcp.async_save({"run": run}, checkpoint_id=path, process_group=self.group)

    def finish(self) -> None:
        """Wait for the save that is under way; raises if it failed."""
        if self.pending is not None:
            self.pending.result()
            self.pending = None
            self.delete_old()

    def delete_old(self) -> None:
        """Delete all but the newest complete checkpoints."""
        if dist.get_rank() == 0:
            for path in self.complete()[:-KEPT]:
                (path / ".metadata").unlink()  # first, because a kill must not leave a folder that looks complete
                shutil.rmtree(path)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


class Metrics:
    """Losses on the device until a save, when they become numbers of all ranks, and lines of `metrics.jsonl`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.losses: list[Tensor] = []
        self.rates: list[float] = []

    def begin(self, run: Run) -> None:
        """Drop lines of steps that will be taken again. Rank 0 writes the file."""
        if dist.get_rank() == 0 and self.path.exists():
            kept = [line for line in self.path.read_text().splitlines() if _is_before(line, run.step)]
            new = self.path.with_suffix(".new")
            new.write_text("".join(f"{line}\n" for line in kept))
            new.replace(self.path)

    def flush(self, run: Run) -> None:
        """Average losses over ranks, keep them in `run`, and write them. Waits for the device. All ranks call it."""
        if not self.losses:
            return
        mean = torch.stack(self.losses).float()
        dist.all_reduce(mean)
        losses = (mean / dist.get_world_size()).tolist()
        rows = run.scaler.history[-len(losses) :]
        if dist.get_rank() == 0:
            with self.path.open("a") as file:
                for i, (loss, rate, row) in enumerate(zip(losses, self.rates, rows, strict=True)):
                    line = {"step": run.step - len(losses) + i + 1, "loss": loss, "lr": rate, **row}
                    del line["update"]  # counts from the last start
                    file.write(json.dumps({name: _finite(value) for name, value in line.items()}) + "\n")
        run.losses += losses
        self.losses, self.rates = [], []


def _is_before(line: str, step: int) -> bool:
    """Whether a line is of this step or an earlier one; not if a kill has cut it off."""
    try:
        return json.loads(line)["step"] <= step
    except ValueError:
        return False


def _finite(value: Any) -> Any:
    """Return the value, or None for inf and NaN, which JSON lacks."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Stop:
    """Whether to stop after this step: some rank got SIGTERM."""

    def __init__(self) -> None:
        self.asked = False
        self.launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "asked", True))

    def agreed(self, group: Any) -> bool:
        """Return whether any rank got the signal. One all-reduce on the host; all ranks call it after each step.

        Ends a rank whose launcher was killed: a new one may already have started this run again.
        """
        if self.launcher is not None and os.getppid() != self.launcher:
            sys.exit("torchrun has ended without its ranks; start it again")
        asked = torch.tensor(int(self.asked))
        dist.all_reduce(asked, dist.ReduceOp.MAX, group=group)
        return bool(asked)


def rate(step: int) -> float:
    """Return the share of the learning rate: a warm-up, then the inverse square root. No end, so `--steps` can grow."""
    return min((step + 1) / 10, math.sqrt(10 / (step + 1)))


def build(how: str, name: str, device: torch.device) -> tuple[Run, int, int]:
    """Return a new run, and which part of how many parts of a batch this rank computes."""
    precision = PRECISIONS[name]
    torch.manual_seed(0)  # the same weights on all ranks
    model, part, parts = parallelize(GPT().to(device, precision.weights), how, device, precision.compute)
    optimizer = ampkit.optim.AdamW(model.parameters(), lr=3e-3, **precision.optimizer)
    dynamic = DynamicLossScale(growth_interval=20)  # 2,000 in a long run
    scaler = GradScaler(
        device,
        loss_scale=dynamic if precision.compute is torch.float16 else NoOpLossScale(),
        skip_above=TimesMedian(10.0),
    )
    return Run(model, optimizer, scaler, torch.optim.lr_scheduler.LambdaLR(optimizer, rate)), part, parts


def main(how: str, name: str, steps: int, save_every: int, folder: Path, torchs: Path | None = None) -> None:
    stop = Stop()
    cuda = torch.cuda.is_available()
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    stops, saves = dist.new_group(backend="gloo"), dist.new_group(backend="gloo")
    run, part, parts = build(how, name, device)
    if BATCH % parts:
        sys.exit(f"{parts} ranks cannot share {BATCH} sequences evenly; expected a divisor of {BATCH}")
    checkpoints, metrics = Checkpoints(folder, saves), Metrics(folder / "metrics.jsonl")
    checkpoints.begin(run, torchs)
    metrics.begin(run)
    policy = Policy.default(device.type).with_rules(PRECISIONS[name].rules)

    stopping = False
    while run.step < steps and not stopping:
        codes = run.stream.next().chunk(parts)[part].to(device)
        run.optimizer.zero_grad()
        with autocast(device.type, PRECISIONS[name].compute, policy=policy):
            loss = run.model(codes)
        run.scaler.scale(loss).backward()
        run.scaler.clip_grad_norm_(run.optimizer, max_norm=1.0)
        run.scaler.step(run.optimizer)
        run.scaler.update()
        metrics.losses.append(loss.detach())
        metrics.rates.append(run.schedule.get_last_lr()[0])
        run.schedule.step()
        run.step += 1
        stopping = stop.agreed(stops)
        if stopping or run.step == steps or run.step % save_every == 0:
            run.scaler.check_ranks()
            metrics.flush(run)
            checkpoints.save(run, wait=stopping or run.step == steps)

    checkpoints.finish()
    digest, stats = run.digest(), run.scaler.stats()
    if dist.get_rank() == 0:
        print(f"step {run.step} of {steps}, {how} on {dist.get_world_size()}, {name}: loss {run.losses[-1]:.4f}")
        print(f"state {digest} scale {stats.scale:g} skips {stats.skips}", flush=True)
    dist.barrier()  # a rank that exits early may close the connections of the others
    dist.destroy_process_group()


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"got {text!r}; expected 1 or more")
    return int(text)


def _writable(text: str) -> Path:
    folder = Path(text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}; expected a folder to write to") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{text}: no permission to write; expected a folder to write to")
    return folder


def _checkpoint(text: str) -> Path:
    if not Path(text, ".metadata").is_file():
        raise argparse.ArgumentTypeError(f"{text} has no .metadata; expected a checkpoint that DCP has completed")
    return Path(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parallel", choices=["ddp", "fsdp", "fsdp_tp"], default="fsdp")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp16")
    parser.add_argument("--steps", type=_positive, default=60, help="steps from the very first one on")
    parser.add_argument("--save-every", type=_positive, default=10, help="steps from one checkpoint to the next")
    parser.add_argument("--folder", type=_writable, default="run", help="where checkpoints and metrics are")
    parser.add_argument(
        "--start-from-torch",
        type=_checkpoint,
        metavar="CHECKPOINT",
        help="a checkpoint of torch.amp's scaler and torch.optim.AdamW to begin with, if the folder has none yet",
    )
    if "RANK" not in os.environ and not {"-h", "--help"} & {*sys.argv}:
        sys.exit("this runs on several processes; start it with: torchrun --nproc-per-node 2 examples/pretrain.py")
    options = parser.parse_args()
    main(
        options.parallel,
        options.precision,
        options.steps,
        options.save_every,
        options.folder,
        options.start_from_torch,
    )
