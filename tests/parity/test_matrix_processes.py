"""Regions and processes: workers of a data loader, forked and spawned children.
"""

import multiprocessing
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import ampkit
from tests.helpers.matrix import QUIET, Net, gradients, native, ours

pytestmark = QUIET


class Products(Dataset[Tensor]):
    """Items that a region in the worker would cast, and the state the worker found."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.full((2, 2), 1 / 3) @ torch.full((2, 2), float(index)), torch.is_autocast_enabled("cpu")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_data_loader_workers_forked_in_a_region() -> None:
    """A forked worker has the region of the thread that forked it, as with torch.autocast; a spawned one has none."""
    for region in (native, ours):
        loader = DataLoader(Products(), 2, num_workers=1, multiprocessing_context="fork")
        with region():
            found = list(loader)
        assert [flag.tolist() for _, flag in found] == [[True] * 2] * 2
        assert {value.dtype for value, _ in found} == {torch.bfloat16}


def region_in_a_child(connection: Any) -> None:
    """Report the state the process began with, then a step in a region of its own."""
    began = torch.is_autocast_enabled("cpu")
    torch.set_num_threads(1)        # as conftest sets it in the parent: sums depend on it
    torch.manual_seed(0)
    model = Net()
    with ampkit.autocast("cpu"):
        out = model(torch.randn(4, 6))
    out.float().sum().backward()
    connection.send((began, out.dtype, torch.is_autocast_enabled("cpu"), [grad.numpy() for grad in gradients(model)]))


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_regions_in_child_processes(method: str) -> None:
    """A child started outside any region has none, and opens its own with the same numbers."""
    context: Any = multiprocessing.get_context(method)
    here, there = context.Pipe()
    child = context.Process(target=region_in_a_child, args=(there,))
    child.start()
    assert here.poll(60), "the child never answered"
    began, dtype, ended, grads = here.recv()
    child.join(10)
    assert (began, dtype, ended) == (False, torch.bfloat16, False)
    torch.manual_seed(0)
    model = Net()
    with ampkit.autocast("cpu"):
        out = model(torch.randn(4, 6))
    out.float().sum().backward()
    assert all(torch.equal(torch.from_numpy(got), want) for got, want in zip(grads, gradients(model), strict=True))
