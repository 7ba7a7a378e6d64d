"""`Policy.keep_in_fp32`: what a model of transformers wants kept in float32, as rules for its modules."""

from typing import Any

import pytest
import torch
from torch import nn

from ampkit import Policy, autocast


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.wo, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)
        self.sinks = nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q(x) + self.wo(x)


class Wanting(nn.Module):
    """A model with wishes, as transformers' have them."""

    def __init__(self, wanted: Any = None, strictly: Any = None) -> None:
        super().__init__()
        self.layers, self.gate = nn.ModuleList([Layer(), Layer()]), nn.Linear(4, 4)
        self._keep_in_fp32_modules, self._keep_in_fp32_modules_strict = wanted, strictly

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        layer: Any = self.layers[0]
        return layer.wo(x), self.gate(x)


PLAIN = Policy.default("cpu")


def found(model: nn.Module, dtype: Any = "float16", policy: Policy = PLAIN) -> list[str]:
    return [path for rule in policy.keep_in_fp32(model, dtype).check().rules for path in rule.modules]


@pytest.mark.parametrize(("wanted", "modules"), [
    (["wo"], ["layers.0.wo", "layers.1.wo"]),
    ({"gate.weight", "gate.bias"}, ["gate"]),
    (["gate.weight"], []),                      # and `gate.bias` is not wanted
    (["sinks"], []),                            # a parameter of a module that has others
    (["layers.1"], ["layers.1"]),
    (["layers.*.norm"], ["layers.0.norm", "layers.1.norm"]),
    (["nor"], ["layers.0.norm", "layers.1.norm"]),
    (["absent"], []), ([], []), (None, []),
])
def test_patterns_find_modules(wanted: Any, modules: list[str]) -> None:
    assert found(Wanting(wanted)) == modules
    assert found(Wanting(wanted), "bfloat16") == []
    assert found(Wanting(None, wanted), torch.bfloat16) == found(Wanting(None, wanted)) == modules
    inside = nn.ModuleDict({"other": Layer(), "model": Wanting(wanted)})
    assert found(inside) == [f"model.{path}" for path in modules]


def test_numbers_become_stars_and_the_policy_stays_data() -> None:
    model = Wanting(["wo", "layers.1.q"])
    policy = PLAIN.keep_in_fp32(model, "fp16")
    assert str(policy.check()).splitlines() == [
        "'layers.*.wo': torch.float32: layers.0.wo, layers.1.wo", "'layers.1.q': torch.float32: layers.1.q"
    ]
    assert Policy.from_dict(policy.to_dict(), model) == policy
    assert policy.keep_in_fp32(model, "fp16") is policy


def test_rules_of_the_policy_and_modules_of_16_bits_stay() -> None:
    model = Wanting(["wo", "gate"])
    model.gate.bfloat16()
    policy = PLAIN.for_modules(model, {"layers.0.wo": "bf16"})
    kept = policy.keep_in_fp32(torch.compile(model), "fp16")      # pyright: ignore[reportArgumentType]
    assert [(rule.key, rule.value) for rule in kept.check().rules] == [
        ("'layers.0.wo'", torch.bfloat16), ("'layers.1.wo'", torch.float32)
    ]
    assert policy.keep_in_fp32(Wanting(), "fp16") is policy


def test_they_compute_in_float32() -> None:
    model = Wanting(["wo"])
    with autocast("cpu", torch.float16, policy=PLAIN.keep_in_fp32(model, torch.float16)):
        assert [out.dtype for out in model(torch.ones(2, 4))] == [torch.float32, torch.float16]


def test_refusals() -> None:
    with pytest.raises(TypeError, match="keep_in_fp32 takes a model; got dict"):
        PLAIN.keep_in_fp32({}, "fp16")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"dtype is 'half'; expected that of the region, torch.float16 or"):
        PLAIN.keep_in_fp32(Wanting(), "half")
