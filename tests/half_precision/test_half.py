"""half and containers: what is converted, what is cast, what is refused."""

import collections
import copy
import dataclasses
import pickle
import threading
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from ampkit.amp import initialize
from ampkit.containers import cast_tree
from ampkit.half_precision.check_half import check_half
from ampkit.half_precision.half import half
from tests.helpers.half_models import both_dtypes


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True)
class Batch:
    image: Any
    label: Any = None
    made: Any = dataclasses.field(init=False, default=None)


FLOAT = torch.ones(1)
FIXED = (*(torch.ones(1, dtype=dtype) for dtype in (torch.int64, torch.bool, torch.complex64)), "text", None, 1.5)
TREES: tuple[Callable[[Any], Any], ...] = (  # containers of a tensor, at several depths
    lambda x: x,
    lambda x: [x, (x, ()), Point(x, [x, *FIXED])],
    lambda x: {"a": x, "b": collections.OrderedDict(c=(x,), d=FIXED)},
    lambda x: [Batch(None), Batch((x, Batch(x)), {"labels": Point(FIXED[0], x)})],
)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("floats", [FLOAT, FLOAT.double(), FLOAT.bfloat16()])
def test_trees_come_back_in_their_own_types_with_floats_cast(tree: Callable[[Any], Any], floats: Tensor) -> None:
    value = tree(floats)
    result = cast_tree(value, torch.float16)
    assert repr(result) == repr(tree(FLOAT.half()))  # has types, dtypes and values
    assert repr(value) == repr(tree(floats))  # the original is untouched
    assert cast_tree(result, torch.float16) is result


def test_other_containers() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    result = cast_tree(packed, torch.float16)
    assert (result.data.dtype, result.batch_sizes.dtype) == (torch.float16, torch.int64)
    largest = cast_tree(torch.ones(2, 2).max(0), torch.float16)
    assert type(largest) is torch.return_types.max
    assert largest.values.dtype is torch.float16
    own = types.SimpleNamespace(to=lambda dtype: dtype)  # a batch class with a `to`, as Apex expects of it
    module = nn.Linear(1, 1)
    assert cast_tree([own, module], torch.float16) == [torch.float16, module]
    assert module.weight.dtype is torch.float32
    transformers = pytest.importorskip("transformers")
    outputs = transformers.modeling_outputs.BaseModelOutput(torch.ones(1), hidden_states=None)
    result = cast_tree(outputs, torch.float16)
    assert type(result) is type(outputs)
    assert result.last_hidden_state.dtype is result["last_hidden_state"].dtype is result[0].dtype is torch.float16
    encoding = transformers.BatchEncoding({"x": torch.ones(1)})
    assert cast_tree(encoding, torch.float16)["x"].dtype is torch.float16
    assert encoding["x"].dtype is torch.float32


class Net(nn.Module):
    """A bit of everything: convolution, norms, attention mask, recurrence, tensors made in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.block = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6))
        self.rnn = nn.LSTM(6, 5, batch_first=True)
        self.register_buffer("mask", torch.tensor([0.0, -1e9]))
        self.register_buffer("ids", torch.arange(2))

    def forward(self, batch: dict[str, Tensor], *, extra: Any = None) -> Any:
        x = self.bn(self.conv(batch["image"]))
        x = self.block(x.mean((1, 2)))[:, None]
        hidden = x.new_zeros(1, len(x), 5)
        y, _ = self.rnn(x, (hidden, torch.zeros_like(hidden)))
        return {"y": y, "extra": extra, "ids": self.ids}


def sample() -> dict[str, Tensor]:
    return {"image": torch.randn(3, 1, 8, 8)}


@both_dtypes
def test_a_half_model_takes_what_it_took_before(dtype: torch.dtype) -> None:
    """And what is converted."""
    model = Net().eval()
    low = half(model, dtype, cast_outputs=torch.float32)
    expected = {name: torch.float32 if name.startswith("bn") else dtype for name, _ in model.named_parameters()}
    assert {name: p.dtype for name, p in low.named_parameters()} == expected
    assert (low.bn.running_var.dtype, low.bn.num_batches_tracked.dtype) == (torch.float32, torch.int64)
    assert (low.mask.dtype, low.ids.dtype) == (dtype, torch.int64)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert isinstance(low, Net)
    assert low.state_dict().keys() == model.state_dict().keys()
    batch = sample()
    output, expected = low(batch, extra=[torch.ones(1).double()]), model(batch)
    torch.testing.assert_close(output["y"], expected["y"], rtol=0.1, atol=0.03)
    assert output["extra"][0].dtype is torch.float32
    assert output["ids"].dtype is torch.int64
    assert batch["image"].dtype is torch.float32
    assert half(model, dtype)(batch)["y"].dtype is dtype


def test_masks_saturate_and_infinities_stay() -> None:
    model = nn.Module()
    values = torch.tensor([torch.finfo(torch.float32).min, -1e9, 1e5, float("inf"), float("nan"), 1.0])
    model.register_buffer("mask", values)
    low = half(model, buffers="all").mask
    assert low[:4].tolist() == [-65504.0, -65504.0, 65504.0, float("inf")]
    assert torch.isnan(low[4])
    wide = half(model, torch.bfloat16, buffers="all").mask
    assert wide[0] == torch.finfo(torch.bfloat16).min


class Rotary(nn.Module):
    """Projects, and multiplies with the cosines of rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 10000.0 ** -(torch.arange(0, 64, 2) / 64), persistent=False)
        self.proj = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[1])[:, None] * self.inv_freq.float()
        return self.proj(x) * angle.cos().to(x.dtype)


