"""`keep_in_fp32`: the modules that a model of transformers asks to keep in float32, as rules for modules."""

import re
from typing import Any

import pytest
import torch
from torch import nn

from ampkit import Policy, autocast
from ampkit.integrations.keep_in_fp32 import keep_in_fp32

PLAIN = Policy.default("cpu")


class Wanting(nn.Module):
    """A model with the attributes of transformers' models that ask for modules in float32."""

    def __init__(self, wanted: Any = None, strictly: Any = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"q": nn.Linear(4, 4), "wo": nn.Linear(4, 4), "norm": nn.LayerNorm(4)}) for _ in range(2)
        )
        for layer in self.layers:
            layer.register_buffer("sinks", torch.zeros(4))
        self.gate = nn.Linear(4, 4, bias=False)
        self._keep_in_fp32_modules, self._keep_in_fp32_modules_strict = wanted, strictly


def kept_paths(model: nn.Module, dtype: Any) -> list[str]:
    return [path for rule in keep_in_fp32(PLAIN, model, dtype).check().rules for path in rule.modules]


@pytest.mark.parametrize(
    ("wanted", "modules"),
    [
        (["wo.weight", "wo.bias"], ["layers.0.wo", "layers.1.wo"]),
        ({"gate.weight"}, ["gate"]),
        (["q.weight"], []),  # and `q.bias` is not wanted
        (["sinks"], []),  # of a module that has others
        (["layers.1"], ["layers.1.q", "layers.1.wo", "layers.1.norm"]),  # a ModuleDict is never called
        (["layers"], [f"layers.{i}.{name}" for i in range(2) for name in ("q", "wo", "norm")]),
        (["layers.*.norm"], ["layers.0.norm", "layers.1.norm"]),
        (["nor", "gate"], ["layers.0.norm", "layers.1.norm", "gate"]),
        ("gate", ["gate"]),
        (["base"], []),
        ([], []),
        (None, []),
    ],
)
def test_patterns_find_modules(wanted: Any, modules: list[str]) -> None:
    assert kept_paths(Wanting(wanted), "float16") == modules
    assert kept_paths(Wanting(wanted), "bfloat16") == []
    assert kept_paths(Wanting(None, wanted), torch.bfloat16) == kept_paths(Wanting(None, wanted), "fp16") == modules
    inside = nn.ModuleDict({"wo": nn.Linear(4, 4), "model": Wanting(wanted)})
    assert kept_paths(inside, "float16") == [f"model.{path}" for path in modules]
    peft = pytest.importorskip("peft", reason="it is in ampkit[dev]")
    model = peft.get_peft_model(
        Wanting(wanted), peft.LoraConfig(r=2, target_modules=["q", "gate"], modules_to_save=["wo"])
    )
    assert [re.sub(r"base_model\.model\.|\.base_layer", "", path) for path in kept_paths(model, "float16")] == modules


def test_the_policy_stays_data() -> None:
    model = Wanting(["wo", "layers.1.q"])
    policy = keep_in_fp32(PLAIN, model, "fp16")
    assert str(policy.check()).splitlines() == [
        f"'{path}': torch.float32: {path}" for path in ("layers.0.wo", "layers.1.q", "layers.1.wo")
    ]
    assert Policy.from_dict(policy.to_dict(), model) == policy
    assert keep_in_fp32(policy, model, "fp16") is policy


def test_rules_of_the_policy_and_modules_of_16_bits_stay() -> None:
    model = Wanting(["wo", "gate"])
    model.gate.bfloat16()
    compiled: Any = torch.compile(model)
    kept = keep_in_fp32(PLAIN.for_modules(model, {"layers.0.wo": "bf16"}), compiled, "fp16")
    assert [(rule.key, rule.value) for rule in kept.check().rules] == [
        ("'layers.0.wo'", torch.bfloat16),
        ("'layers.1.wo'", torch.float32),
    ]


class Experts(nn.Module):
    _keep_in_fp32_modules = ("experts",)

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = self.gate(x)
        return [expert(x) for expert in self.experts]


def test_a_rule_for_a_container_is_one_for_its_modules() -> None:
    """Which have nearer ones of their own."""
    model = Experts()
    for policy in (
        keep_in_fp32(PLAIN, model, "fp16"),
        PLAIN.for_modules(model, {"experts": "fp32"}),
        PLAIN.for_modules(model, {nn.ModuleList: "fp32", "experts.1": torch.float32}),
    ):
        with autocast("cpu", torch.float16, policy=policy):
            assert [y.dtype for y in model(torch.ones(1, 4))] == [torch.float32] * 2
    policy = PLAIN.for_modules(model, {"experts": "bf16", nn.Sequential: "fp32"})
    assert policy.check().rules[0].modules == ("experts.0", "experts.1")
    with autocast("cpu", torch.float16, policy=policy):
        assert model(torch.ones(1, 4))[0].dtype is torch.float32
    bound = PLAIN.for_modules(model, {"experts": "bf16"})
    assert keep_in_fp32(bound, model, "fp16") is bound


class Computing(nn.Module):
    """Its names depend on the model, as a property."""

    def __init__(self) -> None:
        super().__init__()
        self.wo, self.gate = nn.Linear(4, 4), nn.Linear(4, 4)

    @property
    def _keep_in_fp32_modules(self) -> list[str]:
        return [name for name, _ in self.named_children() if name == "wo"]


def test_names_may_be_a_property() -> None:
    assert kept_paths(Computing(), "float16") == ["wo"]
    assert kept_paths(nn.ModuleDict({"inner": Computing()}), "float16") == ["inner.wo"]
    assert kept_paths(Computing(), "bfloat16") == []


def test_refusals() -> None:
    with pytest.raises(TypeError, match="keep_in_fp32 takes a model; got dict"):
        keep_in_fp32(PLAIN, {}, "fp16")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"dtype is 'half'; expected the region's, torch.float16 or"):
        keep_in_fp32(PLAIN, Wanting(), "half")
    with pytest.raises(ValueError, match=r"_modules of Wanting has \['wo', '\(q'\]; expected regular"):
        keep_in_fp32(PLAIN, Wanting(["wo", "(q"]), "fp16")
