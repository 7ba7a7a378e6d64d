"""Regions and threads: each thread has its own regions, also replicas, first regions and threads that end in one."""

import contextlib
import gc
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from ampkit import Policy, WeightCache, autocast, wrap_forward
from ampkit.region import module_hooks
from ampkit.region.stack import Entry
from tests.helpers.regions import BF16, FP16, FP32, product


def in_threads(calls):
    """Results of calls that all run at the same time, each in a thread of its own."""
    together = threading.Barrier(len(calls))

    def run(call):
        together.wait(20)
        return call(together)

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(30) for future in [pool.submit(run, call) for call in calls]]


def test_regions_of_several_threads_at_once():
    """With other dtypes, policies and module rules, and none."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(1, 4)

    def call(region):
        def run(together):
            seen = set()
            for _ in range(5):
                with region:
                    together.wait(20)
                    seen.add((model(x).dtype, model[0](x).dtype, torch.softmax(x.bfloat16(), -1).dtype))
            return seen

        return run

    default = Policy.default("cpu")
    assert in_threads(
        [
            call(contextlib.nullcontext()),
            call(autocast("cpu")),
            call(autocast("cpu", FP16)),
            call(autocast("cpu", policy="torch")),
            *(call(autocast("cpu", policy=default.for_modules(model, {"1": dtype}))) for dtype in (FP32, FP16)),
        ]
    ) == [
        {(FP32, FP32, BF16)},
        {(BF16, BF16, FP32)},
        {(FP16, FP16, FP32)},
        {(BF16, BF16, BF16)},
        {(FP32, BF16, FP32)},
        {(FP16, BF16, FP32)},
    ]


class Decorated(nn.Sequential):
    forward = autocast("cpu", FP16)(nn.Sequential.forward)


@pytest.mark.parametrize(
    "model",
    [
        Decorated(nn.Linear(4, 4)),
        wrap_forward(nn.Sequential(nn.Linear(4, 4)), "cpu", FP16),
    ],
    ids=["decorated", "wrapped"],
)
def test_replicas_of_a_wrapped_and_a_decorated_module_in_threads(model):
    """As `nn.DataParallel` makes and calls them."""
    replicas = [model._replicate_for_data_parallel() for _ in range(4)]
    calls = [lambda _, replica=replica: replica(torch.ones(2, 4)).dtype for replica in replicas]
    assert in_threads(calls) == [FP16] * 4


@pytest.mark.usefixtures("small_weights_are_kept")
def test_cache_shared_by_several_threads():
    layers = [nn.Linear(8, 8) for _ in range(6)]
    expected = [layer(torch.ones(1, 8)).bfloat16() for layer in layers]
    cache = WeightCache()

    def call(_):
        for _ in range(20):
            for layer, want in zip(layers, expected, strict=True):
                with autocast("cpu", cache=cache):
                    out = layer(torch.ones(1, 8))
                out.float().sum().backward()
                torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)
            cache.clear()  # amid the uses of the other threads

    in_threads([call] * 4)


FIRST_REGIONS = """
import sys, threading, warnings
sys.setswitchinterval(1e-6)
warnings.simplefilter("error")
import ampkit
from ampkit.engine import registration
from ampkit.torch_internals import dispatcher
together, tables = threading.Barrier(4), []
def first():
    together.wait()
    with ampkit.autocast("cpu"):
        tables.append(dispatcher.current().tables[0][1])
threads = [threading.Thread(target=first) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(registration.OPERATORS) == len(registration._installed) > 200 and len(tables) == 4
assert all(registration.OPERATORS[op.name()] is op for table in tables for op in table)
"""


def test_first_regions_of_a_process_in_several_threads():
    """Each thread's look-up of an operator may get an object of its own from torch; a rule must be found by any."""
    ran = subprocess.run([sys.executable, "-c", FIRST_REGIONS], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_threads_that_end_inside_a_region_leave_nothing_behind():
    layer = nn.Linear(8, 8)
    rules = Policy.default("cpu").for_modules(layer, {nn.Linear: torch.float32})
    before = [entry for entry in gc.get_objects() if type(entry) is Entry]  # of tests whose exceptions are kept

    def call():
        for policy in (None, rules):
            autocast("cpu", policy=policy).__enter__()
            layer(torch.ones(1, 8))

    for _ in range(3):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    gc.collect()
    assert [entry for entry in gc.get_objects() if type(entry) is Entry] == before
    assert list(module_hooks._open) == []
    with autocast("cpu", policy=rules):  # the next region removes the hooks that they left
        pass


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer's signals")
def test_regions_opened_by_a_signals_handler():
    """At any place of entering and leaving another."""
    seen = []

    def handler(*_):
        with autocast("cpu", FP16):
            seen.append(product())

    old = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 5e-4, 5e-4)
        while len(seen) < 200:
            with autocast("cpu"):
                with autocast("cpu", enabled=False):
                    pass
                assert product() is BF16
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert set(seen) == {FP16}
