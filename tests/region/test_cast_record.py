"""What a record says of casts that undo each other."""

import torch
import torch.nn.functional as F
from torch import nn

from ampkit import Policy, autocast, record_casts


def t(*shape):
    return torch.ones(shape)


class Norms(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_casts_up_right_before_casts_down_are_pairs():
    with record_casts() as record, autocast("cpu"):
        Norms()(t(4, 8))
    (trip,) = record.round_trips()
    assert trip[:5] == ("aten::layer_norm", "aten::linear", "blocks.*.1", "blocks.*.2", 3)
    assert trip.nbytes == 3 * (6 * 32 + 6 * 32)
    assert str(trip).startswith(
        "aten::layer_norm in blocks.*.1 is cast up, and its result down again for aten::linear in blocks.*.2: 3 calls"
    )
    assert record.calls[2].undoes is record.calls[1]
    kept = Policy.default("cpu").with_rules({"aten::layer_norm": "keep"})
    with record_casts() as record, autocast("cpu", policy=kept):
        Norms()(t(4, 8).bfloat16())
    assert record.round_trips() == []


def test_a_view_between_is_looked_through_and_another_operator_is_not():
    x, weight = t(4, 8).bfloat16(), t(8, 8)
    with record_casts() as record, autocast("cpu"):
        torch.mm(F.layer_norm(x, (8,)).t(), t(4, 4))
        torch.mm(F.layer_norm(x, (8,)) * 2, weight)
        torch.mm(x.float(), weight)
    assert [(trip.up, trip.down, trip.calls) for trip in record.round_trips()] == [("aten::layer_norm", "aten::mm", 1)]


def test_a_result_that_is_gone_is_no_ones():
    x, weight = t(4, 8).bfloat16(), t(8, 8)
    with record_casts() as record, autocast("cpu"):
        for _ in range(20):
            F.layer_norm(x, (8,))
            torch.mm(torch.zeros(4, 8), weight)
    assert record.round_trips() == []
