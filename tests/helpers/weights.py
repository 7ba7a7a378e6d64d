"""Shared by the tests of `test_weight_cache` and its neighbours."""

import torch
from torch.nn import Parameter

from tests.helpers.regions import BF16

X = torch.ones(2, 4, dtype=BF16)


def weight(requires_grad: bool = True) -> Parameter:
    return Parameter(torch.ones(4, 4), requires_grad)


def copies(call) -> int:
    """How many copies a call makes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        call()
    return sum(event.count for event in profile.key_averages() if event.key == "aten::copy_")


def uses(region, leaf, times: int = 3, **kwargs) -> int:
    """How many copies it takes to use a leaf so often in one region."""
    def run():
        with region("cpu", **kwargs):
            for _ in range(times):
                torch.mm(X, leaf)

    return copies(run)


WRITES = {
    "in place": lambda p: p.detach().fill_(2.0),
    "data =": lambda p: setattr(p, "data", torch.full((4, 4), 2.0)),
    "data =, and the old values live on": lambda p: (p.data, setattr(p, "data", torch.full((4, 4), 2.0))),
}


class WritesThroughData(torch.optim.Optimizer):
    """As many optimizers outside torch do it: no version counter moves, no address changes."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad)
