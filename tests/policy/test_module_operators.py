"""`Policy.explain` of a module's class: what its source says is what a region sees when it runs."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from ampkit import Policy, Rule, autocast, record_casts

IMAGE = torch.ones(2, 3, 8, 8)
ROWS = torch.ones(2, 5, 4)
RUNS = {
    nn.Linear: (nn.Linear(4, 4), ROWS),
    nn.Conv2d: (nn.Conv2d(3, 2, 3, padding_mode="circular", padding=1), IMAGE),
    nn.ConvTranspose2d: (nn.ConvTranspose2d(3, 2, 3), IMAGE),
    nn.LayerNorm: (nn.LayerNorm(4), ROWS),
    nn.GroupNorm: (nn.GroupNorm(1, 3), IMAGE),
    nn.BatchNorm2d: (nn.BatchNorm2d(3), IMAGE),
    nn.LSTM: (nn.LSTM(4, 4), ROWS),
    nn.GRUCell: (nn.GRUCell(4, 4), ROWS[0]),
    nn.Softmax: (nn.Softmax(-1), ROWS),
    nn.MaxPool3d: (nn.MaxPool3d(1), IMAGE),
    nn.Upsample: (nn.Upsample(scale_factor=2, mode="bilinear"), IMAGE),
    nn.CosineSimilarity: (nn.CosineSimilarity(), ROWS, ROWS),
    nn.MSELoss: (nn.MSELoss(), ROWS, ROWS),
    nn.MultiheadAttention: (nn.MultiheadAttention(4, 1), ROWS, ROWS, ROWS),
}


# Under torch.amp's list for the CPU these are made of operators that only their code in C++ names.
MADE_OF_OTHERS = (nn.LSTM, nn.GRUCell)


@pytest.mark.parametrize("cls", RUNS, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("policy", [Policy.torch("cpu"), Policy.default("cpu")], ids=["torch", "default"])
def test_it_names_what_a_region_sees(cls, policy):
    """Every operator with a rule that a run of the module records, with the same rule and reason."""
    if cls in MADE_OF_OTHERS and policy.base == "torch":
        assert "(its parts follow their own rules)" in str(policy.explain(cls))
        return
    module, *inputs = RUNS[cls]
    with record_casts() as record, autocast("cpu", policy=policy):
        module(*inputs)
    found = policy.explain(cls)
    named = {one.op: one for one in found.operators}
    for call in record.calls:
        assert named[call.op] == policy.explain(call.op), call.op
        assert f"  {named[call.op]}" in str(found).splitlines()


def test_its_lines():
    found = Policy.torch("cpu").explain(nn.Conv2d)
    assert str(found).splitlines()[0] == "torch.nn.modules.conv.Conv2d calls"
    assert str(found).splitlines()[-1] == "  and, named by no list, aten::pad (its parts follow their own rules)"
    relu, sequential = map(Policy.torch("cpu").explain, (nn.ReLU, nn.Sequential))
    assert str(relu).endswith("ReLU calls no operator that a list names, but aten::relu")
    assert "calls no operator that its source names; ask about the modules in it" in str(sequential)


def attend(query, key):
    return functional.softmax(query @ key, -1)


class Own(nn.Linear):
    def forward(self, input):
        return self.scores(super().forward(input)).sum().logsumexp(0)

    def scores(self, hidden):
        return attend(hidden, hidden.T)


def test_a_class_of_the_users():
    """Its own methods, what it inherits, a function beside it, methods of tensors and symbols."""
    policy = Policy.default("cpu").with_rules({"aten::logsumexp": Rule.KEEP})
    found = {one.op: one.rule for one in policy.explain(Own).operators}
    assert found == {
        "aten::linear": Rule.LOWER, "aten::matmul": Rule.LOWER, "aten::softmax.int": Rule.FLOAT32_DTYPE_ARG,
        "aten::sum": Rule.FLOAT32_DTYPE_ARG, "aten::logsumexp": Rule.KEEP,
    }


def test_a_class_without_source_is_refused():
    made = {}
    exec("class Hidden(Module):\n    def forward(self, x):\n        return x", {"Module": nn.Module}, made)
    with pytest.raises(ValueError, match=r"the source of Hidden.forward cannot be read, .* see with record_casts\(\)"):
        Policy.torch("cpu").explain(made["Hidden"])