@both_dtypes
@pytest.mark.parametrize("level", ["half", "O2", "O3"])
def test_rotary_frequencies_keep_their_digits(level: str, dtype: torch.dtype) -> None:
    """In 16 bits the angle at position 4095 is off by radians."""
    model, x = Rotary(), torch.randn(1, 4096, 32)
    expected, frequencies = model(x), model.inv_freq.clone()
    low: Any = half(model, dtype) if level == "half" else initialize(model, None, level, dtype=dtype, verbosity=0)
    assert low.proj.weight.dtype is dtype
    assert low.inv_freq.dtype is torch.float32
    assert torch.equal(low.inv_freq, frequencies)
    assert torch.nn.functional.cosine_similarity(low(x).float()[0], expected[0]).min() > 0.999
    rounded = half(Rotary(), dtype, buffers="all")
    assert rounded.inv_freq.dtype is dtype
    assert torch.nn.functional.cosine_similarity(rounded(x).float()[0], Rotary()(x)[0]).min() < 0.9


LARGE = torch.finfo(torch.float32).min
BUFFERS: dict[str, tuple[Tensor, bool]] = {  # whether 16 bits hold the values, or the buffer is a mask
    "causal": (torch.ones(4, 4).tril(), True),
    "of -10000": (torch.tensor([0.0, -10000.0]), True),
    "of -1e9": (torch.tensor([0.0, -1e9]), True),
    "of the smallest": (torch.tensor([0.0, LARGE]), True),
    "of -inf": (torch.tensor([0.0, -torch.inf, torch.nan]), True),
    "blur": (torch.tensor([1.0, 2.0, 1.0]) / 16, True),
    "empty": (torch.ones(0), True),
    "double": (torch.ones(2, 2, dtype=torch.float64).tril(), True),
    "counter": (torch.zeros(3), False),
    "average": (torch.ones(2, 2), False),
    "one value": (torch.tensor([0.5, 0.5]), True),
    "one inexact value": (torch.tensor(0.1), False),
    "mean": (torch.tensor([0.485, 0.456, 0.406]), False),
    "large": (torch.tensor([0.0, 70001.0]), False),
    "two large": (torch.tensor([0.0, -20001.0, -30001.0]), False),
    "a digit more": (torch.tensor([0.0, 1.0 + 2.0**-12]), False),
}


@pytest.mark.parametrize("name", BUFFERS)
@both_dtypes
def test_buffers_that_16_bits_would_change_keep_their_dtype(name: str, dtype: torch.dtype) -> None:
    """`buffers` chooses otherwise. Kept modules keep theirs in float32."""
    values, follows = BUFFERS[name]
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_buffer("values", values)
    for buffers, converted in (("exact", follows), ("all", True), ("none", False)):
        low = half(model, dtype, buffers=buffers)[0]
        assert low.values.dtype is (dtype if converted else values.dtype)
        assert low.weight.dtype is dtype
        assert converted or torch.equal(low.values.nan_to_num(), values.nan_to_num())
        assert half(model, dtype, "0", buffers=buffers)[0].values.dtype is torch.float32


