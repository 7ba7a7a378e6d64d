"""One of two ranks makes an inf and both reduce it: run by `test_ranks` as a process per rank."""

import sys
from pathlib import Path

import torch
from torch import distributed, nn

from ampkit.debugging import detect_nonfinite


def main(folder: str, rank: int, culprit: int) -> None:
    store = distributed.FileStore(f"{folder}/store", 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with detect_nonfinite(model, on_found="record") as report:
        loss = model(torch.ones(2, 4)).sum()
        if rank == culprit:
            loss = loss * (loss.detach() * 0).reciprocal()
        loss.backward()
        optimizer.step()
    Path(folder, f"r{rank}.json").write_text(report.to_json())
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
