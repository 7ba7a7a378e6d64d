"""FP8 rules in a policy: the operators that take them, fallbacks to LOWER, the output of `check` and of records."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from ampkit import Policy, Rule, autocast, record_casts
from ampkit.matmul import float8_layers
from ampkit.matmul import float8_matmul as torch_float8
from tests.helpers.float8 import GW_HP, OPERATORS, ROWWISE, RULES, TENSORWISE, fp8, mlp, policy, same


@pytest.mark.parametrize("rule", RULES)
def test_policies_take_them_as_any_rule(rule):
    model = mlp()
    given = policy(rule, *OPERATORS)
    assert given == policy(rule.value, *OPERATORS) == Policy.from_dict(given.to_dict())
    assert str(given.explain(F.linear)) == f"aten::linear: {rule.name} (set by with_rules[0]): set by the user"
    assert rule not in {*Policy.default("cuda").rules().values(), *Policy.torch("cuda").rules().values()}
    steered = given.for_modules(model, {"2": policy(TENSORWISE)})
    assert Policy.from_dict(steered.to_dict(), model) == steered
    with record_casts() as record, autocast("cpu", torch.bfloat16, policy=steered):
        model(torch.randn(8, 64))
    assert [call.float8 for call in record.calls] == [rule.name, TENSORWISE.name]


@pytest.mark.parametrize("op", ["aten::conv2d", "aten::bmm", torch.softmax, "aten::baddbmm", "aten::addmm.out"])
def test_operators_without_an_fp8_form_are_refused(op):
    with pytest.raises(ValueError, match=r"cannot follow FLOAT8_ROWWISE: it has no FP8 form; aten::linear, aten::mm"):
        Policy.default("cpu").with_rules({op: ROWWISE})


X, W = torch.randn(8, 64), torch.randn(48, 64)
FALLBACKS = {
    "K is 60, N is 10, not a multiple of 16": lambda: F.linear(X[:, :60], W[:10, :60]),
    "N is 10, not a multiple of 16": lambda: X @ W[:10].t(),
    "K is 60, not a multiple of 16": lambda: torch.addmm(torch.ones(48), X[:, :60], W[:, :60].t()),
    "called with alpha, beta or a dtype": lambda: torch.addmm(torch.ones(48), X, W.t(), beta=2),
    "not a product with a matrix": lambda: X.expand(2, 8, 64) @ W.t().expand(2, 64, 48),
    "an empty operand": lambda: F.linear(X[:0], W),
    "an operand that is not dense": lambda: torch.mm(X.to_sparse(), W.t()),
    "an operand that is not float32, bfloat16 or float16 on the region's device": lambda: X.double() @ W.t().double(),
    "inside a transform of torch.func": lambda: torch.vmap(lambda x: F.linear(x, W))(X.expand(2, 8, 64)),
}


COMPUTED_OR_REFUSED = {
    "nested": lambda: F.linear(torch.nested.nested_tensor([X[:3], X[3:]]), W).to_padded_tensor(0.0),
    "float8 weight": lambda: F.linear(X, W.to(torch.float8_e4m3fn)),
    "float64 bias": lambda: F.linear(X, W, torch.ones(48).double()),
    "mm of 3 dimensions": lambda: torch.mm(X.expand(2, 8, 64), W.t()),
    "addmm of 3 dimensions": lambda: torch.addmm(torch.ones(48), X.expand(2, 8, 64), W.t()),
    "more rows added": lambda: torch.addmm(torch.ones(5, 48), X[:1], W.t()),
    "more rows of bias": lambda: F.linear(X[:1], W, torch.ones(5, 48)),
    "another K": lambda: F.linear(X[:, :32], W),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("what", FALLBACKS | COMPUTED_OR_REFUSED)
def test_what_has_no_fp8_form_does_as_lower_does(what):
    """The values or the error are LOWER's, without mention of padded sizes; a fallback is recorded with its reason."""
    found = []
    for rule in (Rule.LOWER, ROWWISE):
        with record_casts() as record, fp8(rule, *OPERATORS), torch.no_grad():
            try:
                found.append((FALLBACKS | COMPUTED_OR_REFUSED)[what]())
            except RuntimeError as error:
                found.append(str(error))
    assert same(*([each] for each in found)) if isinstance(found[0], torch.Tensor) else found[0] == found[1]
    if what in FALLBACKS:
        assert {call.float8 for call in record.calls} == {what}
        assert str(record).splitlines()[-1].endswith(f": {what}")
        assert "not in FP8: aten::" in str(record)


def test_a_device_without_fp8_falls_back(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, index))
    torch_float8._lacks_float8.cache_clear()
    lacks = [torch_float8.lacks_float8(torch.device("cuda", minor)) for minor in (0, 9)]
    torch_float8._lacks_float8.cache_clear()
    assert lacks == ["no FP8: compute capability 8.0, below 8.9", ""]
    assert torch_float8.lacks_float8(torch.device("mps")) == "no FP8 on mps"


