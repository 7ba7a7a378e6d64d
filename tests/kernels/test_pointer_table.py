"""Tables: the cut of the work, what is sent and when."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampkit_kernels.configs import Config
from ampkit_kernels.tensors import all_aligned
from ampkit_kernels.triton_ops import pointer_table as tables

SMALL = Config(block=16, chunk=64)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    tables.clear_tables()


def entries(blocks) -> list[tuple[int, int]]:
    return [(int(e) & 0xFFFFFFFF, int(e) >> tables.CHUNK_SHIFT) for e in blocks]


@given(st.lists(st.integers(0, 5000), max_size=30), st.sampled_from([16, 64, 1024]))
def test_every_chunk_of_every_tensor_once(numels: list[int], chunk: int) -> None:
    want = {(t, c) for t, n in enumerate(numels) for c in range(-(-n // chunk))}
    got = entries(tables.block_map(numels, chunk))
    assert len(got) == len(want)
    assert set(got) == want


@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=60), st.integers(1, 16))
def test_giants_and_dwarfs_stay_balanced(numels: list[int], n_programs: int) -> None:
    chunk = 1024
    loads = [0] * n_programs
    for position, (tensor, index) in enumerate(entries(tables.block_map(numels, chunk))):
        loads[position % n_programs] += min(chunk, numels[tensor] - index * chunk)
    assert max(loads) - min(loads) <= chunk


def test_entries_reach_past_two_to_the_31_elements() -> None:
    numel = 2**33 + 5
    blocks = tables.block_map([3, numel], 2**20)
    assert len(blocks) == 2 + numel // 2**20
    assert max(c for _, c in entries(blocks)) * 2**20 == 2**33


def test_chunks_shrink_for_short_lists_and_stay_powers_of_two_of_blocks() -> None:
    config = Config(block=1024, chunk=65536)
    assert tables.chunk_length(10**9, config, 528) == 65536
    assert tables.chunk_length(25_000_000, config, 528) == 2048
    assert tables.chunk_length(10, config, 528) == 1024
    for total in (10**k for k in range(8, 11)):
        assert total / tables.chunk_length(total, config, 528) >= 12 * 528
    for total in (10**k for k in range(10)):
        length = tables.chunk_length(total, config, 528)
        assert length % 1024 == 0
        assert (length // 1024).bit_count() == 1


def test_alignment_is_of_all() -> None:
    assert all_aligned([16, 64, 4096])
    assert all_aligned([])
    assert not all_aligned([16, 64, 4100])


def test_addresses_are_sent_once_and_again_only_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    send = tables.Upload.send
    monkeypatch.setattr(tables.Upload, "send", lambda self, v, d: (sent.append(v.tolist()), send(self, v, d)))
    storage = [torch.zeros(100) for _ in range(3)]
    first = tables.table_for([storage], SMALL)
    assert sent == [[t.data_ptr() for t in storage]]
    # New tensor objects over the same memory: same addresses, nothing to send.
    assert tables.table_for([[t.view(100) for t in storage]], SMALL) is first
    assert len(sent) == 1
    moved = [storage[0], torch.zeros(100), storage[2]]
    assert tables.table_for([moved], SMALL) is first
    assert len(sent) == 2
    assert first.addresses.tolist() == [t.data_ptr() for t in moved]
    # Other lengths, or other dtypes at the same addresses, are another table.
    assert tables.table_for([[t[:99] for t in storage]], SMALL) is not first
    assert tables.table_for([[t.view(torch.int32) for t in storage]], SMALL) is not first


def test_parallel_lists_follow_one_another() -> None:
    lists = [[torch.zeros(20), torch.zeros(30)] for _ in range(3)]
    table = tables.table_for(lists, SMALL)
    assert table.addresses.tolist() == [t.data_ptr() for tensors in lists for t in tensors]
    assert table.numels.tolist() == [20, 30]
    assert sorted(entries(table.blocks)) == [
        (t, c) for t, n in ((0, 20), (1, 30)) for c in range(-(-n // 16))
    ]
    assert table.n_programs <= table.n_blocks


def test_only_the_lists_that_moved_are_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    send = tables.Upload.send
    monkeypatch.setattr(tables.Upload, "send", lambda self, v, d: (sent.append(len(v)), send(self, v, d)))
    params, grads, first, second = ([torch.zeros(20), torch.zeros(30)] for _ in range(4))
    table = tables.table_for([params, grads, first, second], SMALL)
    moved = [torch.zeros(20), torch.zeros(30)]
    for lists in ([params, moved, first, second], [params, moved, first, grads], [grads, moved, first, params]):
        assert tables.table_for(lists, SMALL) is table
        assert table.addresses.tolist() == [t.data_ptr() for tensors in lists for t in tensors]
    assert sent == [8, 2, 2, 8]


def test_sections_keep_one_alignment() -> None:
    for n in (1, 2, 3):
        table = tables.table_for([[torch.zeros(5) for _ in range(n)]], SMALL)
        assert {part.data_ptr() % 16 for part in (table.addresses, table.numels, table.blocks)} == {0}


def test_threads_do_not_share_a_table() -> None:
    storage = [torch.zeros(50)]
    found = [tables.table_for([storage], SMALL)]
    thread = threading.Thread(target=lambda: found.append(tables.table_for([storage], SMALL)))
    thread.start()
    thread.join()
    assert found[0] is not found[1]


def test_the_cache_is_bounded_by_what_its_tables_take(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = torch.zeros(10)
    first = tables.table_for([[storage]], SMALL)
    monkeypatch.setattr(tables, "MAX_CACHED_BYTES", 3 * first.n_bytes + first.n_bytes // 2)
    for n in (1, 2):
        tables.table_for([[storage[:n]]], SMALL)
    assert tables.table_for([[storage]], SMALL) is first  # used again: not the oldest any more
    for n in (3, 4):
        tables.table_for([[storage[:n]]], SMALL)
    assert tables.table_for([[storage]], SMALL) is first
    tables.table_for([[storage[:5] for _ in range(10_000)]], SMALL)  # takes the place of all the others
    assert tables.table_for([[storage]], SMALL) is not first


def test_a_list_for_each_of_many_parameter_groups_is_kept() -> None:
    storage = torch.zeros(1000)
    made = [tables.table_for([[storage[: n + 1]] * 3], SMALL) for n in range(1000)]
    assert all(tables.table_for([[storage[: n + 1]] * 3], SMALL) is table for n, table in enumerate(made))


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

    def unpinned(*size: int, pin_memory: bool, **options: object) -> torch.Tensor:  # a machine without a GPU has none
        assert pin_memory
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(torch.cuda, "Event", lambda: None)
    with torch.device("meta"):
        assert tables.PinnedSlot(3).memory.device.type == "cpu"


class FakeSlot:
    """Pinned memory whose copy is still under way until told otherwise."""

    made: list["FakeSlot"] = []

    def __init__(self, n: int) -> None:
        self.values: np.ndarray | None = None
        self.in_flight = False
        FakeSlot.made.append(self)

    def busy(self) -> bool:
        return self.in_flight

    def copy_to(self, values: np.ndarray, destination: torch.Tensor) -> None:
        assert not self.in_flight, "memory was written that the device may still be reading"
        self.values, self.in_flight = values.copy(), True


def test_two_buffers_in_turn_and_never_one_in_flight() -> None:
    FakeSlot.made = []
    upload, destination = tables.Upload(2, FakeSlot), torch.zeros(2, dtype=torch.int64)
    for i in range(2):
        upload.send(np.array([i, i]), destination)
    assert len(FakeSlot.made) == 2
    for slot in FakeSlot.made:
        slot.in_flight = False
    upload.send(np.array([2, 2]), destination)
    assert len(FakeSlot.made) == 2  # the first buffer again
    assert FakeSlot.made[0].values.tolist() == [2, 2]
    upload.send(np.array([3, 3]), destination)
    upload.send(np.array([4, 4]), destination)  # both busy: a fresh one, not a wait
    assert len(FakeSlot.made) == 3


@pytest.mark.usefixtures("interpreted")
def test_kernels_address_past_two_to_the_31_elements() -> None:
    from ampkit_kernels.triton_ops import counts

    # A tensor of which only the end exists: the kernel is sent to its last chunk alone.
    config, end = Config(block=256, chunk=1024), torch.tensor([1.0, float("inf"), float("nan"), float("nan")])
    numel = 2**33 + 4
    start = end.data_ptr() - 2**33 * 4
    blocks = torch.tensor([(2**33 // 1024) << tables.CHUNK_SHIFT])
    result = torch.zeros((1, 2), dtype=torch.int64)
    import triton.language as tl

    counts.count_kernel[(1,)](
        torch.tensor([start]), torch.tensor([numel]), blocks, 1, 4, result,
        DTYPE=tl.float32, ACC=tl.float32, ITEMSIZE=4, BLOCK=config.block,
    )
    assert result.tolist() == [[1, 2]]


def test_configs_are_checked() -> None:
    with pytest.raises(ValueError, match="block is 100; expected a power of two"):
        Config(block=100)
    with pytest.raises(ValueError, match=r"chunk is 100; expected a multiple of block \(64\)"):
        Config(block=64, chunk=100)
