"""Tables that CUDA graphs read: what eager calls have sent stays where it is, the rest is written at every replay."""

import gc
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ampkit_kernels.configs import Config
from ampkit_kernels.triton_ops import pointer_table as tables
from ampkit_kernels.triton_ops import table_writer

pytestmark = pytest.mark.usefixtures("interpreted")
SMALL = Config(block=16, chunk=64)
SIZES = (5, 5000, 64, 65, 16)
Lists = list[list[Tensor]]


class Written:
    """Stands in for the kernels that write, and keeps what they are told to."""

    def __init__(self) -> None:
        self.values: list[list[int]] = []
        self.maps = 0

    def write(self, values: list[int], destination: Tensor) -> None:
        self.values.append(list(values))
        destination.copy_(torch.tensor(values))

    def expand(self, *_: Any) -> None:
        self.maps += 1


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Written:
    found = Written()
    monkeypatch.setattr(table_writer, "write", found.write)
    monkeypatch.setattr(table_writer, "expand", found.expand)
    return found


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    tables.clear_tables()
    gc.collect()
    with mock.patch.object(tables, "_read_by_graphs", {}), mock.patch.object(tables, "_uploaded", set()):
        yield


class Nothing:
    """A kernel that does nothing."""

    def __getitem__(self, grid: object) -> Any:
        return lambda *_, **__: None


def lists_of(count: int) -> Lists:
    return [[torch.zeros(n) for n in SIZES] for _ in range(count)]


def eager(lists: Lists, launches: int = 1) -> tables.Table:
    table = tables.table_for(lists, SMALL)
    for _ in range(launches):
        table.launch(Nothing())
    return table


def captured(lists: Lists) -> tables.Table:
    with mock.patch.object(tables, "is_capturing", return_value=True):
        return tables.table_for(lists, SMALL)


def addresses(lists: Lists) -> list[int]:
    return [t.data_ptr() for tensors in lists for t in tensors]


def test_what_has_been_sent_is_read_where_it_is(written: Written) -> None:
    lists = lists_of(4)
    sent = eager(lists)
    found = captured(lists)
    assert (written.values, written.maps) == ([], 0)
    for name in ("addresses", "numels", "blocks"):
        assert getattr(found, name) is getattr(sent, name)
    assert (found.n_blocks, found.n_programs, found.chunk) == (sent.n_blocks, sent.n_programs, sent.chunk)
    with pytest.raises(RuntimeError, match="cannot be refreshed"):
        found.refresh([[0]])


def test_gradients_of_the_graphs_own_are_all_that_is_written(written: Written) -> None:
    params, grads, first, steps = lists_of(4)
    sent = eager([params, grads, first, steps])
    (own,) = lists_of(1)
    found = captured([params, own, first, steps])
    assert written.values == [[t.data_ptr() for t in own]]
    assert found.addresses.tolist() == addresses([params, own, first, steps])
    assert found.numels is sent.numels
    assert sent.addresses.tolist() == addresses([params, grads, first, steps])  # the graph has memory of its own
    captured([own])     # another number of lists: lengths alone
    assert written.maps == 0


def test_what_graphs_read_is_never_written_nor_freed(written: Written) -> None:
    params, grads, first = lists_of(3)
    sent = eager([params, grads, first])
    found = captured([params, lists_of(1)[0], first])
    source, at = sent.addresses, addresses([params, grads, first])
    moved = lists_of(1)[0]
    eager([params, moved, first])       # the graph overwrites what it has of this column
    assert sent.addresses is source
    eager([moved, moved, first])
    assert sent.addresses is not source
    assert sent.addresses.tolist() == addresses([moved, moved, first])
    n = len(SIZES)
    assert source.tolist()[:n] == at[:n]
    assert source.tolist()[2 * n :] == at[2 * n :]
    again = captured([moved, moved, first])
    assert again.addresses is sent.addresses
    kept = [tensor.data_ptr() for tensor in (source, sent.addresses, found.blocks)]
    del sent, found, again
    tables.clear_tables()
    gc.collect()
    assert sorted(tables._read_by_graphs) == sorted(kept)


