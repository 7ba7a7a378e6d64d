"""DDP, FSDP2 and tensor parallel in one loop, with checkpoints that resume on another number of ranks.

    torchrun --nproc-per-node 2 examples/ranks_resume.py --parallel fsdp --folder run --steps 6
    torchrun --nproc-per-node 4 examples/ranks_resume.py --parallel fsdp --folder run --steps 12

NCCL on GPUs, gloo on CPUs. The scaler finds the ranks that must skip together by the gradients.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import ampkit.optim
from ampkit import GradScaler, autocast

BATCH, OVERFLOW_AT = 16, 3


def parallel(model: torch.nn.Module, how: str, device: torch.device) -> torch.nn.Module:
    if how == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    if how == "fsdp":
        return fully_shard(model, mesh=mesh)
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


class Progress:
    """The state that `torch.distributed.checkpoint` saves: whole tensors, however they are sharded."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler) -> None:
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "scaler": self.scaler.state_dict(), "step": self.step}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
        self.scaler.load_state_dict(saved["scaler"])
        self.step = saved["step"]


def main(how: str, folder: Path, steps: int) -> None:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8)).to(device)
    model = parallel(model, how, device)
    optimizer = ampkit.optim.AdamW(model.parameters(), lr=0.02)
    scaler = GradScaler(device, init_scale=2.0**10)
    progress = Progress(model, optimizer, scaler)
    # DCP writes .metadata last: a kill in a save leaves a folder without it.
    if saved := sorted((path.parent for path in folder.glob("step*/.metadata")), key=lambda path: int(path.name[4:])):
        dcp.load({"progress": progress}, checkpoint_id=saved[-1])

    losses = torch.zeros(())
    while progress.step < steps:
        whole = torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(progress.step)).to(device)
        batch = whole if how == "tensor" else whole.chunk(world)[rank]  # ranks of a tensor share their data
        optimizer.zero_grad()
        with autocast(device.type, dtype=torch.float16):
            loss = (model(batch) - batch.flip(1)).square().mean()
        scaler.scale(loss).backward()
        if progress.step == OVERFLOW_AT and (rank == world - 1 or how == "ddp"):  # DDP has reduced gradients
            next(iter(model.parameters())).grad.mul_(torch.inf)
        scaler.clip_grad_norm_(optimizer, max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()
        progress.step += 1
        losses = loss.detach().clone()

    scaler.check_ranks()
    dcp.save({"progress": progress}, checkpoint_id=folder / f"step{progress.step}")
    if how != "tensor":
        dist.all_reduce(losses)
        losses /= world
    if rank == 0:
        stats = scaler.stats()
        print(
            f"{how} on {world}, step {progress.step}: loss {losses.item():.5f}, {stats.skips} skipped, "
            f"scale {stats.scale:g}",
            flush=True,
        )
    dist.barrier()  # a rank that exits early may close the connections of the others
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parallel", choices=["ddp", "fsdp", "tensor"], default="ddp")
    parser.add_argument("--folder", type=Path, default=Path("run"), help="where checkpoints are, and go")
    parser.add_argument("--steps", type=int, default=6, help="steps from the very first one on")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        sys.exit("this runs on several processes; start it with: torchrun --nproc-per-node 2 examples/ranks_resume.py")
    main(options.parallel, options.folder, options.steps)