@pytest.mark.parametrize("buffers", ["exact", "none"])
@both_dtypes
def test_statistics_of_a_norm_follow_its_weights(dtype: torch.dtype, buffers: Any) -> None:
    """Its kernels do not take float32 statistics beside 16-bit weights."""
    for norm in (nn.BatchNorm1d(3), nn.InstanceNorm1d(3, affine=True, track_running_stats=True)):
        norm.running_mean.fill_(0.3)
        low = half(norm, dtype, (), buffers=buffers).eval()
        assert low.running_mean.dtype is low.weight.dtype is dtype
        assert low(torch.randn(4, 3, 5)).dtype is dtype


@pytest.mark.parametrize("kind", ["Llama", "GPTNeoX", "Falcon"])
@both_dtypes
def test_transformers_with_rotary_embeddings_run(kind: str, dtype: torch.dtype) -> None:
    """Their buffers stay float32, and no float32 tensor meets 16-bit weights."""
    transformers = pytest.importorskip("transformers", reason="it is in ampkit[dev]")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    config = getattr(transformers, f"{kind}Config")(**sizes, eos_token_id=1, bos_token_id=0)
    model: Any = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    ids, frequencies = torch.randint(100, (2, 16)), {name: b.clone() for name, b in model.named_buffers()}
    low = half(model, dtype)
    assert frequencies
    torch.testing.assert_close(dict(low.named_buffers()), frequencies, rtol=0, atol=0)
    expected, got = model(input_ids=ids)[0], low(input_ids=ids)[0].float()
    assert (got - expected).norm() < (1e-2 if dtype is torch.bfloat16 else 2e-3) * expected.norm()


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.485, 0.456]))
        self.head = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x - self.mean)


def test_an_error_of_mixed_dtypes_names_the_buffers_that_were_not_converted() -> None:
    model, x = Normalized(), torch.ones(1, 2)
    with pytest.raises(RuntimeError, match="must have the same dtype") as caught:
        half(model, torch.bfloat16)(x)
    (note,) = caught.value.__notes__
    assert "because torch.bfloat16 may change their values: mean (torch.float32); cast the result" in note
    for working in (half(model, torch.bfloat16, buffers="all"), half(model, torch.bfloat16, in_region=True)):
        torch.testing.assert_close(working(x).float(), model(x), rtol=0.02, atol=0.02)
    with pytest.raises(RuntimeError, match="must have the same dtype") as caught:
        half(Net(), torch.bfloat16).block(torch.ones(1, 6))
    assert not hasattr(caught.value, "__notes__")


class Noted(nn.Linear):
    """Notes what it gets, what its weight is, and what its product comes out as."""

    seen: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        Noted.seen |= {x.dtype, self.weight.dtype, y.dtype}
        return y