def test_float8_layers_lists_every_linear_layer():
    model = nn.Sequential(
        nn.Linear(64, 48),
        nn.Linear(48, 10),
        nn.ModuleDict({"low": mlp(16), "high": nn.Linear(16, 16)}),
        nn.Linear(16, 16).double(),
        nn.Linear(32, 32),
        nn.LayerNorm(16),
        Conv1D(48, 10),
        nn.LazyLinear(16),
    )
    given = policy(GW_HP, "aten::linear", "aten::addmm").for_modules(
        model, {"2.low.0": Policy.default("cpu"), "2": torch.float32, "2.low.2": torch.bfloat16, "4": policy(ROWWISE)}
    )
    wrapped: Any = torch.compile(model)
    assert (
        float8_layers(given, wrapped)
        == float8_layers(given, model)
        == [
            "0 (48, 64) FLOAT8_ROWWISE_GW_HP",
            "1 (10, 48) LOWER: N is 10, not a multiple of 16",
            "2.low.0 (32, 16) LOWER",
            "2.low.2 (16, 32) FLOAT8_ROWWISE_GW_HP",
            "2.high (16, 16) float32",
            "3 (16, 16) LOWER: a float64 weight",
            "4 (32, 32) FLOAT8_ROWWISE",
            "6 (48, 10) LOWER: K is 10, not a multiple of 16",
            "7 (16, 0) FLOAT8_ROWWISE_GW_HP",
        ]
    )
    for wrong in ("model", nn.Linear):
        with pytest.raises(TypeError, match=r"float8_layers takes a Policy and a model; got "):
            float8_layers(given, wrong)


@pytest.mark.parametrize("rule", RULES)
def test_a_record_says_what_was_lost(rule):
    model, x = mlp(), torch.randn(32, 64)
    x[:, 3] *= 1e6
    with record_casts() as record:
        with fp8(rule):
            loss = model(x).float().square().mean()
        loss.backward()
    losses = {(loss.module, loss.gemm, loss.operand): loss for loss in record.float8()}
    gemms = {("output", "input"), ("output", "weight"), ("input gradient", "gradient"), ("input gradient", "weight")}
    if rule is not GW_HP:
        gemms |= {("weight gradient", "input"), ("weight gradient", "gradient")}
    first = {gemm for gemm in gemms if gemm[0] != "input gradient"}  # the model's input needs no gradient
    assert losses.keys() == {("0", *gemm) for gemm in first} | {("2", *gemm) for gemm in gemms}
    lost = losses["0", "output", "input"]
    scale = 448 / (x.abs().amax(1, keepdim=True) if rule is not TENSORWISE else x.abs().amax())
    scale = scale if rule is TENSORWISE else torch.exp2(scale.log2().floor())
    data = (x * scale).to(torch.float8_e4m3fn).float()
    assert lost.shape == (32, 64)
    assert lost.amax == x.abs().max().item()
    assert lost.to_zero == ((data == 0) & (x != 0)).float().mean().item() > 0.5
    assert lost.at_end == (data.abs() == 448).float().mean().item()
    squares, noise = x.double().square(), (data / scale - x).double().square()
    ratios = [(10 * (squares.sum(dim) / noise.sum(dim)).log10()).median().item() for dim in (0, 1)]
    assert lost.snr == pytest.approx(min(ratios), rel=1e-4)
    assert lost.snr < 3 < 20 < max(ratios)  # the outlier is nearly all of the energy of each row
    table = str(record.float8()).splitlines()
    assert table[0].split()[:4] == ["to", "0", "SNR", "dB"]
    assert table[1].split()[0] == f"{100 * lost.to_zero:.2f}%"  # the largest comes first
    assert len(table) == 1 + len(losses)
    assert str(lost.scaling) in str(record.float8())


def test_calls_of_a_module_add_up_and_a_region_without_a_record_notes_nothing():
    model = mlp()
    with record_casts() as record, fp8(ROWWISE), torch.no_grad():
        for scale in (1, 100):
            model(torch.ones(16, 64) * scale)
    assert record.float8()[0].amax == 100
    assert len(record.float8()) == 4
    with fp8(ROWWISE):
        model(torch.ones(16, 64))
    assert len(record.float8()) == 4
    with record_casts() as record, fp8(ROWWISE), torch.no_grad():
        model(torch.zeros(16, 64))
    assert record.float8()[0].snr == math.inf
    with record_casts() as record, autocast("cpu"):
        model(torch.ones(16, 64))
    assert str(record.float8()) == "no FP8 product was recorded; products in compiled code and of DTensors are omitted"


LOW, HIGH = torch.ones(16, 16, dtype=torch.bfloat16), torch.ones(16, 16)
RESULTS = {  # for each rule an operator, a call of it, and the dtype of the result in a region in bfloat16
    Rule.LOWER: ("aten::mm", lambda: torch.mm(HIGH, HIGH), torch.bfloat16),
    Rule.LOWER_FLOAT32_OUT: ("aten::mm", lambda: torch.mm(LOW, LOW), torch.float32),
    Rule.FLOAT32: ("aten::mm", lambda: torch.mm(LOW, LOW), torch.float32),
    Rule.FLOAT32_DTYPE_ARG: ("aten::sum", lambda: LOW.sum(), torch.float32),
    Rule.PROMOTE: ("aten::mm", lambda: torch.mm(HIGH, LOW), torch.float32),
    Rule.BANNED: ("aten::mm", lambda: torch.mm(HIGH, HIGH), None),
    Rule.DECOMPOSE: ("aten::matmul", lambda: HIGH @ HIGH, torch.bfloat16),
    Rule.KEEP: ("aten::mm", lambda: torch.mm(HIGH, HIGH), torch.float32),
    **dict.fromkeys(RULES, ("aten::mm", lambda: torch.mm(HIGH, HIGH), torch.bfloat16)),
}


@pytest.mark.parametrize("rule", Rule)
def test_every_rule_is_handled(rule):
    op, call, dtype = RESULTS[rule]
    with record_casts() as record, autocast("cpu", torch.bfloat16, policy=Policy.default("cpu").with_rules({op: rule})):
        if dtype is None:
            with pytest.raises(RuntimeError, match="unsafe under autocast"):
                call()
        else:
            assert call().dtype is dtype
    if rule in RULES:
        assert [each.float8 for each in record.calls] == [rule.name]
