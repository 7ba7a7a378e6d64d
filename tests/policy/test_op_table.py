"""The operator lists as data: names, folding, version spans, and the promises of the default lists."""

import runpy
from pathlib import Path

import pytest

from ampkit.policy import operators
from ampkit.policy.default_lists import DEFAULT_EXTRA
from ampkit.policy.operators import fold
from ampkit.policy.rules import Group, Rule
from ampkit.policy.torch_lists import TORCH


def test_fold_refuses_an_operator_that_is_listed_twice() -> None:
    with pytest.raises(ValueError, match="'aten::mm' is listed twice: as LOWER and as FLOAT32"):
        fold((Group(Rule.LOWER, "why", "mm"), Group(Rule.FLOAT32, "why", "bmm aten::mm")))


def test_fold_leaves_out_other_versions_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = (
        Group(Rule.LOWER, "why", "mm"),
        Group(Rule.FLOAT32, "why", "exp", since=(2, 12)),
        Group(Rule.KEEP, "why", "log", until=(2, 12)),
    )
    for version, names in {(2, 11): {"mm", "log"}, (2, 12): {"mm", "exp"}, (2, 13): {"mm", "exp"}}.items():
        monkeypatch.setattr(operators, "_torch_version", lambda version=version: version)
        assert {op.name().removeprefix("aten::") for op in fold(groups)} == names


def test_listed_names_that_torch_lacks_are_left_out_with_one_warning() -> None:
    """ampkit's lists have no such names: the warning would fail the other tests."""
    with pytest.warns(
        UserWarning,
        match=(
            r"does not have these operators of ampkit's lists, which are ignored: conv2d\.gone_overload, "
            r"gone_from_torch\. "
            r"The lists are made for torch 2\.11 to 2\.15; `make operators` in a checkout compares them"
        ),
    ):
        layer = fold((Group(Rule.LOWER, "why", "mm gone_from_torch conv2d.gone_overload"),))
    assert fold((Group(Rule.LOWER, "why", "mm gone_from_torch"),)) == layer  # without a second warning
    assert [(op.name(), answer) for op, answer in layer.items()] == [("aten::mm", (Rule.LOWER, "why"))]


# Fused kernels, for which other devices have the dense operators.
ONLY_CUDA = {
    "cudnn_convolution",
    "cudnn_convolution_transpose",
    "_cudnn_rnn",
    "miopen_rnn",
    "_thnn_fused_gru_cell",
    "_thnn_fused_lstm_cell",
    "_scaled_dot_product_flash_attention",
}


def test_default_does_on_every_device_what_it_does_on_cuda() -> None:
    """Except for torch's own rules for the device."""

    def rules(groups: tuple[Group, ...]) -> dict[str, Rule]:
        return {op.name().removeprefix("aten::"): rule for op, (rule, _) in fold(groups).items()}

    assert set(TORCH) == set(DEFAULT_EXTRA)
    cuda = rules(TORCH["cuda"]) | rules(DEFAULT_EXTRA["cuda"])
    for device in TORCH:
        ours, theirs = rules(DEFAULT_EXTRA[device]), rules(TORCH[device])
        assert [name for name, rule in ours.items() if theirs.get(name) is rule or rule is Rule.BANNED] == []
        apart = {
            name
            for name, rule in cuda.items()
            if (theirs | ours).get(name) is not rule
            and (name in ours or name not in theirs)
            and rule is not Rule.BANNED
            and "name" not in name.partition(".")[2].lower()  # no region takes those
        }
        assert apart <= ONLY_CUDA | {"cumprod"}, device  # whose rule torch changed in 2.13


def test_the_documents_say_what_the_table_says() -> None:
    docs = Path(__file__).resolve().parents[2] / "docs"
    module = runpy.run_path(str(docs / "make_operators.py"))
    text = (docs / "operators.md").read_text(encoding="utf-8")
    assert text == module["render"](), "run: python docs/make_operators.py"
    page = (docs / "policy.md").read_text(encoding="utf-8")
    assert [rule.name for rule in Rule if f"`{rule.name}`" not in page] == []
