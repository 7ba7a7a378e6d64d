"""`Policy.check`: what each rule of `for_modules` means in a model."""

import pytest
import torch
from torch import nn

from ampkit import Policy

POLICY = Policy.default("cpu")


def model() -> nn.Module:
    net = nn.Sequential()
    net.body = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2))
    net.head = nn.Linear(2, 2)
    return net


def test_each_rule_says_what_it_means() -> None:
    net = model()
    rules = {"body.*": torch.float32, nn.LayerNorm: "float32", net.head: torch.float16, "head.*": torch.float32}
    found = POLICY.for_modules(rules).check(net)
    assert [rule.modules for rule in found.rules] == [("body.0", "body.1", "body.2"), ("body.1",), ("head",), ()]
    assert [rule.key for rule in found.unused] == ["'head.*'"]


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        ("haed", "'haed': torch.float32: no module; nearest: head"),
        ("net.head", "'net.head': torch.float32: no module; nearest: head"),
        ("zzz", "'zzz': torch.float32: no module"),
    ],
)
def test_a_pattern_that_means_nothing_shows_what_is_near(pattern: str, line: str) -> None:
    assert str(POLICY.for_modules({pattern: torch.float32}).check(model())) == line


def test_a_compiled_models_names_are_those_underneath() -> None:
    compiled = torch.compile(model(), backend="eager")
    assert POLICY.for_modules({"head": torch.float32}).check(compiled).rules[0].modules == ("head",)     # type: ignore[arg-type]


def test_without_rules_and_without_a_module() -> None:
    assert str(POLICY.check(model())) == "this policy has no rules for modules"
    with pytest.raises(TypeError, match="check takes a module; got str"):
        POLICY.check("head")    # type: ignore[arg-type]
