"""What a record says of shapes, FLOPs, misaligned sizes and casts that undo each other."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ampkit import Policy, autocast, record_casts


def t(*shape):
    return torch.ones(shape)


OPERATORS = {
    "linear": lambda: F.linear(t(2, 3, 5), t(7, 5), t(7)),
    "linear_vector": lambda: F.linear(t(5), t(7, 5)),
    "mm": lambda: torch.mm(t(3, 5), t(5, 7)),
    "addmm": lambda: torch.addmm(t(7), t(3, 5), t(5, 7)),
    "bmm": lambda: torch.bmm(t(2, 3, 5), t(2, 5, 7)),
    "baddbmm": lambda: torch.baddbmm(t(7), t(2, 3, 5), t(2, 5, 7), beta=0.5),
    "matmul_2d": lambda: t(3, 5) @ t(5, 7),
    "matmul_batch": lambda: t(4, 2, 3, 5) @ t(5, 7),
    "matmul_broadcast": lambda: t(4, 1, 3, 5) @ t(2, 5, 7),
    "einsum": lambda: torch.einsum("bij,bjk->bik", t(2, 3, 5), t(2, 5, 7)),
    "einsum_to_a_vector": lambda: torch.einsum("ijk,jl->l", t(2, 3, 5), t(3, 7)),
    "einsum_implicit": lambda: torch.einsum("ij, jk", t(3, 5), t(5, 7)),
    "tensordot": lambda: torch.tensordot(t(2, 3, 5), t(5, 3, 7), ([1, 2], [1, 0])),
    "inner": lambda: torch.inner(t(2, 3, 5), t(7, 5)),
    "conv1d": lambda: F.conv1d(t(2, 4, 9), t(6, 2, 3), stride=2, padding=1, dilation=2, groups=2),
    "conv2d": lambda: F.conv2d(t(2, 4, 9, 8), t(6, 4, 3, 2), t(6), stride=(2, 1), padding=(1, 0)),
    "conv2d_unbatched": lambda: F.conv2d(t(4, 9, 8), t(6, 4, 3, 3)),
    "conv2d_same": lambda: F.conv2d(t(2, 4, 9, 8), t(6, 4, 3, 3), padding="same", dilation=2),
    "conv2d_valid": lambda: F.conv2d(t(2, 4, 9, 8), t(6, 4, 3, 3), padding="valid"),
    "conv3d": lambda: F.conv3d(t(1, 2, 5, 6, 7), t(3, 2, 2, 2, 2)),
    "conv_transpose1d": lambda: F.conv_transpose1d(t(2, 4, 9), t(4, 3, 3), stride=2, groups=2),
    "conv_transpose2d": lambda: F.conv_transpose2d(t(2, 4, 5, 6), t(4, 3, 3, 2), padding=1, output_padding=0),
    "attention": lambda: F.scaled_dot_product_attention(t(2, 4, 6, 8), t(2, 4, 5, 8), t(2, 4, 5, 8)),
    "lstm": lambda: nn.LSTM(5, 7, 2, bidirectional=True).double()(t(3, 2, 5).double()),     # else in one operator
    "gru": lambda: nn.GRU(5, 7)(t(3, 2, 5)),
    "rnn_packed": lambda: nn.RNN(5, 7)(nn.utils.rnn.pack_padded_sequence(t(3, 2, 5), torch.tensor([3, 2]))),
    "lstm_cell": lambda: nn.LSTMCell(5, 7)(t(3, 5)),
    "gru_cell": lambda: nn.GRUCell(5, 7)(t(3, 5)),
    "multi_head_attention": lambda: nn.MultiheadAttention(8, 2)(t(3, 2, 8), t(4, 2, 8), t(4, 2, 8)),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_flops_are_those_of_torchs_counter(name):
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):     # which it can look into
        OPERATORS[name]()
    with record_casts() as record, autocast("cpu"):
        OPERATORS[name]()
    assert record.flops == counter.get_total_flops() > 0


def test_a_sum_of_products_counts_them_all():
    with record_casts() as record, autocast("cpu"):
        torch.addbmm(t(3, 7), t(2, 3, 5), t(2, 5, 7))
    assert record.flops == 2 * 2 * 3 * 5 * 7


def test_operators_that_are_no_product_and_calls_that_fail_have_none():
    with record_casts() as record, autocast("cpu"):
        torch.softmax(t(2, 2), -1)
        with pytest.raises(RuntimeError):
            F.conv2d(t(2), t(2, 2, 2, 2))
    assert [call.products for call in record.calls] == [(), ()]


def test_symbolic_sizes_give_those_of_the_example():
    fake = FakeTensorMode(shape_env=(shapes := ShapeEnv()))
    x, weight = fake.from_tensor(torch.ones(5, 3)), fake.from_tensor(torch.ones(3, 7))
    with fake, record_casts() as record, autocast("cpu"):
        torch.mm(x, weight)
    assert not shapes.guards
    assert record.calls[0].shapes == ((5, 3), (3, 7))
    assert record.flops == 2 * 5 * 3 * 7


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.narrow = nn.Linear(16, 12)
        self.head = nn.Linear(12, 33)
        self.conv = nn.Conv1d(3, 8, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(self.narrow(x)), self.conv(x[None, :3])


def test_misaligned_products_are_named_with_what_to_change():
    with record_casts() as record, autocast("cpu"):
        Odd()(t(8, 16))
    found = record.misaligned(8)
    assert [(one.module, one.odd, one.calls) for one in found] == [
        ("head", {"inner": 12, "columns": 33}, 1), ("narrow", {"columns": 12}, 1), ("conv", {"in": 3}, 1),
    ]
    assert str(found[0]) == "inner, columns of aten::linear in head (rows 8, inner 12, columns 33), 1 call"
    assert [one.flops for one in found] == sorted((one.flops for one in found), reverse=True)
    assert [one.module for one in record.misaligned(4)] == ["head", "conv"]
    assert record.misaligned(32)[0].module == "layers.*"
    precise = Policy.default("cpu").with_rules({"aten::linear": "float32"})
    with record_casts() as record, autocast("cpu", policy=precise):
        Odd()(t(8, 16))
    assert [one.module for one in record.misaligned()] == ["conv"]      # tensor cores are of 16 bits
    with pytest.raises(ValueError, match="multiple is 0; expected how many elements"):
        record.misaligned(0)


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
