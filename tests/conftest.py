"""Settings for all tests: seeds, one torch thread, the Triton interpreter on machines without a GPU.

TRITON_INTERPRET is set before anything imports Triton, which reads it when a kernel is decorated. A value that the
caller has set is kept. Tests that compile kernels ahead of time start a process without it.
"""

import gc
import os
import random
import sys
from collections.abc import Iterator

import hypothesis
import numpy as np
import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")

# One thread: results do not depend on the machine's core count, small operators run faster, and two workers
# do not fight for two cores. `make test` runs one pytest worker per core instead. Processes that tests start get the
# variable.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Derandomized: the same examples on every machine, so that a red run can be repeated by its name alone.
# No deadline: the first example of a kernel test pays for its compilation.
hypothesis.settings.register_profile(
    "ampkit", derandomize=True, deadline=None, max_examples=50, database=None, print_blob=True
)
hypothesis.settings.load_profile("ampkit")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` on machines without a CUDA device."""
    if HAS_CUDA:
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Leave modules and tests out of garbage collection, which many tests ask for."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Start each test from the same random state, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _restored_rules() -> Iterator[None]:
    """Take back rules of `register_op`."""
    policy = sys.modules.get("ampkit.policy.policy")
    before = dict(policy._Registered.rules) if policy else {}
    yield
    if policy and policy._Registered.rules != before:
        policy._Registered.rules.clear()
        policy._Registered.rules.update(before)
        policy._Registered.changes += 1


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    """Reset Accelerate, which keeps its settings in the process and refuses others; the Trainer uses it."""
    yield
    if "accelerate.state" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


@pytest.fixture(autouse=True)
def _no_region_left_open() -> Iterator[None]:
    """Fail the test that leaves a region or a dispatch mode open, and not the tests after it."""
    before = _autocast_state()
    yield
    after = _autocast_state()
    depth = torch._C._len_torch_dispatch_stack()
    assert depth == 0, f"the test left {depth} dispatch mode(s) active on this thread"
    assert after == before, f"the test began in the autocast state {before} and left {after}"


def _autocast_state() -> tuple[object, ...]:
    torch.autocast_increment_nesting()
    return (
        torch.autocast_decrement_nesting(),
        torch.is_autocast_cache_enabled(),
        *((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")),
        *(
            str(keys)
            for keys in (torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set())
        ),
    )
