"""Regions and threads: each thread has its own regions, also replicas, first regions and threads that end in one."""

import contextlib
import gc
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from ampkit import Policy, autocast
from ampkit.region import module_hooks
from ampkit.region.stack import OpenRegion
from tests.helpers.processes import fresh_python
from tests.helpers.regions import BF16, FP16, FP32


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


def test_replicas_of_a_decorated_module_in_threads():
    """As `nn.DataParallel` makes and calls them."""
    model = Decorated(nn.Linear(4, 4))
    replicas = [model._replicate_for_data_parallel() for _ in range(4)]
    calls = [lambda _, replica=replica: replica(torch.ones(2, 4)).dtype for replica in replicas]
    assert in_threads(calls) == [FP16] * 4


FIRST_REGIONS = """
import sys, threading, warnings
sys.setswitchinterval(1e-6)
warnings.simplefilter("error")
import ampkit
from ampkit.dispatch import dispatcher
together, tables = threading.Barrier(4), []
def first():
    together.wait()
    with ampkit.autocast("cpu"):
        tables.append(dispatcher.current_mode().tables[0][1])
threads = [threading.Thread(target=first) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(dispatcher.OPERATORS) == len(dispatcher._installed) > 200 and len(tables) == 4
assert all(dispatcher.OPERATORS[op.name()] is op for table in tables for op in table)
"""


def test_first_regions_of_a_process_in_several_threads():
    """Each thread's look-up of an operator may get an object of its own from torch; a rule must be found by any."""
    ran = subprocess.run([sys.executable, "-c", FIRST_REGIONS], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_threads_that_end_inside_a_region_leave_nothing_behind():
    layer = nn.Linear(8, 8)
    rules = Policy.default("cpu").for_modules(layer, {nn.Linear: torch.float32})
    before = [each for each in gc.get_objects() if type(each) is OpenRegion]  # of tests whose exceptions are kept

    def call():
        for policy in (None, rules):
            autocast("cpu", policy=policy).__enter__()
            layer(torch.ones(1, 8))

    for _ in range(3):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    gc.collect()
    assert [each for each in gc.get_objects() if type(each) is OpenRegion] == before
    assert list(module_hooks._open) == []
    with autocast("cpu", policy=rules):  # the next region removes the hooks that they left
        pass


AT_EXIT = """
import atexit

atexit.register(lambda: use("early"))
import torch
REGION = torch.autocast if {torchs} else __import__("ampkit").autocast
layer, x = torch.nn.Linear(4, 4), torch.ones(2, 4)

def use(when):
    with REGION("cpu", torch.bfloat16):
        print(when, layer(x).dtype)

if {before}:
    use("before")

class Last:
    def __del__(self):
        use("last")

last = Last()
last.itself = last
"""


@pytest.mark.parametrize("before", [True, False], ids=["", "first region at exit"])
def test_regions_that_are_entered_while_the_process_exits(before):
    """As torch's: in exit functions that run last, and in `__del__` of what the interpreter frees at the end."""
    code = AT_EXIT.format(torchs=False, before=before)
    printed = fresh_python(code)
    assert printed == fresh_python(AT_EXIT.format(torchs=True, before=before))
    assert printed.endswith("early torch.bfloat16\nlast torch.bfloat16\n")