def test_what_may_not_have_arrived_is_written(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    lists = lists_of(2)
    with monkeypatch.context() as patch:
        patch.setattr(tables.HostSlot, "busy", lambda _: True)
        eager(lists, launches=2)
        captured(lists)
    assert (len(written.values), written.maps) == (2, 1)
    captured(lists)     # no launch has seen it arrive
    assert (len(written.values), written.maps) == (4, 2)
    eager(lists)
    captured(lists)
    assert (len(written.values), written.maps) == (4, 2)


def test_a_column_that_was_sent_again_is_written(written: Written) -> None:
    lists = lists_of(2)
    eager(lists)
    lists[1] = lists_of(1)[0]
    eager(lists)
    captured(lists)
    assert written.values == [[t.data_ptr() for t in lists[1]]]


def test_what_another_thread_has_sent_is_written(written: Written) -> None:
    """It may be sending other addresses to the same memory at this very moment."""
    lists = lists_of(1)
    found: list[tables.Table] = []
    thread = threading.Thread(target=lambda: found.append(eager(lists)))
    thread.start()
    thread.join()
    found[0].thread = -1    # this thread may have been given the identifier of one that has ended
    captured(lists)
    assert written.maps == 1


def test_of_equal_lengths_the_lists_that_agree_are_found(written: Written) -> None:
    """Two models of one shape, stepped in turn."""
    ours, theirs = lists_of(3), lists_of(3)
    tables_of = [tables.uploaded(3, list(SIZES), SMALL, torch.device("cpu")) for _ in range(2)]
    for table, lists in zip(tables_of, (ours, theirs), strict=True):
        table.refresh([[t.data_ptr() for t in tensors] for tensors in lists])
        table.launch(Nothing())
    for table, lists in zip(tables_of, (ours, theirs), strict=True):
        assert captured(lists).addresses is table.addresses
    assert written.values == []
    captured(lists_of(3))
    assert len(written.values) == 1


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("sizes", [(1,), (5, 5000, 64, 65, 16), tuple(range(1, 70))])
def test_a_written_table_holds_what_an_uploaded_one_holds(sizes: tuple[int, ...]) -> None:
    lists = [[torch.zeros(n) for n in sizes] for _ in range(2)]
    columns, numels = [[t.data_ptr() for t in tensors] for tensors in lists], list(sizes)
    uploaded = tables.table_for(lists, SMALL)
    written = tables._captured(columns, numels, SMALL, torch.device("cpu"))
    assert torch.equal(written.addresses, uploaded.addresses)
    assert torch.equal(written.numels, uploaded.numels)
    assert torch.equal(written.blocks, uploaded.blocks)
    assert (written.n_blocks, written.chunk) == (uploaded.n_blocks, uploaded.chunk)
    with pytest.raises(RuntimeError, match="cannot be refreshed"):
        written.refresh([[0]])


@pytest.mark.usefixtures("interpreted")
def test_captured_and_eager_launches_have_one_order_and_the_same_bits() -> None:
    from ampkit_kernels.triton_ops import norm

    generator = torch.Generator().manual_seed(0)
    for _ in range(15):
        sizes = torch.randint(1, 300, (int(torch.randint(1, 40, (), generator=generator)),), generator=generator)
        grads = [torch.randn(int(n), generator=generator) for n in sizes]
        columns, numels = [[t.data_ptr() for t in grads]], sizes.tolist()
        uploaded, written = tables.table_for([grads], SMALL), tables._captured(columns, numels, SMALL, grads[0].device)
        assert torch.equal(written.blocks, uploaded.blocks)
        partials = [torch.zeros(table.n_programs, dtype=torch.float64) for table in (uploaded, written)]
        for table, sums in zip((uploaded, written), partials, strict=True):
            table.launch(
                norm.norm_kernel, torch.tensor(0.5), torch.zeros(()), sums, ORDER=2, **norm.one_list(torch.float32)
            )
        assert torch.equal(*partials)


@pytest.mark.usefixtures("interpreted")
def test_kernels_run_from_a_written_table(monkeypatch: pytest.MonkeyPatch) -> None:
    from ampkit_kernels.triton_ops import unscale

    def written(lists, config):
        columns = [[t.data_ptr() for t in tensors] for tensors in lists]
        return tables._captured(columns, [t.numel() for t in lists[0]], config, torch.device("cpu"))

    monkeypatch.setattr(unscale, "table_for", written)
    grads = [torch.ones(n) for n in (1, 700, 33)]
    unscale.unscale_(grads, torch.tensor(0.5), torch.tensor(0.0), SMALL)
    assert all(torch.equal(g, torch.full_like(g, 0.5)) for g in grads)
