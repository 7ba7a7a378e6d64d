"""`record_casts`: a record agrees with the casts that were made, and recording changes nothing."""

import re
import textwrap
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ampkit import Policy, Rule, autocast, record_casts
from ampkit.dispatch import dispatcher
from ampkit.dispatch.mode import AutocastMode
from tests.helpers.regions import BF16, FP32, copies


class Net(nn.Module):
    """Two blocks and a head; the blocks share a row of the table."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x).softmax(-1)


@pytest.fixture
def net():
    return Net()


X = torch.ones(2, 8)
NOTHING = "no operator with a rule was called in a region that was entered while recording"


def test_calls_in_order_with_rule_place_and_reason(net):
    policy = Policy.default("cpu").with_rules({"aten::layer_norm": Rule.LOWER})
    with record_casts() as record, autocast("cpu", policy=policy):
        net(X)
    assert [(call.op, call.module) for call in record.calls] == [
        ("aten::linear", "blocks.0.0"),
        ("aten::layer_norm", "blocks.0.1"),
        ("aten::linear", "blocks.1.0"),
        ("aten::layer_norm", "blocks.1.1"),
        ("aten::linear", "head"),
        ("aten::softmax.int", "Net"),
    ]
    linear, norm, second, _, _, softmax = record.calls
    assert (linear.rule, linear.layer, linear.why) == tuple(policy.explain("aten::linear"))[1:]
    assert (norm.rule, norm.layer) == (Rule.LOWER, "with_rules[0]")
    assert (linear.operands, linear.computed_in, linear.casts) == ((FP32,) * 3, (BF16,) * 3, 3)
    assert linear.nbytes == 6 * (16 + 64 + 8)
    assert linear.shapes == ((2, 8), (8, 8), (8,))
    assert (second.operands, second.casts) == ((BF16, FP32, FP32), 2)
    assert (softmax.operands, softmax.computed_in, softmax.casts) == ((BF16,), (FP32,), 0)
    assert linear.line.startswith("test_recording.py:")
    assert len({call.line for call in record.calls}) == 2


@pytest.mark.parametrize("base", [Policy.default, Policy.torch])
def test_casts_are_those_that_torch_makes(net, base):
    step = autocast("cpu", policy=base("cpu"))(lambda: (net(X), net(X)))
    step()
    wanted = copies(step)
    with record_casts() as record:
        step()
    inside_softmax = sum(call.rule is Rule.FLOAT32_DTYPE_ARG for call in record.calls)  # torch converts there
    assert record.casts + inside_softmax == wanted


def test_a_weight_is_cast_once_and_cached_after(net):
    with record_casts() as record, autocast("cpu", enabled=False):
        for _ in range(2):
            with autocast("cpu"):
                net(X)
    first, second = record.calls[:6], record.calls[6:]
    weights = [(8, 8), (8,), (8, 8), (8,), (4, 8), (4,)]
    assert sum(call.cached for call in first) == 0
    assert sum(call.cached for call in second) == len(weights) == record.cached
    assert sum(call.casts for call in first) - sum(call.casts for call in second) == len(weights)
    saved = sum(call.nbytes for call in first) - sum(call.nbytes for call in second)
    assert saved == 6 * sum(torch.Size(shape).numel() for shape in weights)


def test_table(net):
    with record_casts() as record, autocast("cpu"):
        net(torch.ones(1000, 8))
    assert str(record) == textwrap.dedent("""\
        calls  operator           rule, set by                module      operands              computed in  casts  cached     MB
            2  aten::linear       LOWER, torch                blocks.*.0  float32 x3            bfloat16 x3      6       0  0.097
            2  aten::layer_norm   FLOAT32, default            blocks.*.1  bfloat16, float32 x2  float32 x3       2       0  0.096
            1  aten::linear       LOWER, torch                head        float32 x3            bfloat16 x3      3       0  0.048
            1  aten::softmax.int  FLOAT32_DTYPE_ARG, default  Net         bfloat16              float32          0       0  0.000
        6 calls, 11 casts (0.241 MB read and written), 0 reused from the cache
        upcast and cast back: aten::linear in blocks.1.0, 1 call: 0.032 MB of float32 from NativeLayerNorm
        upcast and cast back: aten::linear in head, 1 call: 0.032 MB of float32 from NativeLayerNorm""")  # noqa: E501


def test_only_regions_entered_inside_and_plain_modes_after(net):
    with autocast("cpu"):
        with record_casts() as record:
            net(X)
        assert record.calls == []
    with pytest.raises(RuntimeError, match="shape"), record_casts() as record, autocast("cpu"):
        torch.mm(net(X), X)
    assert len(record.calls) == 7
    with autocast("cpu"):
        assert type(dispatcher.current_mode()) is AutocastMode
        net(X)
    assert len(record.calls) == 7


def test_lists_and_dtype_arguments():
    with record_casts() as record, autocast("cpu"):
        torch.cat([X, X.bfloat16(), X.bfloat16()])
        torch.softmax(X.bfloat16(), -1)
        torch.softmax(X.bfloat16(), -1, dtype=torch.float64)
    cat, softmax, asked = record.calls
    assert (cat.operands, cat.computed_in, cat.casts, cat.module) == ((FP32, BF16, BF16), (FP32,) * 3, 2, "")
    assert cat.nbytes == 2 * 6 * 16
    assert softmax.computed_in == (FP32,)
    assert asked.computed_in == (torch.float64,)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_recorded_without_a_shape():
    nested = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)])
    with record_casts() as record, autocast("cpu"):
        torch.nn.functional.linear(nested, torch.randn(3, 4))
    assert [call.shapes for call in record.calls] == [((), (3, 4))]


def test_rules_of_modules(net):
    """A module in float32 does not appear: autocast is off inside."""
    policy = Policy.default("cpu").for_modules(net, {"head": torch.float16, "blocks.0": FP32})
    with record_casts() as record, autocast("cpu", policy=policy):
        net(X)
    (head,) = (call for call in record.calls if call.module == "head")
    assert head.computed_in == (torch.float16,) * 3
    assert not [call for call in record.calls if call.module.startswith("blocks.0")]


@pytest.mark.parametrize(("backend", "calls"), [("eager", 6), ("aot_eager", 0)])
def test_compiled_code_is_recorded_where_it_runs(net, backend, calls):
    compiled = torch.compile(lambda x: net(x), backend=backend)
    for _ in range(2):
        with record_casts() as record, autocast("cpu"):
            compiled(X)
        assert len(record.calls) == calls
        assert str(record).startswith(f"{NOTHING}\noperators in compiled code are not recorded: ") == (calls == 0)
    with torch.compiler.set_stance("force_eager"), record_casts() as record, autocast("cpu"):
        compiled(X)
    assert len(record.calls) == 6
    assert not record.compiled
    torch._dynamo.reset()
    with record_casts() as record:
        pass
    assert str(record) == NOTHING


def test_a_step_that_is_compiled_in_part_says_so(net):
    compiled = torch.compile(net.head, backend="aot_eager")
    with torch.no_grad(), record_casts() as record, autocast("cpu"):
        compiled(net.blocks[0](X))
    assert [call.op for call in record.calls] == ["aten::linear", "aten::layer_norm"]
    assert str(record).splitlines()[-1].startswith("operators in compiled code are not recorded")


def test_the_record_keeps_no_tensor():
    model = nn.Linear(8, 8)
    alive = [weakref.ref(param) for param in model.parameters()]
    with record_casts() as record, autocast("cpu"):
        model(X)
    assert record.casts == 3
    del model
    assert [ref() for ref in alive] == [None, None]


class WrittenOut(nn.Module):
    """An RMS norm as models of transformers write it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Residual(nn.Module):
    """A branch on float32 activations, which here have no gradient."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(torch.ones(8) + x)


def between(*modules):
    return lambda: nn.Sequential(nn.Linear(8, 8), *modules, nn.Linear(8, 8))


UPCAST = {
    "an RMS norm that is written out": (between(WrittenOut()), "2", "Mul"),
    "layer norm": (between(nn.LayerNorm(8)), "2", "NativeLayerNorm"),
    "RMS norm": (between(nn.RMSNorm(8)), "2", "Mul"),
    "softmax": (between(nn.Softmax(-1)), "2", "Softmax"),
    "layer norm, viewed": (between(nn.LayerNorm(8), nn.Unflatten(1, (2, 4)), nn.Flatten()), "4", "NativeLayerNorm"),
    "16-bit activations alone": (between(nn.GELU()), None, ""),
    "a float32 input": (lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)), None, ""),
    "a residual stream in float32": (between(Residual()), None, ""),
    "a longer float32 computation": (between(*[nn.LayerNorm(8)] * 10), None, ""),
}


@pytest.mark.parametrize("name", UPCAST)
def test_float32_results_of_16_bits_that_are_cast_back(name):
    """tests/integration/test_real_models.py has adapters of PEFT."""
    build, module, producer = UPCAST[name]
    with record_casts() as record, autocast("cpu"):
        build()(torch.ones(16, 8))
    undone = [(call.module, call.upcast_by, call.upcast_nbytes) for call in record.calls if call.upcast_by]
    assert undone == ([(module, producer, 4 * 16 * 8)] if module else [])
    said = f"upcast and cast back: aten::linear in {module}, 1 call: 0.001 MB of float32 from {producer}"
    assert (said in str(record).splitlines()) is bool(module)


def ones(*shape):
    return torch.ones(shape)


PRODUCTS = {
    # the language model's head of GPT-2, with its vocabulary, and padded as nanoGPT does
    "linear": (lambda: F.linear(ones(4, 1024, 768), ones(50257, 768)), {"out": (50257, 50264)}),
    "linear, padded": (lambda: F.linear(ones(4, 1024, 768), ones(50304, 768)), {}),
    "linear of the last batch": (lambda: F.linear(ones(13, 768), ones(3072, 768), ones(3072)), {"rows": (13, 16)}),
    "mm": (lambda: torch.mm(ones(64, 100), ones(100, 64)), {"inner": (100, 104)}),
    "addmm": (lambda: torch.addmm(ones(1001), ones(64, 2048), ones(2048, 1001)), {"columns": (1001, 1008)}),
    "bmm": (lambda: torch.bmm(ones(96, 197, 64), ones(96, 64, 197)), {"rows": (197, 200), "columns": (197, 200)}),
    "baddbmm": (lambda: torch.baddbmm(ones(8, 16, 77), ones(8, 16, 40), ones(8, 40, 77)), {"columns": (77, 80)}),
    "matmul": (lambda: ones(8, 12, 197, 64) @ ones(8, 12, 64, 197), {"rows": (197, 200), "columns": (197, 200)}),
    "matmul, the batch in the rows": (lambda: ones(8, 197, 64) @ ones(64, 64), {}),
    "conv1d": (lambda: F.conv1d(ones(2, 80, 100), ones(500, 80, 3)), {"out channels": (500, 504)}),
    "conv2d": (lambda: F.conv2d(ones(2, 3, 32, 32), ones(64, 3, 7, 7)), {"in channels": (3, 8)}),
    "conv2d, one image": (lambda: F.conv2d(ones(3, 32, 32), ones(64, 3, 7, 7)), {"in channels": (3, 8)}),
    "conv2d in groups": (  # ResNeXt's first stage
        lambda: F.conv2d(ones(2, 128, 9, 9), ones(128, 4, 3, 3), groups=32),
        {"in channels": (4, 8), "out channels": (4, 8)},
    ),
    "conv2d by channels": (lambda: F.conv2d(ones(2, 60, 9, 9), ones(60, 1, 3, 3), groups=60), {}),
    "conv3d": (lambda: F.conv3d(ones(2, 64, 4, 4, 4), ones(30, 64, 3, 3, 3)), {"out channels": (30, 32)}),
    "conv_transpose2d": (
        lambda: F.conv_transpose2d(ones(2, 64, 9, 9), ones(64, 3, 4, 4), ones(3)),
        {"out channels": (3, 8)},
    ),
    "conv_transpose2d in groups": (
        lambda: F.conv_transpose2d(ones(2, 24, 9, 9), ones(24, 8, 4, 4), ones(16), groups=2),
        {"in channels": (12, 16)},
    ),
    "attention": (
        lambda: F.scaled_dot_product_attention(*[ones(2, 8, 77, 60)] * 3),
        {"head": (60, 64), "value": (60, 64)},
    ),
    "a vector": (lambda: F.linear(ones(1, 768), ones(7, 768)), {}),
    "a score for each row": (lambda: F.linear(ones(30, 770), ones(1, 770), ones(1)), {}),
    "of one dimension": (lambda: ones(30, 770) @ ones(770), {}),
    "no product": (lambda: torch.softmax(ones(3, 3), -1), {}),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_sizes_that_tensor_cores_must_pad(name):
    call, padded = PRODUCTS[name]
    with FakeTensorMode(), record_casts() as record, autocast("cpu", BF16):
        call()
    products = record.misaligned(8)
    assert [product.op for product in products] == ([record.calls[0].op] if padded else [])
    assert {
        dimension: (product.sizes[dimension], size)
        for product in products
        for dimension, size in product.padded.items()
    } == padded


def test_misaligned_sizes_print_as_a_table(net):
    with record_casts() as record, autocast("cpu", torch.float16):
        net(ones(12, 8))
    rows = [re.split("  +", line.strip()) for line in str(record.misaligned(16)).splitlines()]
    place = rows[1][3]
    assert re.fullmatch(r"test_recording.py:\d+", place)
    assert rows[:3] == [
        ["calls", "operator", "module", "line", "computed in", "sizes", "pad"],
        [
            "2",
            "aten::linear",
            "blocks.*.0",
            place,
            "float16",
            "rows 12, in 8, out 8",
            "rows 12 -> 16, in 8 -> 16, out 8 -> 16",
        ],
        [
            "1",
            "aten::linear",
            "head",
            rows[2][3],
            "float16",
            "rows 12, in 8, out 4",
            "rows 12 -> 16, in 8 -> 16, out 4 -> 16",
        ],
    ]
    assert str(record.misaligned(4)) == "no size to pad in the matrix products and convolutions that were recorded"
    with pytest.raises(ValueError, match=r"multiple is 2\.5; expected a number of 16-bit elements"):
        record.misaligned(2.5)
    with pytest.raises(ValueError, match="multiple is 0; expected a number of 16-bit elements"):
        record.misaligned(0)


def test_misaligned_sizes_by_what_is_computed_in():
    """One-byte elements need twice the multiple; float32 and calls without casts are left out."""
    layer, x = nn.Linear(48, 32), ones(24, 48)
    rules = {"8-bit": "float8_rowwise", "16-bit": "lower", "32-bit": "float32"}
    padded = {}
    for name, rule in rules.items():
        policy = Policy.default("cpu").with_rules({"aten::linear": rule})
        with record_casts() as record, autocast("cpu", BF16, policy=policy):
            layer(x)
        padded[name] = [product.padded for product in record.misaligned(8)]
    assert padded == {"8-bit": [{"rows": 32}], "16-bit": [], "32-bit": []}
    with record_casts() as record, autocast("cpu", BF16):
        ones(9, 9).double() @ ones(9, 9).double()
    assert [call.computed_in for call in record.calls] == [(torch.float64,) * 2]
    assert record.misaligned() == ()
