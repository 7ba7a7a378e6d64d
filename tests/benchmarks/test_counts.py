"""How many Python functions the code of every training step calls: counts, which a busy machine does not change."""

import re

import torch

from benchmarks import counts
from tests.helpers.processes import fresh_python

# In torch 2.11 a region hands torch its mode, twice, through a function of ours that counts references.
STASH = 2 if torch.__version__.startswith("2.11.") else 0
# Functions of ampkit and its kernels, at most; after each the count of torch's side. `step` and
# `AdamW.step` call ampkit's hook on optimizers on both sides: two functions.
BOUNDS = {
    "region": 16 + STASH,  # 4
    "region, torch's list": 14 + STASH,
    "x @ weight": 5,  # 0: it is C++
    "scaler.step, torch's AdamW": 37,  # 16
    "scaler.update": 7,  # 3
    "unscale, check and clip": 42,  # 9
    "ampkit.optim.AdamW.step and torch's fused": 17,  # 2
}


def test_hot_code_calls_no_more_functions_than_it_did() -> None:
    """Every job of the command, in an interpreter that nothing else has used; lower a bound when code gets shorter."""
    table = fresh_python("import sys; from benchmarks import counts; sys.exit(counts.main([]))")
    calls = {name: int(own) for name, own in re.findall(r"^\| (.+?) \| (\d+) / \d+ \|", table, re.MULTILINE)}
    assert calls.keys() == BOUNDS.keys() == counts.JOBS.keys()
    assert {name: count for name, count in calls.items() if count > BOUNDS[name]} == {}
    assert [name for name, count in calls.items() if count <= 0] == []
