"""The table as data: names, folding, version spans, and what the default lists promise."""

import runpy
from pathlib import Path

import pytest
import torch

from ampkit.policy import op_table
from ampkit.policy.op_table import DEFAULT_EXTRA, TORCH, Group, Rule, fold

aten = torch.ops.aten


def test_fold_refuses_what_means_nothing() -> None:
    with pytest.raises(ValueError, match="'aten::mm' is listed twice: as LOWER and as FLOAT32"):
        fold((Group(Rule.LOWER, "why", "mm"), Group(Rule.FLOAT32, "why", "bmm mm")))
    with pytest.raises(ValueError, match="'aten::mm' is listed twice: as LOWER and as LOWER"):
        fold((Group(Rule.LOWER, "why", "mm aten::mm"),))
    with pytest.raises(ValueError, match="unknown operator 'mmm'"):
        fold((Group(Rule.LOWER, "why", "mmm"),))
    with pytest.raises(TypeError, match="rule of 'mm' is 'lower'; expected a member of Rule"):
        fold((Group("lower", "why", "mm"),))  # type: ignore[arg-type]


def test_fold_leaves_out_other_versions_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = (
        Group(Rule.LOWER, "why", "mm"),
        Group(Rule.FLOAT32, "why", "exp", since=(2, 12)),
        Group(Rule.KEEP, "why", "log", until=(2, 12)),
    )
    for version, names in {(2, 11): {"mm", "log"}, (2, 12): {"mm", "exp"}, (2, 13): {"mm", "exp"}}.items():
        monkeypatch.setattr(op_table, "_torch_version", lambda version=version: version)
        assert {op.name().removeprefix("aten::") for op in fold(groups)} == names


def test_both_tables_know_the_same_devices_and_say_why() -> None:
    assert set(TORCH) == set(DEFAULT_EXTRA)
    for group in (group for lists in (TORCH, DEFAULT_EXTRA) for groups in lists.values() for group in groups):
        assert len(group.why) > 10, group
        assert group.ops.split(), group


# Fused kernels that the dense operators of other devices stand for.
ONLY_CUDA = {
    "cudnn_convolution", "cudnn_convolution_transpose", "_cudnn_rnn", "miopen_rnn", "_thnn_fused_gru_cell",
    "_thnn_fused_lstm_cell", "_scaled_dot_product_flash_attention",
}


@pytest.mark.parametrize("device", TORCH)
def test_default_does_on_every_device_what_it_does_on_cuda(device: str) -> None:
    """But for rules of torch's own for that device."""
    ours, theirs = fold(DEFAULT_EXTRA[device]), fold(TORCH[device])
    assert not [op.name() for op, rule in ours.items() if theirs.get(op) is rule or rule is Rule.BANNED]
    cuda = fold(TORCH["cuda"]) | fold(DEFAULT_EXTRA["cuda"])
    apart = {
        op.name().removeprefix("aten::") for op, rule in cuda.items()
        if (theirs | ours).get(op) is not rule and (op in ours or op not in theirs) and rule is not Rule.BANNED
        and "name" not in op._overloadname.lower()      # no region takes named tensors
    }
    assert apart <= ONLY_CUDA | {"cumprod"}     # whose rule torch changed in 2.13


def test_the_document_says_what_the_table_says() -> None:
    docs = Path(__file__).resolve().parents[2] / "docs"
    module = runpy.run_path(str(docs / "make_operators.py"))
    text = (docs / "operators.md").read_text(encoding="utf-8")
    assert text == module["render"](), "run: python docs/make_operators.py"
    page = (docs / "policy.md").read_text(encoding="utf-8")
    assert all(f"`{rule.name}`" in page for rule in Rule)


def test_listed_names_that_torch_lacks_are_left_out_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = (Group(Rule.LOWER, "why", "mm gone_from_torch conv2d.gone_overload"), Group(Rule.FLOAT32, "why", "exp"))
    monkeypatch.setitem(op_table.TORCH, "ipu", groups)
    op_table.left_out.cache_clear()
    try:
        with pytest.warns(UserWarning, match=(
            r"does not have these operators of ampkit's lists, .*: conv2d\.gone_overload, gone_from_torch\. "
            r"The lists are made for torch 2\.11 to 2\.15; `make operators` in a checkout compares them"
        )) as caught:
            found = fold(groups)
        assert found == {aten.mm.default: Rule.LOWER, aten.exp.default: Rule.FLOAT32}
        assert fold(groups[:1]) == {aten.mm.default: Rule.LOWER}
        assert len(caught) == 1
        with pytest.raises(ValueError, match="unknown operator 'of_no_list'"):
            fold((Group(Rule.LOWER, "why", "of_no_list"),))
    finally:
        op_table.left_out.cache_clear()


def test_no_listed_name_is_left_out_of_a_torch_that_was_tried() -> None:
    assert not op_table.left_out()
