"""The operator lists against the running torch: its dispatcher and its headers."""

import pytest
import torch

from ampkit import Policy
from ampkit.policy.operators import resolve
from ampkit.policy.rules import Rule
from ampkit.policy.torch_lists import TORCH
from tests.tools.operator_drift import ONLY_WHERE_BUILT, list_drift, registered, rule_of


@pytest.mark.parametrize("device", TORCH)
def test_torch_lists_are_what_torch_amp_does(device: str) -> None:
    """Every operator that torch.amp casts, the dtype that it casts to, and no other operator."""
    assert not (drift := list_drift(device)), "\n".join(drift)


# Fake tensors of MAIA do not meet autocast; its rules are those of torch's header, as another test holds.
@pytest.mark.parametrize("device", ["cpu", "cuda", "mps", "xpu", "mtia"])
def test_the_rule_of_every_operator_is_seen(device: str) -> None:
    unseen = {name for name in registered(device) if rule_of(resolve(name), device) is None}
    # Up to torch 2.12; an operator object refuses named tensors.
    named = {name for name in unseen if "name" in name.partition(".")[2].lower()}
    assert unseen - named <= set(ONLY_WHERE_BUILT)
    assert len(registered(device)) > 90


def test_every_device_type_with_autocast_has_a_list() -> None:
    for name in ("cpu", "cuda", "hip", "xpu", "mps", "hpu", "xla", "mtia", "meta", "vulkan", "lazy"):
        assert torch.amp.is_autocast_available(name) <= (name in TORCH or name == "hip"), name
    assert [name for name in TORCH if not torch.amp.is_autocast_available(name)] == []


def test_in_place_and_out_overloads_are_never_listed() -> None:
    for device in TORCH:
        for op in Policy.default(device).rules():
            assert not op._schema.is_mutable, op


def test_dtype_arguments_are_there_to_be_set() -> None:
    for device in TORCH:
        for op, rule in Policy.default(device).rules().items():
            if rule is Rule.FLOAT32_DTYPE_ARG:
                overloads = [getattr(op.overloadpacket, name) for name in op.overloadpacket.overloads()]
                assert "dtype" in {arg.name for overload in overloads for arg in overload._schema.arguments}, op
