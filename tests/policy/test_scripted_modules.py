"""Models with modules that TorchScript runs: rules act on those as a whole, and what cannot be done is refused."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampkit import Policy, autocast, half, record_casts, wrap_forward
from ampkit.debugging.snapshot import TrainingSnapshot
from tests.helpers.regions import BF16, FP16, FP32

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")

PLAIN = Policy.default("cpu")


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.norm(torch.relu(self.first(x)) * scale)


class Model(nn.Module):
    def __init__(self, part: Any) -> None:
        super().__init__()
        self.before, self.part, self.after = nn.Linear(4, 4), part, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.part(self.before(x)))


def traced(part: nn.Module) -> Any:
    return torch.jit.trace(part, torch.ones(2, 4))


def loaded(part: nn.Module) -> Any:
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(part), file)
    file.seek(0)
    return torch.jit.load(file)


def model(make: Callable[[nn.Module], Any] = torch.jit.script) -> Any:
    torch.manual_seed(0)
    return Model(make(Part()))


def run(model: Any, policy: Policy) -> tuple[torch.dtype, list[Tensor]]:
    """The dtype of what comes out of the part, and the output and gradients."""
    seen: list[torch.dtype] = []
    handle = model.after.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    with autocast("cpu", policy=policy):
        output = model(torch.linspace(-1, 1, 8).reshape(2, 4))
    handle.remove()
    output.float().square().sum().backward()
    return seen[0], [output, *(param.grad for param in model.parameters())]


@pytest.mark.parametrize("make", [torch.jit.script, traced, loaded])
@pytest.mark.parametrize(
    ("key", "bound"),
    [
        ("part", ["part"]),
        ("**", ["before", "part", "after"]),
        (nn.Module, ["", "before", "part", "after"]),
    ],
)
def test_a_rule_for_a_scripted_module_is_what_it_is_for_one_of_python(make: Any, key: Any, bound: list[str]) -> None:
    scripted, plain = model(make), model(lambda part: part)
    policy = PLAIN.for_modules(scripted, {key: FP32})
    assert [*policy.check().rules[0].modules] == bound
    for _ in range(2):  # the second call runs what TorchScript has optimized
        scripted.zero_grad()
        plain.zero_grad()
        dtype, got = run(scripted, policy)
        _, expected = run(plain, PLAIN.for_modules(plain, {key: FP32}))
        assert dtype is FP32
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert Policy.from_dict(policy.to_dict(), scripted) == policy
    assert PLAIN.for_modules(scripted, {scripted.part: FP32}).check().rules[0].modules == ("part",)


@pytest.mark.parametrize(
    "key",
    [
        "part.first",
        "part.*",
        "**.norm",
        nn.LayerNorm,
        nn.Linear,
        "class torch.nn.modules.normalization:LayerNorm",
    ],
)
def test_a_rule_for_what_torchscript_calls_is_refused(key: Any) -> None:
    scripted = model()
    with pytest.raises(ValueError, match=r"matches 'part\.\w+', which TorchScript calls.* give 'part' the rule"):
        PLAIN.for_modules(scripted, {key: FP32})
    with pytest.raises(ValueError, match=r"matches 'norm', .* of the scripted module the model itself"):
        PLAIN.for_modules(scripted.part, {"norm": FP32})


def test_a_rule_that_the_scripted_module_follows_too_is_none_to_refuse() -> None:
    scripted = model()
    policy = PLAIN.for_modules(scripted, {"part": FP32, nn.Linear: FP32})
    assert policy.check().rules[1].modules == ("before", "after")
    with pytest.raises(ValueError, match=r"Linear' of for_modules matches 'part\.first', which TorchScript calls"):
        PLAIN.for_modules(scripted, {"part": FP32, nn.Linear: FP16})
    with pytest.raises(ValueError, match=r"matches 'part\.first', which TorchScript calls"):
        PLAIN.for_modules(scripted, {scripted.part.first: FP32})


def test_classes_that_modules_had_before_they_were_scripted() -> None:
    scripted = nn.Sequential(torch.jit.script(nn.Linear(4, 4)), torch.jit.script(Part()), nn.Linear(4, 4))
    policy = PLAIN.for_modules(scripted, {Part: FP32})
    assert policy.check().rules[0].modules == ("1",)
    assert PLAIN.for_modules(scripted[:1], {nn.Linear: FP32}).check().rules[0].modules == ("0",)
    assert PLAIN.for_modules(scripted, {torch.jit.ScriptModule: FP32}).check().rules[0].modules == ("0", "1")


def test_a_scripted_list_is_a_container() -> None:
    scripted: Any = nn.ModuleDict({"list": torch.jit.script(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]))})
    policy = PLAIN.for_modules(scripted, {"list": FP32, "list.1": BF16})
    assert policy.check().rules[0].modules == ("list.0", "list.1")
    with autocast("cpu", policy=policy):
        assert [layer(torch.ones(2, 4)).dtype for layer in scripted["list"].children()] == [FP32, BF16]


@pytest.mark.parametrize("make", [torch.jit.script, traced, loaded])
def test_records_and_reports(make: Any) -> None:
    scripted = model(make)
    with record_casts() as record, autocast("cpu"):
        scripted(torch.ones(2, 4))
    assert [call.module for call in record.calls if call.op == "aten::linear"] == ["before", "part", "after"]
    float8 = PLAIN.with_rules({"aten::linear": "float8_rowwise"})
    assert PLAIN.check(scripted).layers == tuple(f"{path} (4, 4) LOWER" for path in ("before", "part.first", "after"))
    assert float8.for_modules(scripted, {"part": FP32}).check(scripted).layers[1] == "part.first (4, 4) float32"
    assert float8.check(make(nn.Sequential(nn.Linear(4, 4)))).layers[0].startswith("0 (4, 4) LOWER: K is 4, N is 4, no")
    layer = torch.jit.script(nn.Linear(32, 16))
    assert float8.check(layer).layers == (
        "the model itself (16, 32) FLOAT8_ROWWISE in forward alone: TorchScript has a backward of its own",
    )


def test_what_cannot_be_put_around_a_scripted_module() -> None:
    part = torch.jit.script(Part())
    part(torch.ones(2, 4))
    for refused in (half, lambda part: wrap_forward(part, "cpu")):
        with pytest.raises(RuntimeError, match="this module is scripted or traced: TorchScript runs its forward"):
            refused(part)


def test_a_snapshot_puts_buffers_of_scripted_modules_back() -> None:
    scripted = Model(torch.jit.script(nn.Sequential(nn.BatchNorm1d(4))))
    before = {name: value.clone() for name, value in scripted.state_dict().items()}
    with TrainingSnapshot(scripted):
        scripted(torch.randn(8, 4))
        assert not torch.equal(scripted.part[0].running_mean, before["part.0.running_mean"])
    torch.testing.assert_close(dict(scripted.state_dict()), before, rtol=0, atol=0)
