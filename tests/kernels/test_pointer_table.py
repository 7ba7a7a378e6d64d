"""Tables: the cut of the work, what is sent and when."""

import itertools
import threading
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampkit_kernels.configs import Config
from ampkit_kernels.triton_ops import pointer_table as tables

SMALL = Config(block=16, chunk=64)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_kept", tables._Kept())


def entries(blocks) -> list[tuple[int, int]]:
    return [(int(e) & 0xFFFFFFFF, int(e) >> tables.CHUNK_SHIFT) for e in blocks]


@given(st.lists(st.integers(0, 100_000), max_size=60), st.sampled_from([64, 1024]), st.integers(1, 16))
def test_every_chunk_of_every_tensor_once_and_programs_balanced(numels: list[int], chunk: int, n_programs: int) -> None:
    got = entries(tables.block_map(numels, chunk))
    assert len(got) == len(set(got))
    assert set(got) == {(t, c) for t, n in enumerate(numels) for c in range(-(-n // chunk))}
    loads = [0] * n_programs
    for position, (tensor, index) in enumerate(got):
        loads[position % n_programs] += min(chunk, numels[tensor] - index * chunk)
    assert max(loads) - min(loads) <= chunk


def test_entries_reach_past_two_to_the_31_elements() -> None:
    numel = 2**33 + 5
    blocks = tables.block_map([3, numel], 2**20)
    assert len(blocks) == 2 + numel // 2**20
    assert max(c for _, c in entries(blocks)) * 2**20 == 2**33


def test_chunks_shrink_for_short_lists_and_stay_powers_of_two_of_blocks() -> None:
    config = Config(block=1024, chunk=65536)
    for total, length in ((10**9, 65536), (25_000_000, 2048), (10, 1024)):
        assert tables.chunk_length(total, config, 528) == length
    for total in (10**k for k in range(11)):
        length = tables.chunk_length(total, config, 528)
        assert length == 1024 or total / length >= 12 * 528
        assert (length % 1024, (length // 1024).bit_count()) == (0, 1)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many words each copy sends."""
    found, send = [], tables.send
    monkeypatch.setattr(tables, "send", lambda values, memory: (found.append(len(values)), send(values, memory)))
    return found


def test_what_has_moved_is_sent_again_and_nothing_else(sent: list[int]) -> None:
    """By address: new tensor objects over the same memory have not moved. Other lengths or dtypes have a table."""
    params, grads, first, second, moved = ([torch.zeros(20), torch.zeros(30)] for _ in range(5))
    table = tables.table_for([params, grads, first, second], SMALL)
    assert table.numels.tolist() == [20, 30]
    assert sorted(entries(table.blocks)) == [(t, c) for t, n in ((0, 20), (1, 30)) for c in range(-(-n // 16))]
    for lists in (
        [[p.view(-1) for p in params], grads, first, second], [params, moved, first, second],
        [params, moved, first, grads], [grads, moved, first, params],
    ):
        assert tables.table_for(lists, SMALL) is table
        assert table.addresses.tolist() == [t.data_ptr() for tensors in lists for t in tensors]
    assert sent[1:] == [2, 2, 8]
    for others in ([[t[:19] for t in part] for part in lists], [[t.view(torch.int32) for t in part] for part in lists]):
        assert tables.table_for(others, SMALL) is not table


def test_gradients_that_a_step_reads_too_are_sent_once(sent: list[int]) -> None:
    """Their own table and the step's hold the right addresses, whichever is used first."""
    params, grads, moved, others = ([torch.zeros(20), torch.zeros(30)] for _ in range(4))
    alone, step = tables.table_for([grads], SMALL), tables.step_table([params, grads, params], SMALL)
    sent.clear()
    for found, first in ((moved, alone), (moved, alone), (others, step)):
        for table in (first, step, alone):
            lists = [found] if table is alone else [params, found, params]
            if table is alone:
                assert tables.table_for(lists, SMALL) is table
            else:
                table.refresh([[t.data_ptr() for t in tensors] for tensors in lists])
            assert table.addresses.tolist() == [t.data_ptr() for tensors in lists for t in tensors]
    assert sent == [2, 2]       # moved, others
    assert alone.numels.tolist() == [20, 30]


def test_threads_do_not_share_a_table() -> None:
    storage = [torch.zeros(50)]
    found = [tables.table_for([storage], SMALL)]
    thread = threading.Thread(target=lambda: found.append(tables.table_for([storage], SMALL)))
    thread.start()
    thread.join()
    assert found[0] is not found[1]


def test_tables_are_not_kept_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MOST_TABLES", 3)
    for n in range(1, 9):
        tables.table_for([[torch.zeros(n)]], SMALL)
        assert len(tables._kept.tables) <= 3


def test_a_table_made_in_inference_mode_serves_outside_of_it() -> None:
    with torch.inference_mode():
        first = tables.table_for([[torch.zeros(10)]], SMALL)
    moved = torch.zeros(10)
    assert tables.table_for([[moved]], SMALL) is first
    assert first.addresses.tolist() == [moved.data_ptr()]


def test_pinned_memory_is_on_the_host_whatever_the_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    with torch.device("meta"):
        empty(0)  # torch lists the functions that it redirects when it redirects the first

    def unpinned(*size: Any, pin_memory: bool, **options: object) -> torch.Tensor:  # a machine without a GPU has none
        assert pin_memory
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", unpinned)
    with torch.device("meta"):
        assert tables.pinned_words(3).device.type == "cpu"


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the pinned buffers made, which are ordinary memory here; nothing is kept from other tests."""
    made: list[int] = []
    monkeypatch.setattr(tables, "pinned_words", lambda n: (made.append(n), torch.zeros(n, dtype=torch.int64))[1])
    monkeypatch.setattr(tables, "graph_memory", tables.GraphMemory())
    monkeypatch.setattr(tables, "GRAPH_WORDS", 100)
    return made


def captured(lists: list[list[torch.Tensor]]) -> tables.Table:
    with mock.patch.object(tables, "is_capturing", return_value=True):
        return tables.table_for(lists, SMALL)


def test_a_captured_table_is_its_own_and_holds_what_an_eager_one_holds(pinned: list[int]) -> None:
    lists = [[torch.zeros(n) for n in (5, 5000, 64, 65, 16)] for _ in range(2)]
    eager, first, second = tables.table_for(lists, SMALL), captured(lists), captured(lists)
    assert len({table.addresses.data_ptr() for table in (eager, first, second)}) == 3
    for name in ("addresses", "numels", "blocks"):
        assert torch.equal(getattr(eager, name), getattr(first, name))
    assert (first.n_blocks, first.n_programs, first.chunk) == (eager.n_blocks, eager.n_programs, eager.chunk)
    assert tables.table_for(lists, SMALL) is eager


def test_a_replay_reads_memory_that_nothing_else_was_given(pinned: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a graph's copy read at capture is there, unchanged, whatever was captured or sent afterwards."""
    read: list[tuple[torch.Tensor, list[int]]] = []
    take = tables.GraphMemory.take
    monkeypatch.setattr(tables.GraphMemory, "take", lambda self, n: (read.append((take(self, n), [])), read[-1][0])[1])
    for n in (1, 3, 30, 7, 200, 2):
        captured([[torch.zeros(5) for _ in range(n)]])
        read[-1][1].extend(read[-1][0].tolist())
        tables.table_for([[torch.zeros(6) for _ in range(n)]], SMALL)
    assert all(memory.tolist() == values for memory, values in read)
    spans = sorted((memory.data_ptr(), memory.data_ptr() + 8 * len(memory)) for memory, _ in read)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_room_that_was_made_is_not_made_again(pinned: list[int]) -> None:
    memory = tables.graph_memory
    memory.make_room(50)
    memory.take(60)
    memory.take(40)
    assert pinned == [100]
    memory.make_room(300)
    memory.take(300)
    assert pinned == [100, 300]


@pytest.mark.usefixtures("interpreted")
def test_kernels_address_past_two_to_the_31_elements() -> None:
    """Of a tensor only the end exists: the kernel is sent to its last chunk alone."""
    import triton.language as tl

    from ampkit_kernels.triton_ops import unscale

    end, flag = torch.tensor([1.0, 2.0, 3.0, float("nan")]), torch.zeros(())
    addresses, numels = torch.tensor([end.data_ptr() - 2**33 * 4]), torch.tensor([2**33 + 4])
    blocks = torch.tensor([(2**33 // 1024) << tables.CHUNK_SHIFT])
    unscale.unscale_kernel[(1,)](
        addresses, numels, blocks, 1, 4, torch.tensor(0.5), flag,
        DTYPE=tl.float32, ACC=tl.float32, ITEMSIZE=4, CHECKS=True, SKIPS=False, BLOCK=256,
    )
    assert (flag, end[:3].tolist()) == (1.0, [0.5, 1.0, 1.5])