class Listed(nn.Module):
    """Has its layers in containers, which are never called themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleList([Noted(3, 3)]), Noted(3, 3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0][0](x))  # type: ignore[index]


@pytest.mark.parametrize("in_region", [False, True])
@pytest.mark.parametrize(
    "keep", ["1*", ("1.layers.0.0", "1.layers.1"), (Noted,), "module", "1.layers", (nn.ModuleList,)], ids=str
)
@both_dtypes
def test_kept_modules_compute_in_float32(keep: Any, dtype: torch.dtype, in_region: bool) -> None:
    """Named by pattern, path, class, as the module or by a container; in a region too, which is off inside."""
    model = nn.Sequential(nn.Linear(3, 3), Listed(), nn.Linear(3, 3))
    low = half(model, dtype, (model[1],) if keep == "module" else keep, in_region=in_region)
    returned = []
    low[1].register_forward_hook(lambda module, args, output: returned.append(output.dtype))
    Noted.seen = set()
    assert low(torch.ones(2, 3)).dtype is dtype
    assert Noted.seen == {torch.float32}
    assert returned == [dtype]
    assert {param.dtype for param in low[0].parameters()} == {dtype}
    assert not torch.is_autocast_enabled("cpu")
    model[1].forward = model[1].forward
    with pytest.raises(RuntimeError, match=r"forward of this .* was replaced on the instance"):
        half(model, keep_fp32="1")


@pytest.mark.parametrize("in_region", [False, True])
def test_copies_pickles_threads_and_compiled_code_keep_casts(in_region: bool) -> None:
    """Of kept modules too, and of one that is kept itself; what is a region in one thread is one in each."""
    low, batch = half(Net(), torch.bfloat16, (nn.LayerNorm,), in_region=in_region).eval(), sample()
    expected, outputs = low(batch)["y"], []
    thread = threading.Thread(target=lambda: outputs.append(low(batch)["y"]))
    thread.start()
    thread.join()
    outputs += [copied(batch)["y"] for copied in (copy.deepcopy(low), pickle.loads(pickle.dumps(low)))]
    torch.testing.assert_close(outputs, [expected] * 3, rtol=0, atol=0)
    norm, x = half(nn.LayerNorm(4), torch.bfloat16, (nn.LayerNorm,), torch.float64), torch.randn(2, 4)
    copied = copy.deepcopy(pickle.loads(pickle.dumps(norm)))
    assert torch.equal(copied(x), norm(x))
    assert (copied(x).dtype, copied.weight.dtype) == (torch.float64, torch.float32)
    head = half(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.bfloat16, in_region=in_region)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(head, backend="eager", fullgraph=True)(x), head(x))


def test_a_parameter_that_does_not_fit_is_found_before_anything_changes() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with torch.no_grad():
        model[1].weight[0, 0] = -1e6
    with pytest.raises(
        ValueError, match=r"parameter 1.weight holds 1e\+06, and the maximum of torch.float16 is 6.55e\+04; keep"
    ):
        half(model, in_place=True)
    assert type(model) is nn.Sequential
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    half(model, keep_fp32="1")
    params = list(model.parameters())
    assert half(model, torch.bfloat16, in_place=True) is model
    assert [*map(id, params)] == [*map(id, model.parameters())]
    assert params[0].dtype is torch.bfloat16


def test_models_with_modules_of_torchscript_are_refused() -> None:
    model = nn.Sequential(nn.Sequential(torch.jit.script(nn.Linear(3, 3))), nn.Linear(3, 3))
    for convert in (half, initialize_o2, lambda model: check_half(model, torch.ones(2, 3))):
        with pytest.raises(
            RuntimeError, match=r"module 0\.0 is scripted or traced.*convert the model before torch\.jit"
        ):
            convert(model)
        with pytest.raises(RuntimeError, match="this module is scripted or traced: TorchScript runs its forward"):
            convert(torch.jit.script(nn.Linear(3, 3)))
    assert {param.dtype for param in model.parameters()} == {torch.float32}


def initialize_o2(model: nn.Module) -> None:
    initialize(model, opt_level="O2")


def test_what_half_refuses() -> None:
    model, tied = Net(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    for refused, error, message in (
        (lambda: half("model"), TypeError, r"half takes an nn.Module, got str"),  # type: ignore[arg-type]
        (lambda: half(model, torch.float32), ValueError, r"dtype is torch.float32; expected torch.float16, torch.bf"),
        (lambda: half(model, buffers="some"), ValueError, "buffers is 'some'; expected 'exact', 'all' or 'none'"),  # type: ignore[arg-type]
        (lambda: half(model, cast_outputs=torch.int8), ValueError, r"cast_outputs is torch.int8; expected a dtype"),
        (lambda: half(model, keep_fp32="blocks.*"), ValueError, r"pattern 'blocks.\*' names no module of this Net;"),
        (lambda: half(model, keep_fp32=[nn.Linear(1, 1)]), ValueError, "holds a Linear that is not part of this Net"),
        (lambda: half(model, keep_fp32=[3]), TypeError, r"keep_fp32 holds 3; expected"),  # type: ignore[list-item]
        (lambda: half(tied, keep_fp32="1"), ValueError, "1.weight and 0.weight are one tensor.*name both their"),
        (lambda: half(half(model)), RuntimeError, r"this Net has been converted by ampkit.half or amp.initialize"),
    ):
        with pytest.raises(error, match=message):
            refused()
    with torch.device("meta"):  # parameters are converted unseen
        low = half(Net())
        assert (low.conv.weight.dtype, low.mask.dtype) == (torch.float16, torch.float32)
