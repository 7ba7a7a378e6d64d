"""Tables: how the work is divided into chunks, and which addresses are sent when."""

import math
import threading
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
    monkeypatch.setattr(tables, "_per_thread", tables._PerThread())


def entries(blocks) -> list[tuple[int, int]]:
    """Tensor and chunk of every entry of a block map."""
    return [(int(e) & 0xFFFFFFFF, int(e) >> tables.CHUNK_SHIFT) for e in blocks]


@given(st.lists(st.integers(0, 100_000), max_size=60), st.sampled_from([64, 1024]), st.integers(1, 16))
def test_every_chunk_of_every_tensor_once_and_programs_balanced(numels: list[int], chunk: int, n_programs: int) -> None:
    chunks = entries(tables.block_map(numels, chunk))
    assert sorted(chunks) == [(t, c) for t, n in enumerate(numels) for c in range(math.ceil(n / chunk))]
    loads = [0] * n_programs
    for position, (tensor, index) in enumerate(chunks):
        loads[position % n_programs] += min(chunk, numels[tensor] - index * chunk)
    assert max(loads) - min(loads) <= chunk


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
    words, send = [], tables.send
    monkeypatch.setattr(tables, "send", lambda values, memory: (words.append(len(values)), send(values, memory)))
    return words


def test_what_has_moved_is_sent_again_and_nothing_else(sent: list[int]) -> None:
    """New tensor objects over the same memory have not moved. Other lengths or dtypes have a table of their own."""
    params, grads, first, second, moved = ([torch.zeros(20), torch.zeros(30)] for _ in range(5))
    with torch.inference_mode():
        table = tables.table_for([params, grads, first, second], SMALL)
    assert table.numels.tolist() == [20, 30]
    assert sorted(entries(table.blocks)) == [(t, c) for t, n in ((0, 20), (1, 30)) for c in range(math.ceil(n / 16))]
    for lists in (
        [[p.view(-1) for p in params], grads, first, second],
        [params, moved, first, second],
        [params, moved, first, grads],
        [grads, moved, first, params],
    ):
        assert tables.table_for(lists, SMALL) is table
        assert table.addresses.tolist() == [t.data_ptr() for tensors in lists for t in tensors]
    assert sent[1:] == [2, 2, 8]
    for others in ([[t[:19] for t in part] for part in lists], [[t.view(torch.int32) for t in part] for part in lists]):
        assert tables.table_for(others, SMALL) is not table


def test_gradients_that_a_step_reads_too_are_sent_once(sent: list[int]) -> None:
    """The gradients' table and the step's have the right addresses, whichever is used first."""
    params, grads, moved, others = ([torch.zeros(20), torch.zeros(30)] for _ in range(4))
    alone, step = tables.table_for([grads], SMALL), tables.step_table([params, grads, params], SMALL)
    sent.clear()
    for current, first in ((moved, alone), (moved, alone), (others, step)):
        for table in (first, step, alone):
            lists = [current] if table is alone else [params, current, params]
            if table is alone:
                assert tables.table_for(lists, SMALL) is table
            else:
                table.refresh([[t.data_ptr() for t in tensors] for tensors in lists])
            assert table.addresses.tolist() == [t.data_ptr() for tensors in lists for t in tensors]
    assert sent == [2, 2]  # moved, others
    assert alone.numels.tolist() == [20, 30]


def test_threads_do_not_share_a_table() -> None:
    storage = [torch.zeros(50)]
    made = [tables.table_for([storage], SMALL)]
    thread = threading.Thread(target=lambda: made.append(tables.table_for([storage], SMALL)))
    thread.start()
    thread.join()
    assert made[0] is not made[1]


def test_tables_are_not_kept_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MOST_TABLES", 3)
    for n in range(1, 9):
        tables.table_for([[torch.zeros(n)]], SMALL)
        assert len(tables._per_thread.tables) <= 3


def test_pinned_memory_is_on_the_host_whatever_the_default_device() -> None:
    with mock.patch.object(torch, "empty") as empty:  # a machine without a GPU has none
        tables.pinned_words(3)
    assert empty.call_args == mock.call(3, dtype=torch.int64, device="cpu", pin_memory=True)


def test_a_captured_table_is_its_own_and_sent_from_memory_that_nothing_else_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A replay reads it again, whatever was captured or sent afterwards. After `reserve` a capture allocates none."""
    made: list[torch.Tensor] = []
    monkeypatch.setattr(tables, "pinned_words", lambda n: (made.append(torch.full((n,), -1)), made[-1])[1])
    monkeypatch.setattr(tables, "graph_memory", tables.GraphMemory())
    monkeypatch.setattr(tables, "GRAPH_WORDS", 100)
    captured = []
    for sizes in ((5, 5000, 64, 65, 16), (5,), (5,), (5,) * 9, (7,), (8,) * 60, (5, 1)):
        lists = [[torch.zeros(n) for n in sizes] for _ in range(2)]
        eager = tables.table_for(lists, SMALL)
        tables.graph_memory.reserve(sum(len(part) for part in (eager.addresses, eager.numels, eager.blocks)))
        n_made = len(made)
        with mock.patch.object(tables, "is_capturing", return_value=True):
            captured.append(tables.table_for(lists, SMALL))
        assert len(made) == n_made
        assert tables.table_for(lists, SMALL) is eager
        for name in ("addresses", "numels", "blocks"):
            assert getattr(eager, name).tolist() == getattr(captured[-1], name).tolist(), name
        for name in ("n_blocks", "n_programs", "chunk"):
            assert getattr(eager, name) == getattr(captured[-1], name), name
    read = [part for table in captured for part in (table.addresses, table.numels, table.blocks)]
    pinned = torch.cat(made)
    assert pinned[pinned != -1].tolist() == torch.cat(read).tolist()
    assert len({table.addresses.data_ptr() for table in captured}) == len(captured)
    assert [len(buffer) for buffer in made] == [179, 100, 240, 100]  # four tables share the second one


@pytest.mark.usefixtures("interpreted")
def test_kernels_address_past_two_to_the_31_elements() -> None:
    """Only the end of the tensor exists: the kernel gets its last chunk alone."""
    import triton.language as tl

    from ampkit_kernels.triton_ops import unscale

    end, flag = torch.tensor([1.0, 2.0, 3.0, float("nan")]), torch.zeros(())
    addresses, numels = torch.tensor([end.data_ptr() - 2**33 * 4]), torch.tensor([2**33 + 4])
    blocks = torch.from_numpy(tables.block_map(numels.tolist(), 2**20))
    assert (len(blocks), entries(blocks)[-1]) == (2**13 + 1, (0, 2**13))
    unscale.unscale_kernel[(1,)](
        addresses,
        numels,
        blocks[-1:],
        1,
        2**20 // 256,
        torch.tensor(0.5),
        flag,
        DTYPE=tl.float32,
        ACC=tl.float32,
        ITEMSIZE=4,
        CHECKS=True,
        SKIPS=False,
        BLOCK=256,
    )
    assert (flag.item(), end[:3].tolist()) == (1.0, [0.5, 1.0, 1.5])
