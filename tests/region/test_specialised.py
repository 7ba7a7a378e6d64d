"""Kernels written for one operator: they do what the general kernel does, to the bit, and say what they do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ampkit import Policy, autocast
from ampkit.policy.operator_keys import resolve
from ampkit.region import specialised
from ampkit.region.thread_state import thread
from ampkit.region.weight_cache import RegionCache
from ampkit.torch_internals import dispatcher
from ampkit.torch_internals.bindings import NAMES, binding
from ampkit.torch_internals.kernels import GENERAL, install
from tests.helpers.op_samples import difference, op_db_calls, region, run_with_gradients
from tests.helpers.regions import BF16, FP32

POLICIES = (Policy.torch("cpu"), Policy.default("cpu"))


def _kernels(monkeypatch: pytest.MonkeyPatch, *, written: bool) -> Iterator[None]:
    """Which kernels operators take in here, in regions with caches that are new."""
    with monkeypatch.context() as patch:
        patch.setattr(specialised, "SPECIALISE", written)
        patch.setattr(thread, "cache", RegionCache())
        yield


@pytest.fixture
def general(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every operator takes the general kernel."""
    yield from _kernels(monkeypatch, written=False)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Operators take the kernels written for them, also where AMPKIT_GENERAL_KERNELS forces the general one."""
    yield from _kernels(monkeypatch, written=True)


class _Asked:
    """Stands where an open region's mode stands and takes down with what an operator is called."""

    def __init__(self) -> None:
        self.open, self.as_torch = True, False
        self.excluded_keys, self.redispatch_keys = dispatcher.keysets(())
        self.calls: list[Any] = []
        self.kernels = GENERAL

    def __torch_dispatch__(self, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        self.calls.append((op, args, kwargs))
        raise LookupError


def _required(op: Any) -> list[Any]:
    plain = {"int": 1, "float": 1.0, "number": 1, "bool": False, "List[int]": [1], "Tensor": torch.ones(2, 2)}
    plain |= {"List[Tensor]": [torch.ones(2, 2)]}
    return [
        plain.get(str(argument.type)) for argument in op._schema.arguments
        if not argument.kwarg_only and not argument.has_default_value()
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_binding_calls_its_operator_with_the_same_arguments(name: str) -> None:
    """What is left out has the schema's default there too."""
    op = resolve(name)
    install((op,), dispatcher.KEY)
    args, asked = _required(op), _Asked()
    dispatcher.put_in_tls(dispatcher.TLS_NAME, asked)
    dispatcher.set_included(dispatcher.KEY, True)
    try:
        for call in (op._op, binding(op)):
            with pytest.raises(LookupError):
                call(*args)
    finally:
        dispatcher.set_included(dispatcher.KEY, False)
        asked.open = False
    assert binding(op) is not op._op
    one, other = asked.calls
    assert one[0] is other[0] is op
    assert str(one[1:]) == str(other[1:])


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.base)
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.filterwarnings("ignore")       # torch warns once in a process
def test_every_sample_comes_out_the_same_in_both_ways(
    policy: Policy, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    calls = [call for call in op_db_calls(dtype, 2) if "empty" not in call.name]
    want = [run_with_gradients(call, region(policy, BF16)) for call in calls]
    request.getfixturevalue("general")
    wrong = [
        f"{call.name}: {found}" for call, expected in zip(calls, want, strict=True)
        if (found := difference(expected, run_with_gradients(call, region(policy, BF16))))
    ]
    assert len(calls) > 900
    assert not wrong, "\n".join(wrong)


def test_an_operator_of_another_policy_goes_on_below() -> None:
    """Both policies have kernels in this process; the one without a rule leaves the operator as torch.amp does."""
    x = torch.randn(4, 4, dtype=BF16, requires_grad=True)
    with autocast("cpu", policy=Policy.torch("cpu").with_rules({"aten::softmax.int": "float32"})):
        assert torch.softmax(x, -1).dtype is FP32
    with autocast("cpu"):
        assert torch.softmax(x, -1).dtype is FP32
        assert torch.logsumexp(x, -1).dtype is FP32
    with autocast("cpu", policy=Policy.torch("cpu")):
        assert torch.softmax(x, -1).dtype is BF16
        assert torch.logsumexp(x, -1).dtype is BF16
        assert torch.einsum("ij,jk", x.float(), x.float()).dtype is BF16      # a composite: its parts meet the region
        assert torch.pow(x, 2).grad_fn is not None
        assert torch.rsub(x, 1).dtype is BF16


def test_no_python_runs_for_operators_that_only_ampkit_lists() -> None:
    """Under `Policy.torch`, for any device, once regions with the default list have run."""
    x, called = torch.randn(4, 4), []
    with autocast("cpu"):
        assert torch.special.bessel_j0(x.bfloat16()).dtype is FP32
    with autocast("cpu", policy=Policy.torch("cpu")):
        sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_filename))
        try:
            torch.special.bessel_j0(x)
        finally:
            sys.setprofile(None)
    assert not [file for file in called if "ampkit" in file]


def test_a_disabled_region_calls_the_operator_at_once(written: None) -> None:
    """For plain tensors, by one function of Python; what is written in terms of others takes none for its parts."""
    x, w, called = torch.randn(4, 4), nn.Parameter(torch.randn(4, 4)), []
    with autocast("cpu"), torch.autocast("cpu", enabled=False):
        nn.functional.linear(x, w)
        sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_filename) if event == "call" else None)
        try:
            nn.functional.linear(x, w)
        finally:
            sys.setprofile(None)
    assert [file for file in called if "ampkit" in file] == ["<ampkit dispatch>", "<ampkit aten::linear LOWER>"]


def test_ctrl_c_after_any_call_of_a_kernel_leaves_the_keys_as_they_were(written: None) -> None:
    """Python runs a signal's handler as a C function returns: here at every one of them."""
    x, w = torch.ones(2, 2, requires_grad=True), nn.Parameter(torch.ones(2, 2))
    keys = dispatcher.KEY, dispatcher.autocast_key("cpu")

    def interrupted(n: int) -> bool:
        seen = 0

        def profile(frame: Any, event: str, arg: Any) -> None:
            nonlocal seen
            if event == "c_return" and frame.f_code.co_filename.startswith("<ampkit"):
                seen += 1
                if seen == n:
                    raise KeyboardInterrupt

        sys.setprofile(profile)
        try:
            torch.mm(x, w)
        except KeyboardInterrupt:
            return True
        finally:
            sys.setprofile(None)
        return False

    with autocast("cpu"):
        torch.mm(x, w)
        n = 1
        while interrupted(n):
            assert not any(map(dispatcher.is_excluded, keys)), f"at call {n} of the kernel"
            n += 1
        assert n > 8
        assert torch.mm(x, w).dtype is BF16
