"""DistributedDataParallel: nothing changes, because DDP reduces gradients before the scaler reads them.

Run it on two processes: torchrun --nproc-per-node 2 examples/scaler_ddp.py
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ampkit import GradScaler, autocast


def main(steps: int = 10) -> None:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    module = torch.nn.Linear(8, 1).to(device)
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler(device, init_scale=2.0**10)
    inputs = torch.randn(steps, 16, 8, generator=torch.Generator().manual_seed(rank)).to(device)

    for step, batch in enumerate(inputs):
        optimizer.zero_grad()
        with autocast(device.type, dtype=torch.float16):
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        if rank == 0 and step == 3:
            loss = loss * torch.inf  # an overflow on one rank: all of them skip
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, max_norm=5.0)
        scaler.step(optimizer)
        scaler.update()

    stats = scaler.stats()
    checksum = float(module.weight.detach().double().sum())
    print(f"rank {rank}: {stats.skips} skipped, scale {stats.scale:g}, weights {checksum:.12f}", flush=True)
    dist.barrier()  # a rank that exits early may close the connections of the others
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit("this runs on several processes; start it with: torchrun --nproc-per-node 2 examples/scaler_ddp.py")
    main()
