"""Scalars between devices: no wait, except where the host is about to read them."""

from pathlib import Path
from unittest import mock

import pytest
import torch

import ampkit
from ampkit.gradients.collect import moved

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("start", "end", "free"), [(CUDA, CPU, False), (CPU, CUDA, True), (torch.device("cuda", 1), CUDA, True)]
)
def test_only_a_copy_to_the_host_waits(start, end, free) -> None:
    tensor = mock.Mock(device=start)
    moved(tensor, end)
    tensor.to.assert_called_once_with(end, non_blocking=free)
    assert moved(tensor, start) is tensor


def test_no_other_module_asks_for_copies_that_do_not_wait() -> None:
    """A flag or a factor that is read before it has arrived is garbage, and nothing says so."""
    modules = sorted(Path(ampkit.__file__).parent.rglob("*.py"))
    assert [module.name for module in modules if "non_blocking=" in module.read_text()] == ["collect.py"]


@pytest.mark.gpu
def test_the_host_reads_what_the_device_has_yet_to_compute() -> None:
    ready = torch.ones(4096, 4096, device="cuda")
    for i in range(20):
        for _ in range(4):
            ready = ready @ ready * 2.0**-12  # ones again, and late
        assert moved(ready[0, 0] * i, CPU).numpy().item() == float(i)
