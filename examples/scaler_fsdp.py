"""FSDP2 (`fully_shard`): gradients are DTensors, which hold the group of ranks that must skip together.

Run it on two processes: torchrun --nproc-per-node 2 examples/scaler_fsdp.py
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ampkit import GradScaler, autocast


def main(steps: int = 10) -> None:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)).to(device)
    fully_shard(model, mesh=init_device_mesh(device.type, (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scaler = GradScaler(device, init_scale=2.0**10)
    inputs = torch.randn(steps, 16, 8, generator=torch.Generator().manual_seed(rank)).to(device)

    for step, batch in enumerate(inputs):
        optimizer.zero_grad()
        with autocast(device.type, dtype=torch.float16):
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        scaler.scale(loss).backward()
        if rank == 0 and step == 3:
            model[0].weight.grad.mul_(torch.inf)  # one rank's shard: all of them skip
        norm = scaler.clip_grad_norm_(optimizer, max_norm=5.0)  # of the whole model, on every rank
        scaler.step(optimizer)
        scaler.update()

    stats = scaler.stats()
    print(f"rank {rank}: {stats.skips} skipped, scale {stats.scale:g}, norm {norm.item():.6f}", flush=True)
    dist.barrier()  # a rank that exits early may close the connections of the others
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit("this runs on several processes; start it with: torchrun --nproc-per-node 2 examples/scaler_fsdp.py")
    main()
