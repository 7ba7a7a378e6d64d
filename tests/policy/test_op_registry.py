"""The operator lists against the running torch: its dispatcher and its headers."""

import re
from pathlib import Path

import pytest
import torch

from ampkit import Policy
from ampkit.policy.op_table import TORCH, Rule, fold
from ampkit.policy.operator_keys import resolve
from tests.tools.operator_drift import ONLY_WHERE_BUILT, list_drift, registered, rule_of


@pytest.mark.parametrize("device", TORCH)
def test_torch_lists_are_what_torch_amp_does(device: str) -> None:
    """Every operator that torch.amp casts, what it casts it to, and no other."""
    drift = list_drift(device)
    assert not drift.new, f"torch casts these and the list does not know: {drift.new}"
    assert not drift.gone, f"the list names these and torch does not cast them: {drift.gone}"
    assert not drift.different, f"the list and torch differ in these: {drift.different}"


# Fake tensors of MAIA do not meet autocast; its rules are those of torch's header, as another test holds.
@pytest.mark.parametrize("device", ["cpu", "cuda", "mps", "xpu", "mtia"])
def test_the_rule_of_every_operator_is_seen(device: str) -> None:
    unseen = {name for name in registered(device) if rule_of(resolve(name), device) is None}
    # Up to torch 2.12; an operator object refuses named tensors.
    named = {name for name in unseen if "name" in name.partition(".")[2].lower()}
    assert unseen - named <= set(ONLY_WHERE_BUILT)
    assert len(registered(device)) > 90


def test_every_device_type_with_autocast_has_a_list() -> None:
    for name in ("cpu", "cuda", "hip", "ipu", "xpu", "mps", "hpu", "xla", "mtia", "maia", "meta", "vulkan", "lazy"):
        assert torch.amp.is_autocast_available(name) <= (name in TORCH or name == "hip"), name
    assert all(map(torch.amp.is_autocast_available, TORCH))


MACROS = {
    "AT_FORALL_LOWER_PRECISION_FP": Rule.LOWER,
    "AT_FORALL_FP32": Rule.FLOAT32,
    "AT_FORALL_FP32_SET_OPT_DTYPE": Rule.FLOAT32_DTYPE_ARG,
    "AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE": Rule.FLOAT32_DTYPE_ARG,
    "AT_FORALL_PROMOTE": Rule.PROMOTE,
}


def rules_in_header(text: str) -> dict[str, Rule]:
    """The rule of every operator that torch's autocast header lists for accelerators, by name."""
    found = {}
    for macro, body in re.findall(r"#define (AT_FORALL_\w+)\(_\)((?:.*\\\n)*.*\n)", text):
        if macro == "AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE":
            names = re.findall(r'"([\w.]+)"', body)
        else:
            names = [".".join(filter(None, pair)) for pair in re.findall(r"_\((\w+)(?:, (\w+))?\)", body)]
        for name in names:
            found[f"aten::{name}"] = MACROS[macro]
    return found


@pytest.mark.parametrize("device", ["cuda", "xpu", "mtia", "maia"])
def test_accelerator_rules_are_those_of_torch_s_header(device: str) -> None:
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    if not header.exists():
        pytest.skip("this torch was installed without its headers")
    wanted = rules_in_header(header.read_text())
    assert len(wanted) > 100
    listed = {op.name(): rule for op, rule in fold(TORCH[device]).items()}
    apart = {
        "aten::binary_cross_entropy", "aten::cudnn_convolution", "aten::cudnn_convolution_transpose",
        "aten::linalg_matrix_sqrth",
    }
    apart |= {f"aten::{name}" for name in ONLY_WHERE_BUILT}
    assert {name: rule for name, rule in listed.items() if name not in apart} == wanted
    assert listed["aten::binary_cross_entropy"] is Rule.BANNED


def test_in_place_and_out_overloads_are_never_listed() -> None:
    for device in TORCH:
        for op in Policy.default(device).rules():
            assert not op._schema.is_mutable, op


def test_dtype_arguments_are_there_to_be_set() -> None:
    for device in TORCH:
        for op, rule in Policy.default(device).rules().items():
            if rule is Rule.FLOAT32_DTYPE_ARG:
                overloads = [getattr(op.overloadpacket, name) for name in op.overloadpacket.overloads()]
                assert any(arg.name == "dtype" for one in overloads for arg in one._schema.arguments), op
