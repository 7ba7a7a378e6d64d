"""Which implementation serves a call, and what is said when one cannot."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ampkit_kernels
from ampkit_kernels import TritonUnavailable, dispatch, unscale_
from ampkit_kernels import tensors as kernel_tensors

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_auto_never_interprets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not dispatch.uses_triton("auto", CPU)
    assert dispatch.uses_triton("triton", CPU)
    assert not dispatch.uses_triton("reference", CPU)


def test_orders_that_cannot_be_carried_out_raise_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(TritonUnavailable, match="the tensors are on the CPU: set TRITON_INTERPRET=1"):
        unscale_([torch.ones(2)], torch.ones(()), torch.zeros(()), impl="triton")
    with pytest.raises(TritonUnavailable, match="the tensors are on meta"):
        dispatch.uses_triton("triton", torch.device("meta"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(
        TritonUnavailable, match="TRITON_INTERPRET is set: the interpreter copies its arguments"
    ):
        dispatch.uses_triton("triton", CUDA)
    assert not dispatch.uses_triton("auto", CUDA)


def test_missing_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        dispatch, "_triton_missing", lambda: "Triton is not installed: pip install 'triton>=3.6'"
    )
    assert dispatch.why_not_triton(CUDA) == "Triton is not installed: pip install 'triton>=3.6'"
    assert not dispatch.uses_triton("auto", CUDA)


@pytest.mark.parametrize(
    ("capability", "runs"), [((7, 5), False), ((8, 0), True), ((9, 0), True), ((10, 0), True)]
)
def test_old_devices_take_pytorch(monkeypatch: pytest.MonkeyPatch, capability: tuple, runs: bool) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Some GPU")
    dispatch._device_too_old.cache_clear()
    try:
        assert dispatch.uses_triton("auto", CUDA) is runs
        if not runs:
            with pytest.raises(
                TritonUnavailable, match=r"Some GPU has compute capability 7.5; .* 8.0 or newer"
            ):
                dispatch.uses_triton("triton", CUDA)
    finally:
        dispatch._device_too_old.cache_clear()


def test_rocm_is_left_to_pytorch_until_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert dispatch.why_not_triton(CUDA) == "the kernels have not been verified on ROCm"


def test_unknown_impl() -> None:
    with pytest.raises(ValueError, match="unknown impl 'cuda'; expected 'auto', 'triton' or 'reference'"):
        unscale_([torch.ones(2)], torch.ones(()), torch.zeros(()), impl="cuda")


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4).flatmap(
        lambda shape: st.tuples(st.just(shape), st.permutations(range(len(shape))), st.booleans())
    )
)
def test_density_is_pytorchs(case: tuple) -> None:
    shape, order, sliced = case
    tensor = torch.zeros(shape).permute(order)
    if sliced:
        tensor = tensor[..., ::2]
    assert kernel_tensors.is_dense(tensor) == torch.ops.aten.is_non_overlapping_and_dense.default(tensor)
    assert not kernel_tensors.may_overlap(tensor)


def test_overlap_is_seen() -> None:
    base = torch.zeros(20)
    assert kernel_tensors.may_overlap(base.as_strided((4, 3), (2, 1)))
    assert kernel_tensors.may_overlap(base[:1].expand(4))
    assert not kernel_tensors.may_overlap(base.as_strided((4, 2), (4, 1)))


def test_backends_are_the_modules_and_have_the_same_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """By device, and remembered; what the reference has, the kernels have."""
    from ampkit_kernels import reference, triton_ops

    assert ampkit_kernels.backend(torch.ones(1)) is reference
    assert ampkit_kernels.backend(torch.ones(1, device="meta")) is reference
    for name in (
        "unscale_", "norm_and_check", "multiply_", "nonfinite_counts", "cast_", "unscale_into_", "adamw_", "sgd_",
    ):
        assert callable(getattr(reference, name))
        assert callable(getattr(triton_ops, name))

    class OnCuda:
        is_cpu, device = False, CUDA

    monkeypatch.setattr(dispatch, "_backends", {})
    monkeypatch.setattr(dispatch, "uses_triton", lambda impl, device: impl == "auto" and device == CUDA)
    assert ampkit_kernels.backend(OnCuda()) is triton_ops
    monkeypatch.setattr(dispatch, "uses_triton", lambda impl, device: pytest.fail("asked again"))
    assert ampkit_kernels.backend(OnCuda()) is triton_ops
