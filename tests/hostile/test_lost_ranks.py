"""A rank that is killed or raises amid a step: the other one ends with an error, as without ampkit, and never hangs."""

import datetime
import os
import queue
import signal
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ampkit
from ampkit import Policy, WeightCache

pytestmark = [
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo"),
    pytest.mark.skipif(os.name != "posix", reason="sends SIGKILL to a process"),
]
PATIENCE = 60       # of the test, in seconds; the group's own is longer, so that waiting for it counts as a hang


class DyingSGD(torch.optim.SGD):
    """Its third step is the last thing that rank 1 does."""

    taken = 0

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self.taken += 1
        if dist.get_rank() == 1 and os.environ["PLACE"] == "step" and self.taken == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(*args, **kwargs)


def _train(rank: int, port: int, place: str, answers: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PLACE": place}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=10 * PATIENCE))
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    calls = 0

    def raise_in_the_third_forward(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if rank == 1 and os.environ["PLACE"] == "raise" and calls == 3:
            raise LookupError("of rank 1 alone")

    layers[1].register_forward_pre_hook(raise_in_the_third_forward)
    model, cache = DistributedDataParallel(layers), WeightCache()
    optimizer = DyingSGD(model.parameters(), lr=0.1)
    scaler = ampkit.GradScaler("cpu", process_group=dist.group.WORLD)
    policy = Policy.default("cpu").for_modules(model, {"**": "float32"})
    error = ""
    try:
        for _ in range(5):
            with ampkit.autocast("cpu", policy=policy, cache=cache):
                loss = model(torch.ones(3, 4)).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    except (RuntimeError, LookupError) as raised:
        error = type(raised).__name__
    answers.put((rank, error, torch.is_autocast_enabled("cpu")))
    answers.close()
    answers.join_thread()
    os._exit(0)     # gloo may abort at exit once the other rank is gone


@pytest.mark.parametrize("place", ["step", "raise"])
def test_the_other_rank_ends_with_an_error(place: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    channel = context.Queue()
    processes = [context.Process(target=_train, args=(rank, port, place, channel), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        found = sorted(channel.get(timeout=PATIENCE) for _ in range(2 if place == "raise" else 1))
    except queue.Empty:
        pytest.fail(f"the other rank hangs where one ends in {place}")
    finally:
        for process in processes:
            process.join(timeout=5)
            process.kill()
    assert found[0] == (0, "RuntimeError", False)
    if place == "raise":
        assert found[1] == (1, "LookupError", False)
